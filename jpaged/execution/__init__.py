"""RUN one step: buckets, the packed batch, the KV cache's size, the jitted step, the sampler, the runner."""
