"""WHERE tokens live: page pools, page tables. Plain host code; never imports jax."""
