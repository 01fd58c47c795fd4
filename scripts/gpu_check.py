"""The whole check of jpaged on a GPU: correctness, the kernels' speed, a Llama end to end. Run by scripts/gpu_check.sh.

    python scripts/gpu_check.py [--json FILE] [--model DIR] [--seconds N] [--tiny]

Stages, the shortest useful ones first; each is a process of its own with a time limit, and its figures are in the JSON
file as soon as it ends, so that whatever stops the check leaves what was measured:

    device     what there is, and which implementation is chosen
    cases      every case against the reference, through the kernels
    kernels    scripts/bench_kernels.py
    logits     teacher-forced logits in bfloat16 through pages (chunks, a span, single tokens), the CPU's in float32
    offline64  scripts/bench_offline.py

The model is a random Llama with the demo model's shapes, the same every time, unless a directory is given. `--tiny` is
for trying the script on a CPU. Exits with 1 if a stage failed.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STAGE_SECONDS = {"device": 60, "cases": 180, "kernels": 150, "logits": 90, "offline64": 200}
# The demo model's shapes; the tiny one's vocabulary is as large because the workload draws from it.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = LLAMA | {"hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
TINY |= {"num_key_value_heads": 1}
# Two tokens whose reference logits are closer than this are as good as tied in bfloat16; logits are spread by 3.
TIE = 0.25


def main() -> None:
    arguments = parse_arguments()
    if arguments.stage:
        print(json.dumps(STAGES[arguments.stage](arguments)))
        return
    deadline = time.monotonic() + arguments.seconds
    figures: dict[str, Any] = {"passed": False}
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or str(write_model(Path(directory) / "model", arguments.tiny))
        for stage in arguments.stages or STAGE_SECONDS:
            limit = min(STAGE_SECONDS[stage] * (4 if arguments.tiny else 1), deadline - time.monotonic())
            figures[stage] = run_stage(stage, model, arguments.tiny, limit)
            failed = [name for name in STAGE_SECONDS if not figures.get(name, {"passed": True})["passed"]]
            figures["passed"] = not failed
            Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="gpu_check.json")
    parser.add_argument("--model", help="a model directory with safetensors")
    parser.add_argument("--seconds", type=float, default=460.0, help="for all stages together")
    parser.add_argument("--stages", nargs="*", choices=tuple(STAGE_SECONDS), help="only these")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stage", choices=tuple(STAGE_SECONDS), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_stage(stage: str, model: str, tiny: bool, limit_seconds: float) -> dict[str, Any]:
    """The figures of one stage, run in a process of its own; what it prints goes on to our output."""
    print(f"\n==> {stage} (at most {limit_seconds:.0f} s)", flush=True)
    if limit_seconds < 10:
        return {"passed": False, "error": "no time left"}
    start = time.monotonic()
    partial_file(stage).unlink(missing_ok=True)
    command = [sys.executable, __file__, "--stage", stage, "--model", model, *["--tiny"] * tiny]
    # A process group of its own, so that what a stage started ends with it.
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    problem = None
    try:
        output, _ = process.communicate(timeout=limit_seconds)
        problem = f"exit status {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        problem = f"took longer than {limit_seconds:.0f} s"
    print(output[-6000:], flush=True)
    figures: dict[str, Any] = {"passed": False}
    if problem is None:
        figures = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    elif partial_file(stage).exists():
        figures |= json.loads(partial_file(stage).read_text())
    if problem:
        figures |= {"passed": False, "error": f"{problem}: {output[-800:]}"}
    return figures | {"stage_seconds": round(time.monotonic() - start, 1)}


def partial_file(stage: str) -> Path:
    """Where a stage leaves what it has so far."""
    return Path(tempfile.gettempdir()) / f"jpaged_gpu_check_{stage}.json"


def write_model(directory: Path, tiny: bool) -> Path:
    """A random Llama whose weights are bfloat16 numbers in float32 files, so that both types load the same model."""
    import ml_dtypes
    import numpy as np

    from tests.fakes.tiny_models import random_tensors, write_checkpoint

    config = TINY if tiny else LLAMA
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16).astype(np.float32) for name, tensor in random_tensors(config, 0).items()
    }
    return write_checkpoint(config, tensors, directory)


def check_device(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax

    from pallas_kernels.paged_attention import PageSpec, choose

    device = jax.devices()[0]
    spec = PageSpec(1, 8, 16, 8, 128, "bfloat16")
    kind = device.device_kind
    attention, reason = choose(device.platform, spec, num_q_heads=32, q_dtype="bfloat16", device_kind=kind)
    print(f"{kind}: {reason}")
    return {
        "passed": arguments.tiny or type(attention).__name__ == "GpuPagedAttention",
        "device_kind": kind,
        "sms": getattr(device, "core_count", None),
        "jax": jax.__version__,
        "memory": device.memory_stats(),
        "attention": reason,
    }


def check_cases(arguments: argparse.Namespace) -> dict[str, Any]:
    from pallas_kernels.paged_attention.case_runner import CaseRunner, hopper_cases
    from pallas_kernels.paged_attention.gpu import GpuPagedAttention
    from pallas_kernels.paged_attention.xla import XlaPagedAttention

    cases = hopper_cases()
    if arguments.tiny:
        cases, runner = cases[:2], CaseRunner(lambda case: XlaPagedAttention())
    else:
        runner = CaseRunner(lambda case: GpuPagedAttention(case.num_q_heads // case.num_kv_heads))
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(8) as pool:  # compilation is most of the time
        list(pool.map(partial(_compile, runner, failures), cases))
    errors: dict[str, float] = {}
    for case in cases:
        if case.name in failures:
            continue
        try:
            result = runner.run(case)
        except Exception as error:
            failures[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        errors[case.name] = round(result.error, 5)
        if not result.passed:
            failures[case.name] = f"error {result.error:.4f}, pages {'equal' if result.pages_equal else 'differ'}"
        print(f"{'ok' if result.passed else 'FAILED':6} {case.name:44} error {result.error:.4f}", flush=True)
        partial_file("cases").write_text(json.dumps({"failures": failures, "errors": errors}))
    print(f"{len(cases) - len(failures)} passed, {len(failures)} failed: {failures}")
    return {"passed": not failures, "cases": len(cases), "failures": failures, "errors": errors}


def _compile(runner: Any, failures: dict[str, str], case: Any) -> None:
    try:
        runner.compile(case)
    except Exception as error:
        failures[case.name] = f"{type(error).__name__}: {str(error)[:300]}"


def bench_kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    file = partial_file("kernels")
    command = [sys.executable, "scripts/bench_kernels.py", "--json", str(file), "--seconds", "110"]
    subprocess.run(command + ["--tiny"] * arguments.tiny, check=True)
    figures = json.loads(file.read_text())
    broken = [case["name"] for case in figures["cases"] if "error" in case["jpaged"]]
    return {"passed": not broken, "failures": broken, **figures}


def check_logits(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jpaged.models.spec import load_spec
    from jpaged.parallel.mesh import make_mesh
    from jpaged.weights.load import load_weights
    from pallas_kernels.paged_attention import PageSpec, choose
    from pallas_kernels.paged_attention.xla import XlaPagedAttention
    from tests.fakes.dense_attention import dense_logits

    spec = load_spec(arguments.model)
    ids = np.random.default_rng(0).integers(5, spec.vocab_size, 256).astype(np.int32)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        reference_model = load_weights(arguments.model, spec, jnp.float32, make_mesh(1, [cpu]))
        reference = np.asarray(dense_logits(reference_model, ids))
    device = jax.devices()[0]
    model = load_weights(arguments.model, spec, jnp.bfloat16, make_mesh(1, [device]))
    page_spec = PageSpec(spec.num_layers, 32, 16, spec.num_kv_heads, spec.head_dim, "bfloat16")
    chosen, reason = choose(
        device.platform, page_spec, num_q_heads=spec.num_heads, q_dtype="bfloat16", device_kind=device.device_kind
    )
    figures: dict[str, Any] = {"attention": reason}
    for name, attention in (("chosen", chosen), ("xla", XlaPagedAttention())):
        if name == "xla" and isinstance(chosen, XlaPagedAttention):
            figures[name] = figures["chosen"]
            continue
        got = paged_logits(model, attention, page_spec, ids)
        rows, tokens = np.arange(len(ids)), got.argmax(axis=1)
        gaps = reference.max(axis=1) - reference[rows, tokens]  # 0 where the best token is the reference's
        figures[name] = {
            "mean_error": float(np.abs(got - reference).mean()),
            "max_error": float(np.abs(got - reference).max()),
            "same_tokens": int((gaps == 0).sum()),
            "tokens": len(ids),
            "largest_gap": float(gaps.max()),
        }
        print(name, figures[name], flush=True)
    ours, xla = figures["chosen"], figures["xla"]
    # What XLA's attention does in the same type is the measure; a token may differ where the reference is nearly tied.
    passed = ours["largest_gap"] <= max(TIE, 1.5 * xla["largest_gap"]) and ours["mean_error"] <= 1.5 * xla["mean_error"]
    return {"passed": bool(passed), **figures}


def paged_logits(model: Any, attention: Any, page_spec: Any, ids: Any) -> Any:
    """Logits [T, V] of one sequence, computed through pages in two chunks, a span of five and single tokens."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from pallas_kernels.paged_attention.api import AttentionBatch

    graph, weights = nnx.split(model)
    table = jnp.arange(page_spec.num_pages, dtype=jnp.int32)[None]

    @partial(jax.jit, donate_argnums=1)
    def step(weights: Any, pages: Any, ids: jax.Array, start: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, weights)
        ends = jnp.stack([jnp.int32(0), count])
        batch = AttentionBatch(ends, (start + count)[None], table, (count == 1).astype(jnp.int32), jnp.int32(1))
        work = attention.make_work(batch, len(ids), page_spec)
        positions = jnp.minimum(start + jnp.arange(len(ids), dtype=jnp.int32), start + count - 1)

        def attend(q: Any, k: Any, v: Any, pages: Any, **options: Any) -> tuple[jax.Array, Any]:
            return attention.attend(q, k, v, pages, work, **options)

        hidden, pages = model(ids, positions, pages, attend)
        return model.logits(hidden), pages

    edges = [0, 128, 200, 205, *range(206, len(ids) + 1)]
    pages, logits = attention.make_pages(page_spec), []
    for start, end in itertools.pairwise(edges):
        padded = np.zeros(128 if end - start > 8 else 8, np.int32)
        padded[: end - start] = ids[start:end]
        out, pages = step(weights, pages, jnp.asarray(padded), jnp.int32(start), jnp.int32(end - start))
        logits.append(np.asarray(out)[: end - start])
    return np.concatenate(logits)


def bench_offline(arguments: argparse.Namespace) -> dict[str, Any]:
    workload = "prefix:2" if arguments.tiny else "offline64"
    command = [sys.executable, "scripts/bench_offline.py", "--model", arguments.model, "--workload", workload]
    command += ["--max-model-len", "1024", *["--max-num-seqs", "8"] * arguments.tiny]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE)
    print(done.stdout[-3000:], flush=True)
    figures = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip().endswith("}") else {}
    return {"passed": not done.returncode, **figures}


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "device": check_device,
    "cases": check_cases,
    "kernels": bench_kernels,
    "logits": check_logits,
    "offline64": bench_offline,
}

if __name__ == "__main__":
    main()
