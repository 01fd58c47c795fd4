"""Sets the device up before anything imports jax: CPU only, eight fake devices for the tensor-parallel tests."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
