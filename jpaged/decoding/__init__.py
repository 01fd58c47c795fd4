"""HOW a request ends (and, later, branches). Plain host code; never imports jax."""
