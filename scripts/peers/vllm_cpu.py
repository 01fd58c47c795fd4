"""vLLM's CPU engine on one workload, in its own environment; prints one JSON line. See ../compare_peers.py.

python vllm_cpu.py MODEL_DIR WORKLOAD_FILE
"""

import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
# Without these two it serves with one thread.
cores = len(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{cores - 1}")
os.environ.setdefault("OMP_NUM_THREADS", str(cores))

from peer_workload import read, report  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

work = read(sys.argv[2])
llm = LLM(
    model=sys.argv[1],
    skip_tokenizer_init=True,
    dtype="bfloat16",
    max_model_len=2048,
    max_num_seqs=64,
    enable_prefix_caching=work.shares_prefix,
)
params = [
    SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    for length in work.output_lengths
]
requests = [{"prompt_token_ids": prompt} for prompt in work.prompts]
llm.generate([{"prompt_token_ids": list(range(5, 60))}], params[:1], use_tqdm=False)  # what the first call sets up
start = time.perf_counter()
outputs = llm.generate(requests, params, use_tqdm=False)
report(work, time.perf_counter() - start, sum(len(output.outputs[0].token_ids) for output in outputs))
