"""OpenVINO GenAI's continuous batching on one workload, in its own environment; prints one JSON line.

    python openvino_genai_cpu.py OPENVINO_MODEL_DIR WORKLOAD_FILE

The model is exported once: optimum-cli export openvino --model MODEL_DIR --task text-generation-with-past
--weight-format fp16 OPENVINO_MODEL_DIR. It computes in bfloat16 where the CPU can.
"""

import sys
import time

import numpy as np
import openvino
import openvino_genai
from peer_workload import read, report

work = read(sys.argv[2])
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 2  # GiB
scheduler.max_num_batched_tokens = 512
scheduler.max_num_seqs = 64
scheduler.enable_prefix_caching = work.shares_prefix
pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {}, {})


def greedy(length):
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
    return config


prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in work.prompts]
pipeline.generate([openvino.Tensor(np.array([list(range(5, 60))], dtype=np.int64))], [greedy(8)])
start = time.perf_counter()
outputs = pipeline.generate(prompts, [greedy(length) for length in work.output_lengths])
report(work, time.perf_counter() - start, sum(len(output.m_generation_ids[0]) for output in outputs))
