"""How an engine is set up. Facts only: nothing here touches a device."""

from dataclasses import dataclass, fields
from typing import Any

from jpaged.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float32")
POLICIES = ("fcfs", "priority")
PREEMPTIONS = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What users choose when they start an engine; `None` means that the engine decides and reports its choice.

    Attributes:
        model: a directory, an Orbax checkpoint, a `.gguf` file, a hub id, or `demo`.
        dtype: of weights, activations and pages; "auto" takes bfloat16 where the device has instructions for it.
        max_model_len: longest sequence (prompt and output) in tokens; `None` takes the model's own limit.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: token budget of one step; any positive number works.
        page_size: tokens per page; `None` takes 16 (128 on TPU).
        num_pages: pages in the device pool; `None` sizes the pool by `kv_memory_fraction`.
        kv_memory_fraction: share of the memory left after the weights that pages may take; `None` takes 0.9 on an
            accelerator and 0.2 on a CPU, which other programs share.
        enable_prefix_caching: keep full pages of what was computed, and use them for requests that begin the same.
        host_tier_gib: host memory for pages that leave the device: swapped-out requests, evicted prefixes.
        max_pinned_fraction: share of the pool that pinned prefixes may take.
        preemption: what happens to a request that must give way: its pages are swapped to the host tier, or dropped
            and computed again; "auto" takes what is cheaper by measured rates.
        policy: who runs next: "fcfs" (first come, first served) or "priority".
        overlap: plan the next step while the device runs this one.
        seed: seeds the noise of requests that bring no seed of their own; `None` takes fresh entropy.
        tensor_parallel_size: devices that share each layer.
        profile_directory: write a profile of the first steps there: a trace for jax's tools, and a table.
        profile_steps: most steps of that profile; it ends before if nothing is left to do.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    page_size: int | None = None
    num_pages: int | None = None
    kv_memory_fraction: float | None = None
    enable_prefix_caching: bool = True
    host_tier_gib: float = 0.0
    max_pinned_fraction: float = 0.5
    preemption: str = "auto"
    policy: str = "fcfs"
    overlap: bool = True
    seed: int | None = None
    tensor_parallel_size: int = 1
    profile_directory: str | None = None
    profile_steps: int = 200

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range, naming the field, the value and the range."""
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("policy", self.policy, POLICIES)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "profile_steps"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "page_size", "num_pages"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        fraction = self.kv_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(f"kv_memory_fraction is {fraction!r}, it must be above 0 and at most 1")
        if not 0 <= self.max_pinned_fraction < 1:
            raise ConfigError(f"max_pinned_fraction is {self.max_pinned_fraction!r}, it must be at least 0 and below 1")
        if not 0 <= self.host_tier_gib < float("inf"):
            raise ConfigError(f"host_tier_gib is {self.host_tier_gib!r}, it must be at least 0")
        if self.preemption == "swap" and self.host_tier_gib == 0:
            raise ConfigError('preemption is "swap" and host_tier_gib is 0; give the host tier some memory')

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> "EngineConfig":
        """Raises ConfigError for an unknown option, naming the known ones."""
        known = [field.name for field in fields(cls) if field.name != "model"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(model, **options)

    def options(self) -> dict[str, Any]:
        """All fields but the model, as `from_options` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, it must be one of {', '.join(known)}")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number of at least 1")
