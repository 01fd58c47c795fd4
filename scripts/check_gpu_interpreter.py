"""Runs cases through the Hopper kernels in Pallas' GPU interpreter, on a CPU, with race detection.

    python scripts/check_gpu_interpreter.py [NAME ...]     every case, or those whose name holds one of the words

Prints one line a case and exits with 1 if one differs from the reference or a race was reported. Every case takes tens
of seconds. Two things are not what runs on a GPU: the product of weights and V in prefill has its left side in
registers, which the interpreter cannot multiply, so that a plain dot stands in for it; and the grid of decode has two
multiprocessors.
"""

import os
import sys
from pathlib import Path

# The interpreter's warpgroups block threads of the CPU client, which has as many as there are devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.case_runner import CaseRunner, hopper_cases
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.gpu import GpuPagedAttention


def main() -> None:
    failures = []
    cases = [case for case in hopper_cases(padded=False) if selected(case.name)]
    runner = CaseRunner(interpreted)
    for case in cases:
        result = runner.run(case)
        races = get_races().races_found
        verdict = "ok" if result.passed and not races else "FAILED"
        pages = "equal" if result.pages_equal else "DIFFER"
        detail = f"error {result.error:.4f}, pages {pages}, {'RACES' if races else 'no race'}, {result.seconds:.0f} s"
        print(f"{verdict:6} {case.name:40} {detail}", flush=True)
        if verdict != "ok":
            failures.append(case.name)
    print(f"{len(cases) - len(failures)} passed, {len(failures)} failed")
    if failures or not cases:
        sys.exit(f"failed: {', '.join(failures) or 'no case has such a name'}")


def selected(name: str) -> bool:
    words = sys.argv[1:]
    return not words or any(word in name for word in words)


def interpreted(case: Case) -> GpuPagedAttention:
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    return GpuPagedAttention(case.num_q_heads // case.num_kv_heads, num_sms=2, interpret=parameters)


if __name__ == "__main__":
    main()
