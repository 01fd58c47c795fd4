"""The machine that a benchmark ran on, in words."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """For example "2 cores of AMD EPYC 9R14"; accelerators are named by jax, if it is loaded anyway."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {names[0] if names else platform.processor() or platform.machine()}"
