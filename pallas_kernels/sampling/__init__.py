"""Drawing a step's tokens from their logits, and saying how likely they were."""
