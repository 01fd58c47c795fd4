"""Writes the golden files that tests/parity compares with, using transformers on PyTorch as the reference.

Needs its own environment, for jpaged never imports torch; any Python that torch supports will do:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers
    /tmp/golden/bin/python scripts/make_golden.py                    # the tiny random models
    /tmp/golden/bin/python scripts/make_golden.py --demo MODEL_DIR   # greedy tokens and beams of the demo model

Tiny models: configurations and prompts below; weights come from tests/parity/seeded.py, so only logits are stored,
and the mean error of transformers' own bfloat16 against them on the longest prompt.
Demo model: for each prompt its ids, 64 greedy tokens in float32 (past any end of sequence), and at each step the
distance between the two best logits, which tells a real difference from a near-tie.
Beams of both: for each search its prompt, its parameters by the names of jpaged.BeamSearchParams, and all returned
hypotheses with their scores, best first. A search that rounding could change is refused: tests ask for equality.
"""

import argparse
import itertools
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

# Few layers and a small vocabulary: end tokens then come up often. These and the seeds were picked so that searches
# complete many hypotheses, of many lengths; `_check_beams` holds them to it.
_BEAM_MODEL = {"num_hidden_layers": 2, "vocab_size": 48}
BEAM_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama_one_eos": (1, _LLAMA | _BEAM_MODEL | {"eos_token_id": 23}),
    "llama_three_eos": (5, _LLAMA | _BEAM_MODEL | {"eos_token_id": [45, 28, 7]}),
    "opt_one_eos": (2, _OPT | _BEAM_MODEL | {"eos_token_id": 44}),
    "opt_two_eos": (6, _OPT | _BEAM_MODEL | {"eos_token_id": [17, 18]}),
}
BEAM_PROMPT_LENGTHS = (3, 9, 14)
BEAM_WIDTHS = (2, 4, 8)
BEAM_LENGTH_PENALTIES = (-0.7, 0.0, 0.6, 1.0, 1.4)
BEAM_EARLY_STOPPING = (True, False, "never")
BEAM_TOKENS = 16
MIN_SCORE_GAP = 1e-5  # between hypotheses of one search; float32 rounding moves scores by less
DEMO_BEAMS = {"beam_width": 4, "max_tokens": 24}

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
DEMO_BEAM_PROMPTS = (
    ("raw", "The capital of France is", {"length_penalty": 1.0, "early_stopping": False}),
    ("raw", "1, 1, 2, 3, 5, 8, 13,", {"length_penalty": 0.6, "early_stopping": True}),
    ("chat", "What is the capital of Italy?", {"length_penalty": 1.4, "early_stopping": "never"}),
    ("chat", "Translate into Spanish: Where is the library?", {"length_penalty": 1.0, "early_stopping": False}),
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


def make_tiny_beams() -> None:
    """Writes beams.json: per case its configuration, seed and searches."""
    texts = []
    for case, (seed, config) in BEAM_CASES.items():
        model = _reference_model(config, seed)
        precise = _reference_model(config, seed).double()
        state = np.random.RandomState(5)
        searches = []
        for length in BEAM_PROMPT_LENGTHS:
            prompt = state.randint(3, config["vocab_size"], length).tolist()
            for width, penalty, stopping in itertools.product(BEAM_WIDTHS, BEAM_LENGTH_PENALTIES, BEAM_EARLY_STOPPING):
                params = {
                    "beam_width": width,
                    "max_tokens": BEAM_TOKENS,
                    "length_penalty": penalty,
                    "early_stopping": stopping,
                }
                searches.append(_search(model, precise, prompt, params))
        _check_beams(case, searches, _eos_token_ids(model))
        lines = ",\n  ".join(json.dumps(search, separators=(",", ":")) for search in searches)
        texts.append(f'"{case}": {{"config": {json.dumps(config)}, "seed": {seed}, "searches": [\n  {lines}]}}')
    GOLDEN_DIR.mkdir(parents=True, exist_ok=True)
    (GOLDEN_DIR / "beams.json").write_text("{\n " + ",\n ".join(texts) + "\n}\n")


def _search(
    model: torch.nn.Module, precise: torch.nn.Module, prompt: list[int], params: dict[str, Any]
) -> dict[str, Any]:
    """Search with `model` (float32); `precise` is the same model in float64, which must find the same."""
    token_ids, scores = _beams(model, prompt, params)
    gaps = -np.diff(scores)
    if gaps.min() < MIN_SCORE_GAP or _beams(precise, prompt, params)[0] != token_ids:
        raise SystemExit(f"rounding decides the search {params} after {prompt}; take another prompt")
    rounded = [round(score, 6) for score in scores]
    return {"prompt_token_ids": prompt, "params": params, "token_ids": token_ids, "scores": rounded}


def _beams(model: torch.nn.Module, prompt: list[int], params: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """All returned hypotheses, best first: generated ids, the end token if there is one included, and scores."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params["beam_width"],
        num_return_sequences=params["beam_width"],
        max_new_tokens=params["max_tokens"],
        length_penalty=params["length_penalty"],
        early_stopping=params["early_stopping"],
        eos_token_id=_eos_token_ids(model),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # beam_indices is -1 where a hypothesis has ended and padding follows.
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    generated = out.sequences[:, len(prompt) :].tolist()
    return [row[:length] for row, length in zip(generated, lengths, strict=True)], out.sequences_scores.tolist()


def _eos_token_ids(model: torch.nn.Module) -> list[int]:
    eos = model.config.eos_token_id
    return [eos] if isinstance(eos, int) else eos


def _check_beams(case: str, searches: list[dict[str, Any]], eos_token_ids: list[int]) -> None:
    """The searches must tell rules apart: ends of all kinds, and results that change with every parameter."""
    hypotheses = [ids for search in searches for ids in search["token_ids"]]
    completed = [ids for ids in hypotheses if ids[-1] in eos_token_ids]
    lengths = {len(ids) for ids in completed}
    ends = {ids[-1] for ids in completed}
    changes = {}
    for name in ("length_penalty", "early_stopping"):
        results: dict[str, set[str]] = {}
        for search in searches:
            others = {key: value for key, value in search["params"].items() if key != name}
            found = results.setdefault(json.dumps([search["prompt_token_ids"], others]), set())
            found.add(json.dumps(search["token_ids"]))
        changes[name] = sum(len(found) > 1 for found in results.values()) / len(results)
    share = len(completed) / len(hypotheses)
    print(
        f"{case}: {len(searches)} searches, {share:.0%} of hypotheses complete, of lengths {sorted(lengths)};"
        f" results change with {', '.join(f'{name} in {part:.0%}' for name, part in changes.items())}"
    )
    if not (0.3 < share < 1 and len(lengths) >= 6 and ends == set(eos_token_ids) and min(changes.values()) > 0.3):
        raise SystemExit(f"the searches of {case} show too little; take other seeds, prompts or end tokens")


def make_demo(model_dir: Path) -> None:
    """Writes demo_tokens.json: per prompt its kind, text, ids, the greedy ids and the margin at each step."""
    tokenizer, model = _demo_model(model_dir)
    records = []
    for kind, text in [*(("raw", text) for text in RAW_PROMPTS), *(("chat", text) for text in CHAT_PROMPTS)]:
        ids = _encode(tokenizer, kind, text)
        tokens, margins = _greedy(model, ids)
        records.append({"kind": kind, "text": text, "prompt_token_ids": ids, "token_ids": tokens, "margins": margins})
        print(f"{kind} {text!r} -> {tokenizer.decode(tokens)!r}")
    _write_records("demo_tokens.json", records)


def make_demo_beams(model_dir: Path) -> None:
    """Writes demo_beams.json: a list of searches."""
    tokenizer, model = _demo_model(model_dir)
    precise = _demo_model(model_dir)[1].double()
    searches = []
    for kind, text, settings in DEMO_BEAM_PROMPTS:
        search = _search(model, precise, _encode(tokenizer, kind, text), DEMO_BEAMS | settings)
        searches.append(search)
        print(f"{kind} {text!r} -> {[tokenizer.decode(ids) for ids in search['token_ids']]}")
    _write_records("demo_beams.json", searches)


def _demo_model(model_dir: Path) -> tuple[Any, torch.nn.Module]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    return transformers.AutoTokenizer.from_pretrained(model_dir), model.eval()


def _encode(tokenizer: Any, kind: str, text: str) -> list[int]:
    if kind == "raw":
        return tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def _write_records(name: str, records: list[dict[str, Any]]) -> None:
    lines = ",\n ".join(json.dumps(record, ensure_ascii=False) for record in records)
    GOLDEN_DIR.mkdir(parents=True, exist_ok=True)
    (GOLDEN_DIR / name).write_text(f"[{lines}]\n")


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
    parser.add_argument(
        "--demo", type=Path, metavar="MODEL_DIR", help="write the demo model's tokens and beams instead"
    )
    arguments = parser.parse_args()
    if arguments.demo is None:
        make_tiny()
        make_tiny_beams()
    else:
        make_demo(arguments.demo)
        make_demo_beams(arguments.demo)


if __name__ == "__main__":
    main()
