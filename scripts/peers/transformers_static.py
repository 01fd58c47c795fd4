"""Static batching with transformers' generate, the way most scripts do it; prints one JSON line.

    python transformers_static.py MODEL_DIR WORKLOAD_FILE

Requests go in arrival order in batches of 8; each batch is padded to its longest prompt and runs until its longest
output is done.
"""

import os
import sys
import time

import torch
from peer_workload import read, report
from transformers import AutoModelForCausalLM

BATCH = 8
work = read(sys.argv[2])
torch.set_num_threads(len(os.sched_getaffinity(0)))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
start, generated = time.perf_counter(), 0
with torch.inference_mode():
    for first in range(0, len(work.prompts), BATCH):
        prompts, lengths = work.prompts[first : first + BATCH], work.output_lengths[first : first + BATCH]
        width, longest = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0
        )
        generated += sum(lengths)
report(work, time.perf_counter() - start, generated)
