"""Runs the native kernels under the address and the thread sanitizer: all attention cases, products of many shapes,
draws and descriptions of tokens with every parameter.

    python scripts/check_native_kernels.py [--instruction-set avx2 ...]

A sanitizer must see every thread, and XLA's are not compiled for it: so the kernels' sources are compiled, with threads
of their own, into a program (check_native_kernels.cc) that reads the inputs from files. For each sanitizer and each
instruction set that this machine runs it prints one line; exits with 1 if a sanitizer complains or a result is wrong.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul import cpu as matmul
from pallas_kernels.native.build import SHARED_SOURCES, InstructionSet, find_compiler, runnable_instruction_sets
from pallas_kernels.paged_attention import cpu as attention
from pallas_kernels.paged_attention.cases import CASES, Case, build
from pallas_kernels.sampling import cpu as sampling

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
PRODUCTS = [(1, 64, 64), (3, 50, 40), (8, 33, 96), (9, 49, 66), (16, 64, 576), (70, 100, 64), (100, 64, 40)]
PRODUCTS += [(130, 960, 128)]
DRAWS = [(1, 1), (3, 100), (64, 1000), (64, 5003)]  # rows, vocabulary
NUM_BEST = 20
WORD = {"float32": 0, "bfloat16": 1}  # the dtypes, as the program names them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [instruction_set.name for instruction_set in runnable_instruction_sets()]
    parser.add_argument("--instruction-set", choices=names, nargs="+", default=names)
    wanted = parser.parse_args().instruction_set
    failed = False
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cases = [case for case in CASES if not case.benchmark and case.dtype in TOLERANCE]
        for index, case in enumerate(cases):
            write_case(directory / f"attention-{index}", case)
        products = [(dtype, shape) for dtype in TOLERANCE for shape in PRODUCTS]
        for index, (dtype, shape) in enumerate(products):
            write_product(directory / f"product-{index}", dtype, shape, seed=index)
        for index, shape in enumerate(DRAWS):
            write_draws(directory / f"draws-{index}", *shape)
        counts = len(cases), len(products), len(DRAWS)
        for sanitizer, option in SANITIZERS.items():
            for instruction_set in runnable_instruction_sets():
                if instruction_set.name not in wanted:
                    continue
                complaint = run(directory, instruction_set, option, counts)
                wrong = [c.name for i, c in enumerate(cases) if not case_is_right(directory / f"attention-{i}", c)]
                wrong += [
                    str(product)
                    for index, product in enumerate(products)
                    if not product_is_right(directory / f"product-{index}", product[0])
                ]
                wrong += [f"draws {d}" for i, d in enumerate(DRAWS) if not draws_are_right(directory / f"draws-{i}")]
                failed |= bool(complaint or wrong)
                verdict = complaint or (f"wrong: {', '.join(wrong)}" if wrong else "clean, all results right")
                print(f"{sanitizer:8} {instruction_set.name:12} {counts[0]} cases, {counts[1]} products, ", end="")
                print(f"{counts[2]} batches of draws: ", end="")
                print(verdict, flush=True)
    sys.exit(failed)


def run(directory: Path, instruction_set: InstructionSet, sanitizer: str, counts: tuple[int, ...]) -> str:
    """Returns what the sanitizer says, or nothing. `counts` are of cases, products and batches of draws."""
    program = directory / "program"
    sources = (attention.SOURCE, matmul.SOURCE, sampling.SOURCE)
    include = [f"-I{SHARED_SOURCES}", *(f"-I{kernel.parent}" for kernel in sources)]
    source = Path(__file__).with_suffix(".cc")
    options = [
        "-std=c++20",
        "-O1",
        "-g",
        "-Wno-psabi",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-pthread",
    ]
    subprocess.run(
        [
            *find_compiler(),
            *options,
            *instruction_set.compiler_options,
            *include,
            f"-isystem{jax.ffi.include_dir()}",
            str(source),
            "-o",
            str(program),
        ],
        check=True,
    )
    for result in directory.glob("*.result*"):
        result.unlink()
    # setarch: the thread sanitizer needs its own places in memory, which randomised addresses may take.
    command = ["setarch", "-R", str(program), str(directory), *map(str, counts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit status {done.returncode}"


def write_case(path: Path, case: Case) -> None:
    inputs = build(case)
    batch, options = inputs.batch, inputs.options
    pages = np.asarray(attention.pack_pages(inputs.pages_k, inputs.pages_v))
    tokens, num_q_heads, head_dim = inputs.q.shape
    header = [WORD[case.dtype], tokens, batch.num_seqs, num_q_heads, inputs.k.shape[1], head_dim, case.page_size_tokens]
    header += [pages.shape[1], batch.page_table.shape[1], inputs.layer, case.window or 0, options["sinks"] is not None]
    floats = [options["scale"], case.soft_cap or 0.0]
    sinks = np.zeros(num_q_heads, np.float32) if options["sinks"] is None else options["sinks"]
    arrays = [np.array(header, np.int64), np.array(floats, np.float32), inputs.q, inputs.k, inputs.v, pages]
    arrays += [batch.cu_q_lens, batch.kv_lens, batch.page_table, sinks]
    write_arrays(path, arrays)


def case_is_right(path: Path, case: Case) -> bool:
    inputs = build(case)
    expected, expected_k, expected_v = inputs.expected()
    dtype = jnp.dtype(case.dtype)
    try:
        out = np.fromfile(f"{path}.result", dtype).astype(np.float32).reshape(expected.shape)
        pages = np.fromfile(f"{path}.result-pages", np.uint8)
    except FileNotFoundError:
        return False
    wanted = np.asarray(attention.pack_pages(expected_k, expected_v))
    tolerance = TOLERANCE[case.dtype]
    close = np.allclose(out, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(initial=1e-3))
    return close and bool((pages == wanted.view(np.uint8).reshape(-1)).all())


def write_product(path: Path, dtype: str, shape: tuple[int, int, int], seed: int) -> None:
    rows, outputs, inputs = shape
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs), np.float32).astype(dtype).astype(np.float32)
    weights = rng.standard_normal((outputs, inputs), np.float32).astype(dtype)
    write_arrays(path, [np.array([WORD[dtype], *shape], np.int64), x, weights])
    product = x @ weights.astype(np.float32).T
    product.tofile(f"{path}.expected")
    if outputs % 32 == 0:
        gates, ups = (product.reshape(rows, -1, 2, 16)[:, :, part].reshape(rows, -1) for part in range(2))
        gated = (gates / (1 + np.exp(np.minimum(-gates, 80))) * ups).astype(dtype).astype(np.float32)
        down = weights.reshape(-1)[: inputs * outputs // 2].reshape(inputs, outputs // 2)
        (gated @ down.astype(np.float32).T).tofile(f"{path}.expected-fed")


def product_is_right(path: Path, dtype: str) -> bool:
    """And so is the gated block made of the same numbers, whose rounding in the middle may fall either way."""
    for kind, tolerance in (("", 1e-5), ("-fed", TOLERANCE[dtype])):
        expected = Path(f"{path}.expected{kind}")
        if not expected.exists():
            continue
        wanted = np.fromfile(expected, np.float32)
        try:
            got = np.fromfile(f"{path}.result{kind}", np.float32)
        except FileNotFoundError:
            return False
        if not np.allclose(got, wanted, rtol=1e-5, atol=tolerance * np.abs(wanted).max()):
            return False
    return True


def write_draws(path: Path, rows: int, vocabulary: int) -> None:
    """Random parameters, every other of which has no effect; what is expected is drawn by the kernel as it is used."""
    generator = np.random.default_rng(rows + vocabulary)

    def maybe(values: np.ndarray, otherwise: float) -> np.ndarray:
        return np.where(generator.random(rows) < 0.5, values, otherwise).astype(np.float32)

    def whole(limit: int, *shape: int) -> np.ndarray:
        return generator.integers(0, limit, shape, np.int32)

    length, num_blocked, num_biases = 70, 3, 5
    fields = {
        "temperature": maybe(generator.random(rows) + 0.5, 0.0),
        "top_p": maybe(generator.random(rows), 1.0),
        "log_min_p": maybe(np.log(generator.random(rows) / 10), -np.inf),
        "presence": maybe(generator.random(rows), 0.0),
        "frequency": maybe(generator.random(rows), 0.0),
        "repetition": maybe(generator.random(rows) + 0.5, 1.0),
        "top_k": maybe(whole(vocabulary, rows), 0).astype(np.int32),
        "first_key": whole(2**31 - 1, rows),
        "second_key": whole(2**31 - 1, rows),
        "row_id": generator.permutation(rows).astype(np.int32),
        "prompt_length": whole(length, rows),
        "history_length": whole(length + 1, rows),
        "has_bias": whole(2, rows),
    }
    draws = sampling.DrawFields(**{name: jnp.asarray(values) for name, values in fields.items()})
    logits = generator.normal(0, 2, (rows, vocabulary)).astype(np.float32)
    logits[rows // 2] = 1.0
    logits[rows - 1, vocabulary // 2 :] = np.nan
    history, blocked, bias_ids = (whole(vocabulary + 2, rows, size) - 1 for size in (length, num_blocked, num_biases))
    bias_values = generator.normal(0, 1, bias_ids.shape).astype(np.float32)
    token_ids, temperature = whole(vocabulary, rows), (generator.random(rows) + 0.5).astype(np.float32)
    native, arrays = sampling.CpuSampling.make(), (logits, history, blocked, bias_ids, bias_values)
    drawn = native.draw(jnp.asarray(logits), draws, *map(jnp.asarray, arrays[1:]))
    described = native.describe(jnp.asarray(logits), jnp.asarray(token_ids), jnp.asarray(temperature), NUM_BEST)
    np.asarray(drawn).tofile(f"{path}.expected")
    np.asarray(described).tofile(f"{path}.expected-descriptions")
    header = np.array([rows, vocabulary, length, num_blocked, num_biases, NUM_BEST], np.int64)
    write_arrays(path, [header, *sampling.pack_fields(draws), *arrays, token_ids, temperature])


def draws_are_right(path: Path) -> bool:
    try:
        drawn = np.fromfile(f"{path}.result", np.int32)
        described = np.fromfile(f"{path}.result-descriptions", np.int32).reshape(len(drawn), -1)
    except FileNotFoundError:
        return False
    expected = np.fromfile(f"{path}.expected-descriptions", np.int32).reshape(described.shape)
    is_logprob = np.ones(described.shape[1], bool)
    is_logprob[1 : 2 + NUM_BEST] = False  # the rank and the best tokens' ids
    logprobs, expected_logprobs = (
        np.ascontiguousarray(x[:, is_logprob]).view(np.float32) for x in (described, expected)
    )
    close = np.allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
    same = bool((described[:, ~is_logprob] == expected[:, ~is_logprob]).all())
    return close and same and bool((drawn == np.fromfile(f"{path}.expected", np.int32)).all())


def write_arrays(path: Path, arrays: list) -> None:
    """One after another, nothing between them."""
    with path.open("wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(np.asarray(array)).tobytes())


if __name__ == "__main__":
    main()
