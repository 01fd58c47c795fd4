"""The shortest useful batch script; copy it.

    python scripts/batch_generate.py demo prompts.txt answers.jsonl

prompts.txt holds a prompt a line. For OpenAI's batch format, progress and resuming, see `jpaged batch`.
"""

import json
import sys
from pathlib import Path

from jpaged import LLM, SamplingParams


def main(model: str, prompts_path: str, answers_path: str) -> None:
    prompts = [line for line in Path(prompts_path).read_text(encoding="utf-8").split("\n") if line.strip()]
    llm = LLM(model)
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=128),
    )
    with Path(answers_path).open("w", encoding="utf-8") as file:
        for prompt, output in zip(prompts, outputs, strict=True):
            file.write(json.dumps({"prompt": prompt, "answer": output.outputs[0].text}, ensure_ascii=False) + "\n")
    print(llm.stats())


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
