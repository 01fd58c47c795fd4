"""How checkpoints name their tensors, and where each tensor goes in our fused, stacked parameters."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jpaged.errors import ModelError
from jpaged.layers.mlp import gate_up_blocks
from jpaged.models.registry import build_model, find_architecture
from jpaged.models.spec import ModelSpec
from jpaged.parallel.sharding import parameter_paths

# Tensors that old or other exporters write and that no network reads.
_HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attention\.bias)$")
# Checkpoints of the bare network leave out one or both of these.
_PREFIXES = ("", "model.", "model.decoder.")


@dataclass(frozen=True)
class Slot:
    """The place of one checkpoint tensor: `part` of `layer` of the parameter at `path`; `shape` is the tensor's."""

    path: str
    layer: int | None
    part: str | None
    shape: tuple[int, ...]


def checkpoint_slots(spec: ModelSpec) -> dict[str, Slot]:
    """Checkpoint name -> slot, for every tensor that a checkpoint of this model must have."""
    shapes = {path: p.get_value().shape for path, p in parameter_paths(build_model(spec, np.float32)).items()}
    slots = {}
    for template, (path, part) in find_architecture(spec.architecture).checkpoint_names.items():
        if path not in shapes:
            continue  # a bias or a head that this model does not have
        if "{layer}" not in template:
            slots[template] = Slot(path, None, part, shapes[path])
            continue
        shape = _part_shape(path, part, shapes[path][1:], spec)
        for layer in range(spec.num_layers):
            slots[template.format(layer=layer)] = Slot(path, layer, part, shape)
    return slots


def _part_shape(path: str, part: str | None, shape: tuple[int, ...], spec: ModelSpec) -> tuple[int, ...]:
    if part is None:
        return shape
    rows = {
        "q": spec.num_heads * spec.head_dim,
        "k": spec.num_kv_heads * spec.head_dim,
        "v": spec.num_kv_heads * spec.head_dim,
        "gate": spec.intermediate_size,
        "up": spec.intermediate_size,
    }
    return (rows[part], *shape[2:])


def slot_view(parameter: np.ndarray, slot: Slot, spec: ModelSpec) -> np.ndarray:
    """The view of the (contiguous) parameter array that a slot fills; its elements are in the tensor's order."""
    view = parameter if slot.layer is None else parameter[slot.layer]
    if slot.part is None:
        return view
    rest = view.shape[2:]
    group = spec.queries_per_kv
    if slot.part in ("q", "k", "v"):
        heads = view.reshape(spec.num_kv_heads, group + 2, spec.head_dim, *rest)
        return heads[:, {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, None)}[slot.part]]
    blocks = gate_up_blocks(spec)
    return view.reshape(blocks, 2, spec.intermediate_size // blocks, *rest)[:, ("gate", "up").index(slot.part)]


def match_names(
    found: dict[str, tuple[int, ...]], slots: dict[str, Slot], spec: ModelSpec, source: str
) -> dict[str, str]:
    """Returns slot name -> name in the checkpoint, whose names and shapes are `found`.

    Raises:
        ModelError: one report of everything that is missing, left over or of another shape.
    """
    names: dict[str, str] = {}
    extra, misshapen = [], []
    for name, shape in found.items():
        slot_name = next((prefix + name for prefix in _PREFIXES if prefix + name in slots), None)
        if slot_name is None:
            if not _HARMLESS.search(name) and not (name == "lm_head.weight" and spec.tied_embeddings):
                extra.append(name)
        elif slot_name in names:
            extra.append(f"{name} (the same tensor as {names[slot_name]})")
        else:
            names[slot_name] = name
            if shape != slots[slot_name].shape:
                misshapen.append(f"{name} is {list(shape)}, expected {list(slots[slot_name].shape)}")
    missing = [name for name in slots if name not in names]
    report_mismatch(source, spec, missing=missing, extra=extra, misshapen=misshapen)
    return names


def report_mismatch(
    source: str, spec: ModelSpec, *, missing: Iterable[str], extra: Iterable[str], misshapen: Iterable[str]
) -> None:
    """Raises ModelError naming all of them, if there are any."""
    lists = {"missing": list(missing), "unexpected": list(extra), "of another shape": list(misshapen)}
    faults = [f"{len(names)} {fault}: {', '.join(names)}" for fault, names in lists.items() if names]
    if faults:
        raise ModelError(
            f"{source} does not hold the weights that its config.json describes ({spec.architecture}); "
            + "; ".join(faults)
        )
