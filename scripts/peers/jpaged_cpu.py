"""jpaged on one workload; prints one JSON line. See ../compare_peers.py.

python jpaged_cpu.py MODEL_DIR WORKLOAD_FILE
"""

import sys
import time

from peer_workload import read, report

from jpaged import LLM, SamplingParams

work = read(sys.argv[2])
llm = LLM(
    sys.argv[1],
    dtype="bfloat16",
    max_model_len=2048,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    enable_prefix_caching=work.shares_prefix,
)
params = [
    SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    for length in work.output_lengths
]
requests = [{"prompt_token_ids": prompt} for prompt in work.prompts]
llm.generate({"prompt_token_ids": list(range(5, 60))}, params[0])
start = time.perf_counter()
outputs = llm.generate(requests, params)
report(work, time.perf_counter() - start, sum(len(output.outputs[0].token_ids) for output in outputs))
