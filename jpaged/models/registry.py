"""Architecture name -> the network and how its checkpoints name its parameters. A new model is one line here, a
reader in spec.py and its own file."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpaged.errors import ModelError
from jpaged.models import llama, opt
from jpaged.models.spec import WEIGHT_DTYPES, ModelSpec

Model = llama.Llama | opt.OPT


@dataclass(frozen=True)
class Architecture:
    model_class: type[Model]
    checkpoint_names: dict[str, tuple[str, str | None]]


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.Llama, llama.CHECKPOINT_NAMES),
    "MistralForCausalLM": Architecture(llama.Llama, llama.CHECKPOINT_NAMES),
    "OPTForCausalLM": Architecture(opt.OPT, opt.CHECKPOINT_NAMES),
}


def find_architecture(name: str) -> Architecture:
    """Raises ModelError for an architecture that jpaged does not know."""
    if name not in ARCHITECTURES:
        raise ModelError(f"architecture {name!r} is not known; jpaged knows {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]


def build_model(spec: ModelSpec, dtype: jax.typing.DTypeLike) -> Model:
    """The network with abstract parameters (shapes and dtypes, no storage); costs milliseconds and no memory.

    Raises:
        ModelError: an unknown architecture, or a dtype that weights cannot have.
    """
    if jnp.dtype(dtype).name not in WEIGHT_DTYPES:
        raise ModelError(f"weights cannot be {jnp.dtype(dtype).name}; use {', '.join(WEIGHT_DTYPES)}")
    return find_architecture(spec.architecture).model_class(spec, jnp.dtype(dtype))
