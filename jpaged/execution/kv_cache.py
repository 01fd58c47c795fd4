"""How many pages fit: from a memory budget, checked with shown arithmetic before any weight is loaded."""

from dataclasses import dataclass
from pathlib import Path

import jax

from jpaged.errors import ConfigError

ACCELERATOR_FRACTION = 0.9
CPU_FRACTION = 0.2  # other programs live in the same memory
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a device must hold, in bytes, on the fullest device of the mesh."""

    weight_bytes: int
    step_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes: all of it, and what it could still give."""

    total_bytes: int
    free_bytes: int


def device_memory(device: jax.Device) -> DeviceMemory:
    """Ask a device; a CPU's memory is the host's."""
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        limit = statistics["bytes_limit"]
        return DeviceMemory(limit, limit - statistics.get("bytes_in_use", 0))
    return host_memory()


def host_memory() -> DeviceMemory:
    """Raises ConfigError on a system that does not tell."""
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    }
    if "MemAvailable" not in sizes:
        raise ConfigError("this system does not say how much memory is free (no MemAvailable); set num_pages")
    return DeviceMemory(sizes["MemTotal"], sizes["MemAvailable"])


def size_pool(
    needs: MemoryNeeds,
    *,
    memory: DeviceMemory,
    fraction: float,
    pages_per_seq: int,
    max_num_seqs: int,
    num_pages: int | None,
) -> int:
    """Return how many pages the pool gets.

    A given `num_pages` must fit; otherwise the pool takes `fraction` of what the weights and the step leave of the
    whole memory, rounded down to three significant bits, and never more than all rows at full length can use. The whole
    memory and not the free one, as long as that is enough, and coarsely: the number is part of every compiled shape,
    and the next start, with other free memory, shall find its compiled programs.

    Raises:
        ConfigError: the numbers do not fit; the message shows the sum.
    """
    fixed_bytes = needs.weight_bytes + needs.step_bytes
    left_bytes = memory.free_bytes - fixed_bytes
    arithmetic = (
        f"free memory {_gib(memory.free_bytes)} - weights {_gib(needs.weight_bytes)} - step {_gib(needs.step_bytes)}"
        f" = {_gib(left_bytes)}"
    )
    if num_pages is not None:
        if num_pages * needs.page_bytes > left_bytes:
            raise ConfigError(
                f"{num_pages} pages of {needs.page_bytes} bytes take {_gib(num_pages * needs.page_bytes)},"
                f" but {arithmetic}; lower num_pages to at most {max(left_bytes, 0) // needs.page_bytes}"
            )
        return num_pages
    share_bytes = int((memory.total_bytes - fixed_bytes) * fraction)
    if share_bytes > left_bytes:
        share_bytes = int(left_bytes * fraction)
    affordable = max(share_bytes, 0) // needs.page_bytes
    if affordable < pages_per_seq:
        raise ConfigError(
            f"{arithmetic}; {fraction:g} of it holds {affordable} pages of {needs.page_bytes} bytes, and one sequence"
            f" of the longest length needs {pages_per_seq}; lower max_model_len, raise kv_memory_fraction, or free"
            " memory"
        )
    return max(_round_down(min(affordable, pages_per_seq * max_num_seqs)), pages_per_seq)


def _round_down(pages: int) -> int:
    step = 1 << max(pages.bit_length() - 3, 0)
    return pages // step * step


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
