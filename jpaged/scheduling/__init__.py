"""WHO runs next. Plain host code; never imports jax."""
