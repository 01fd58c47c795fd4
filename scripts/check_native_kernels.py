"""Runs the native kernels under the address and the thread sanitizer: all attention cases, products of many shapes.

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

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
PRODUCTS = [(1, 64, 64), (3, 50, 40), (8, 33, 96), (9, 49, 66), (16, 64, 576), (70, 100, 64), (130, 960, 128)]
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
        for sanitizer, option in SANITIZERS.items():
            for instruction_set in runnable_instruction_sets():
                if instruction_set.name not in wanted:
                    continue
                complaint = run(directory, instruction_set, option, len(cases), len(products))
                wrong = [c.name for i, c in enumerate(cases) if not case_is_right(directory / f"attention-{i}", c)]
                wrong += [f"{p}" for i, p in enumerate(products) if not product_is_right(directory / f"product-{i}")]
                failed |= bool(complaint or wrong)
                verdict = complaint or (f"wrong: {', '.join(wrong)}" if wrong else "clean, all results right")
                print(f"{sanitizer:8} {instruction_set.name:12} {len(cases)} cases, {len(products)} products: ", end="")
                print(verdict, flush=True)
    sys.exit(failed)


def run(directory: Path, instruction_set: InstructionSet, sanitizer: str, num_cases: int, num_products: int) -> str:
    """Returns what the sanitizer says, or nothing."""
    program = directory / "program"
    include = [f"-I{SHARED_SOURCES}", f"-I{attention.SOURCE.parent}", f"-I{matmul.SOURCE.parent}"]
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
    command = ["setarch", "-R", str(program), str(directory), str(num_cases), str(num_products)]
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
    (x @ weights.astype(np.float32).T).tofile(f"{path}.expected")


def product_is_right(path: Path) -> bool:
    expected = np.fromfile(f"{path}.expected", np.float32)
    try:
        got = np.fromfile(f"{path}.result", np.float32)
    except FileNotFoundError:
        return False
    return np.allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def write_arrays(path: Path, arrays: list) -> None:
    """One after another, nothing between them."""
    with path.open("wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(np.asarray(array)).tobytes())


if __name__ == "__main__":
    main()
