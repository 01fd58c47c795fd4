"""The commands as a user meets them: answers on standard output, notes on standard error, exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged import LLM, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.serving import openai_batch
from tests.cli.conftest import ENGINE_OPTIONS
from tests.cli.tiny_chat_model import write_tiny_chat_model
from tests.engine.gguf_files import TinyGguf
from tests.fakes.tiny_models import tiny_buckets

SHORT = ("--max-tokens", 6, "--ignore-eos")


@pytest.fixture(scope="module")
def expected(chat_model):
    """expected(*prompts) -> what generate gives for them with SHORT."""
    llm = LLM(
        str(chat_model), dtype="float32", max_num_seqs=8, max_num_batched_tokens=16, max_model_len=96, page_size=4,
        num_pages=100,
    )  # fmt: skip

    def texts(*prompts, max_tokens: int = 6) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ready = [llm.render_chat(prompt) if isinstance(prompt, list) else prompt for prompt in prompts]
        return [output.outputs[0].text for output in llm.generate(ready, params)]

    return texts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_generate_streams_one_answer_and_says_what_happened(run_model, expected):
    result = run_model("generate", "hello", "--stats", *SHORT)
    assert result.exit_code == 0
    assert result.stdout == expected("hello")[0] + "\n"
    for note in (
        "...\nReady in ", f": float32, 100 pages, {tiny_buckets()} shapes", "4 prompt tokens, 6 generated (length)",
        "time to first token ", " tokens/s", "100 of 100 free now", "compilations after ready: 0",
    ):  # fmt: skip
        assert note in result.stderr


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_profile_is_printed_and_written(run_model, expected, tmp_path, command):
    options = ("--profile", tmp_path / "profile", "--profile-steps", 4)
    if command == "batch":
        (tmp_path / "requests.jsonl").write_text(batch_lines("hello", "you"))
        result = run_model("batch", tmp_path / "requests.jsonl", tmp_path / "answers.jsonl", *options)
    else:
        result = run_model("generate", "hello", *options, *SHORT)
        assert result.stdout == expected("hello")[0] + "\n"
    assert result.exit_code == 0
    table = (tmp_path / "profile" / "profile.txt").read_text()
    assert table.startswith("4 steps") and "device: attention" in table and "host: plan" in table
    assert table in result.stderr


def test_generate_takes_its_prompt_from_standard_input(run_model, expected):
    result = run_model("generate", *SHORT, stdin="hello\nyou\n")
    assert (result.exit_code, result.stdout) == (0, expected("hello\nyou")[0] + "\n")


def test_generate_answers_several_prompts_in_their_order(run_model, expected):
    prompts = ["hello", "you", "né你 hello"]
    result = run_model("generate", *prompts, "--stats", *SHORT)
    lines = result.stdout.split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"prompt": prompt, "text": text, "finish_reason": "length"}
        for prompt, text in zip(prompts, expected(*prompts), strict=True)
    ]
    assert "né你 hello" in lines[2]  # readable, not escaped
    assert "0 preemptions" in result.stderr and "compilations after ready: 0" in result.stderr


def test_generate_uses_the_chat_template_and_the_sampling_options(run_model, expected):
    result = run_model("generate", "hello", "--chat", *SHORT)
    assert result.stdout == expected([user("hello")])[0] + "\n"
    first, second = (
        run_model("generate", "hello", "hello", "--temperature", 2, "--seed", seed, "--top-k", 90, *SHORT).stdout
        for seed in (1, 2)
    )
    first_texts, second_texts = ([json.loads(line)["text"] for line in out.splitlines()] for out in (first, second))
    assert first_texts[0] == first_texts[1] != second_texts[0] == second_texts[1]


def test_generate_without_a_tokenizer_prints_token_ids(run_model, tmp_path):
    model = write_tiny_chat_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    one = run_model("generate", "--token-ids", *SHORT, model=model, stdin="[5, 6, 7]\n")
    token_ids = [int(word) for word in one.stdout.split()]
    assert len(token_ids) == 6
    two = run_model("generate", "--token-ids", "[5, 6, 7]", "[8]", *SHORT, model=model)
    first, second = (json.loads(line) for line in two.stdout.splitlines())
    assert first == {"prompt": "[5, 6, 7]", "text": "", "finish_reason": "length", "token_ids": token_ids}
    assert len(second["token_ids"]) == 6


def test_chat_remembers_until_told_to_forget(run_model, expected):
    turns = ["hello", "you", "/stats", "/reset", "  hello ", "/what", '"""hel', 'lo"""', "/exit", "never read"]
    result = run_model("chat", *SHORT, stdin="\n".join(turns))
    [first] = expected([user("hello")])
    [second] = expected([user("hello"), assistant(first), user("you")])
    assert result.exit_code == 0
    [fourth] = expected([user("hello"), assistant(first), user("hel\nlo")])
    assert result.stdout == f"{first}\n{second}\n{first}\n{fourth}\n"
    assert result.stderr.count(" cached), 6 generated (length); first token after ") == 4
    assert "100 of 100 free now" in result.stderr
    assert result.stderr.count("forget the conversation, but not the system message") == 1  # for what is no command


def test_chat_begins_with_the_system_message_again_after_a_reset(run_model, expected):
    result = run_model("chat", "--system", "he", *SHORT, stdin="hello\n/reset\nhello\n")
    [answer] = expected([{"role": "system", "content": "he"}, user("hello")])
    assert result.stdout == f"{answer}\n{answer}\n"


def test_chat_changes_the_system_message_and_keeps_the_conversation(run_model, expected):
    result = run_model("chat", *SHORT, stdin="/system\nhello\n/system  he you\n/system\nyou\n")
    [first] = expected([user("hello")])
    [second] = expected([{"role": "system", "content": "he you"}, user("hello"), assistant(first), user("you")])
    assert result.stdout == f"{first}\n{second}\n"
    assert "There is no system message." in result.stderr and result.stderr.count("System message: he you") == 2


def test_chat_forgets_a_turn_that_is_refused(run_model, expected):
    result = run_model("chat", *SHORT, stdin=f"hello\n{'x' * 100}\nyou\n")
    [first] = expected([user("hello")])
    [second] = expected([user("hello"), assistant(first), user("you")])
    assert (result.exit_code, result.stdout) == (0, f"{first}\n{second}\n")
    assert "the limit is 95" in result.stderr and "this turn is forgotten" in result.stderr


def test_chat_keeps_what_an_interrupted_answer_said(run_model, expected, monkeypatch):
    """Ctrl-C in the middle of a step: the step is finished, the answer is not."""
    begun, ended = [], []
    step = Engine.step

    def interrupted_step(self):
        begun.append(self)
        if len(begun) == 4:
            signal.raise_signal(signal.SIGINT)
        deltas = step(self)
        ended.append(self)
        return deltas

    monkeypatch.setattr(Engine, "step", interrupted_step)
    result = run_model("chat", "--max-tokens", 30, "--ignore-eos", stdin="hello\nyou\n")
    assert len(begun) == len(ended)
    said, _, rest = result.stdout.partition(" ... stopped\n")
    [whole] = expected([user("hello")], max_tokens=30)
    assert said and said != whole and whole.startswith(said)
    assert rest == expected([user("hello"), assistant(said), user("you")], max_tokens=30)[0] + "\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def batch_lines(*prompts) -> str:
    return "".join(
        json.dumps(
            {
                "custom_id": f"r{place}",
                "url": "/v1/completions",
                "body": {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True},
            }
        )
        + "\n"
        for place, prompt in enumerate(prompts)
    )


def read_batch(path: Path) -> dict[str, str]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"]
        for answer in answers
        if answer["error"] is None
    }


def test_batch_answers_a_file_and_then_has_nothing_to_do(run_model, expected, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl"
    source.write_text(batch_lines("hello", "you"))
    result = run_model("batch", source, target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"All 2 lines are answered in {target}." in result.stderr
    assert read_batch(target) == dict(zip(("r0", "r1"), expected("hello", "you"), strict=True))
    before = target.read_bytes()
    again = run_model("batch", source, target)
    assert again.exit_code == 0 and "answers 2 of 2 lines already" in again.stderr
    assert "Loading" not in again.stderr and target.read_bytes() == before


def test_batch_fails_for_a_bad_line_and_answers_the_others(run_model, expected, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("no json\n" + batch_lines("hello"))
    result = run_model("batch", source, target)
    assert result.exit_code == 2
    assert f"1 of 2 lines failed, the others are answered in {target}; the first: line 1: this is no" in result.stderr
    assert read_batch(target) == {"r0": expected("hello")[0]}


def test_batch_can_be_interrupted(run_model, tmp_path, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(batch_lines(*(["hello"] * 20)))
    write, written = openai_batch._write, []

    def interrupted_write(output, answer):
        if len(written) == 9:
            raise KeyboardInterrupt
        written.append(answer)
        write(output, answer)

    monkeypatch.setattr(openai_batch, "_write", interrupted_write)
    result = run_model("batch", source, target)
    assert result.exit_code == 130 and "the same command goes on from there" in result.stderr
    monkeypatch.undo()
    assert len(read_batch(target)) == 9


def test_every_form_of_a_model_gives_the_same_tokens(run, run_model, tmp_path, models_cache):
    source = TinyGguf().write(tmp_path / "tiny.gguf")
    plain, orbax, again = (tmp_path / name for name in ("plain", "orbax", "again"))
    for arguments in (
        (source, plain),
        (plain, orbax, "--to", "orbax"),
        (plain, again, "--dtype", "float32"),
    ):
        result = run("convert", *arguments)
        assert result.exit_code == 0 and f"Wrote {arguments[1]}." in result.stderr and not result.stdout
    assert {str(array.dtype) for array in load_file(plain / "model.safetensors").values()} == {"bfloat16"}
    assert {array.dtype for array in load_file(again / "model.safetensors").values()} == {np.dtype(np.float32)}
    outputs = [
        run_model("generate", "--token-ids", "[3, 4, 5]", *SHORT, model=model).stdout
        for model in (source, plain, orbax, again)
    ]
    assert len(outputs[0]) > 6 and outputs == [outputs[0]] * 4


def test_a_conversion_keeps_the_dtype_of_a_directory(run, chat_model, tmp_path):
    assert run("convert", chat_model, tmp_path / "copy").exit_code == 0
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


def test_a_process_of_its_own(chat_model, expected, tmp_path):
    """What the other tests cannot see: imports, the real streams, the real exit code."""
    command = [sys.executable, "-m", "jpaged", "generate", str(chat_model), *map(str, SHORT), *ENGINE_OPTIONS]
    result = subprocess.run(command, input="hello", capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert (result.returncode, result.stdout) == (0, expected("hello")[0] + "\n")
    bad = subprocess.run(
        [*command[:4], str(tmp_path / "nothing"), "hello"], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr and bad.stderr.strip().splitlines()[-1].startswith("Error: no model ")


@pytest.fixture
def one_engine(monkeypatch):
    """Commands use one engine instead of starting another."""
    engines = []

    def start(config):
        engines[:] = engines or [LLM(config.model, **config.options())]
        return engines[0]

    monkeypatch.setattr("jpaged.cli.generate.start_llm", start)


def test_generate_takes_parameters_of_every_kind(run_model, expected, one_engine, tmp_path):
    [plain] = expected("hello")
    letter = plain[3]
    stopped = run_model("generate", "hello", "--stop", letter, "--stop", "never said", *SHORT)
    assert stopped.stdout == plain[: plain.index(letter)] + "\n"
    assert run_model("generate", "hello", "--stop", letter, "--include-stop", *SHORT).stdout == (
        plain[: plain.index(letter) + 1] + "\n"
    )
    assert letter not in run_model("generate", "hello", "--bad-word", letter, *SHORT).stdout[:-1]
    biased = run_model("generate", "hello", "--logit-bias", "65=-1e3", "--logit-bias", "64=1e3", *SHORT).stdout
    allowed = run_model("generate", "hello", "--allowed-token-id", 64, *SHORT).stdout
    assert len(set(biased[:-1])) == 1 and biased == allowed
    ids = run_model("generate", "hello", "--no-detokenize", "--stop-token-id", 64, "--logit-bias", "64=1e3").stdout
    assert ids == "64 \n"

    (tmp_path / "grammar").write_text('start: "x" /[yz]/', encoding="utf-8")
    (tmp_path / "schema.json").write_text('{"enum": ["na", "né"]}', encoding="utf-8")
    for arguments, answers in (
        (("--choice", "yes", "--choice", "no"), {"yes", "no"}),
        (("--regex", "[ab]c"), {"ac", "bc"}),
        (("--grammar", tmp_path / "grammar"), {"xy", "xz"}),
        (("--json-schema", tmp_path / "schema.json"), {'"na"', '"né"'}),
    ):
        assert run_model("generate", "hello", *arguments).stdout[:-1] in answers
    assert run_model("generate", "hello", "--json-object", "--max-tokens", 1).stdout == "{\n"
    bad = run_model("generate", "hello", "--regex", "(")
    assert bad.exit_code == 2 and "structured_outputs.regex cannot be compiled" in bad.stderr


def test_generate_writes_logprobs_as_json(run_model, expected):
    result = run_model("generate", "hello", "--logprobs", 2, "--prompt-logprobs", 0, *SHORT)
    answer = json.loads(result.stdout)
    assert answer["text"] == expected("hello")[0] and len(answer["logprobs"]) == 6
    for token in answer["logprobs"]:
        assert set(token) == {"id", "token", "logprob", "rank", "top"} and token["rank"] == 1
        assert token["top"][0] == {name: token[name] for name in ("id", "token", "logprob", "rank")}
        assert len(token["top"]) == 2
    first, *others = answer["prompt_logprobs"]
    assert first is None and [token["token"] for token in others] == ["l", "l", "o"]
    assert all("top" not in token for token in others)
