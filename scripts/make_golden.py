"""Writes the golden files that tests/parity compares with, using transformers on PyTorch as the reference.

Needs its own environment, for jpaged never imports torch; any Python that torch supports will do:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers
    /tmp/golden/bin/python scripts/make_golden.py                    # the tiny random models
    /tmp/golden/bin/python scripts/make_golden.py --demo MODEL_DIR   # greedy tokens of the demo model

Tiny models: configurations and prompts below; weights come from tests/parity/seeded.py, so only logits are stored,
and the mean error of transformers' own bfloat16 against them on the longest prompt.
Demo model: for each prompt its ids, 64 greedy tokens in float32 (past any end of sequence), and at each step the
distance between the two best logits, which tells a real difference from a near-tie.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.parity.seeded import seeded_tensor  # noqa: E402

GOLDEN_DIR = ROOT / "tests/parity/golden"
DEMO_TOKENS = 64
SEED = 7

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_dim": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama_gqa_tied": _LLAMA,
    "llama_mha_untied": _LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": False, "rope_theta": 500000.0},
    "llama_mqa_wide_heads": _LLAMA | {"num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 100},
    "llama_biases": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama_rope_linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_rope_llama3": _LLAMA | {"rope_scaling": _LLAMA3},
    "llama_rope_yarn": _LLAMA | {"rope_scaling": _YARN},
    "llama_rope_yarn_mscale": {key: value for key, value in _LLAMA.items() if key != "rope_theta"}
    | {
        "rope_parameters": _YARN
        | {"rope_theta": 5000.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False}
    },
    "mistral_window": _LLAMA
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 5,
        "tie_word_embeddings": False,
    },
    "mistral_full": _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "opt_tied": _OPT,
    "opt_no_biases_gelu": _OPT
    | {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "opt_norm_after_projected": _OPT
    | {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "tie_word_embeddings": False},
}
PROMPT_LENGTHS = (1, 7, 40)

RAW_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders",
    "La Révolution française a commencé en",
    "Die Hauptstadt von Deutschland heißt",
    "日本の首都は",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees Celsius because",
)
CHAT_PROMPTS = (
    "What is the capital of Italy?",
    "Write a haiku about autumn leaves.",
    "Explain in one paragraph why the sky is blue.",
    "Write a Python function that reverses a string.",
    "List three uses of a brick.",
    "Translate into Spanish: Where is the library?",
    "¿Cuál es el río más largo del mundo?",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog does not react.",
    "Give me a JSON object with the keys name and age.",
)


def make_tiny() -> None:
    """Writes tiny_cases.json (configurations, seed, prompts, bfloat16 error) and tiny_logits.npz (case/prompt)."""
    cases, logits = {}, {}
    for case, config in CASES.items():
        model = _reference_model(config, SEED)
        state = np.random.RandomState(len(case))
        prompts = [state.randint(3, config["vocab_size"], length).tolist() for length in PROMPT_LENGTHS]
        for index, prompt in enumerate(prompts):
            logits[f"{case}/{index}"] = _logits(model, prompt)
        exact, rounded = logits[f"{case}/{len(prompts) - 1}"], _logits(model.bfloat16(), prompts[-1])
        error = round(float(np.abs(exact - rounded).mean()), 5)
        cases[case] = {"config": config, "seed": SEED, "prompts": prompts, "bfloat16_mean_error": error}
        print(f"{case}: logits deviate by {exact.std():.2f}, bfloat16 errs by {error:.4f}")
    GOLDEN_DIR.mkdir(parents=True, exist_ok=True)
    (GOLDEN_DIR / "tiny_cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    np.savez_compressed(GOLDEN_DIR / "tiny_logits.npz", **logits)


@torch.no_grad()
def _logits(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    """[T] ids -> [T, V] float32."""
    return model(torch.tensor([prompt])).logits[0].float().numpy()


def _reference_model(config: dict[str, Any], seed: int) -> torch.nn.Module:
    # transformers completes the dicts it is given in place: hand it a copy.
    parsed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    model = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        parameter.data = torch.from_numpy(seeded_tensor(name, tuple(parameter.shape), seed))
    model.tie_weights()
    return model


def make_demo(model_dir: Path) -> None:
    """Writes demo_tokens.json: per prompt its kind, text, ids, the greedy ids and the margin at each step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [("raw", text, tokenizer(text)["input_ids"]) for text in RAW_PROMPTS]
    for text in CHAT_PROMPTS:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(("chat", text, tokenizer(rendered, add_special_tokens=False)["input_ids"]))
    records = []
    for kind, text, ids in prompts:
        tokens, margins = _greedy(model, ids)
        records.append({"kind": kind, "text": text, "prompt_token_ids": ids, "token_ids": tokens, "margins": margins})
        print(f"{kind} {text!r} -> {tokenizer.decode(tokens)!r}")
    lines = ",\n ".join(json.dumps(record, ensure_ascii=False) for record in records)
    GOLDEN_DIR.mkdir(parents=True, exist_ok=True)
    (GOLDEN_DIR / "demo_tokens.json").write_text(f"[{lines}]\n")


@torch.no_grad()
def _greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """64 tokens, with no regard to ends of sequence, and best minus second-best logit at each."""
    out = model(torch.tensor([prompt]), use_cache=True)
    tokens, margins = [], []
    for _ in range(DEMO_TOKENS):
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        out = model(torch.tensor([[tokens[-1]]]), cache=out.cache, use_cache=True)
    return tokens, margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, metavar="MODEL_DIR", help="write the demo model's tokens instead")
    arguments = parser.parse_args()
    if arguments.demo is None:
        make_tiny()
    else:
        make_demo(arguments.demo)


if __name__ == "__main__":
    main()
