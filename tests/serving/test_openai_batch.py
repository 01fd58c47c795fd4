"""Batch files: every line gets its answer or an error of its own, once, however often the run is interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, InvalidRequestError, SamplingParams
from jpaged.serving.openai_batch import CHAT_URL, COMPLETIONS_URL, BatchRun
from tests.cli.tiny_chat_model import write_tiny_chat_model

OPTIONS = {
    "dtype": "float32", "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 16, "page_size": 4,
    "num_pages": 100,
}  # fmt: skip
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory) -> LLM:
    return LLM(str(write_tiny_chat_model(tmp_path_factory.mktemp("model") / "chat")), **OPTIONS)


@pytest.fixture
def llm(shared_llm: LLM):
    """After every test all pages are back, whatever its lines did."""
    yield shared_llm
    shared_llm.engine.check_invariants()
    stats = shared_llm.stats()
    assert (stats.pages_used, stats.rows_running, stats.rows_waiting) == (0, 0, 0)
    assert stats.compilations_after_ready == 0


class Files:
    """An input and an output file; `run` answers one into the other."""

    def __init__(self, directory: Path, llm: LLM) -> None:
        self.input, self.output = directory / "in.jsonl", directory / "answers" / "out.jsonl"
        self._llm = llm
        self.read: list[str] = []  # custom ids in the order of their answers, of the last run

    def write(self, *lines: dict[str, Any] | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("".join(text + "\n" for text in texts), encoding="utf-8")

    def open(self) -> BatchRun:
        return BatchRun(self.input, self.output, "tiny")

    def run(self) -> BatchRun:
        run = self.open()
        self.read = list(run.answer(self._llm.engine))
        return run

    def answers(self) -> list[dict[str, Any]]:
        text = self.output.read_text(encoding="utf-8")
        assert text.endswith("\n") or not text
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def texts(self) -> dict[str, str]:
        """Custom id -> text, of the answered lines."""
        found = {}
        for answer in self.answers():
            if answer["error"] is None:
                assert answer["custom_id"] not in found, "answered twice"
                choice = answer["response"]["body"]["choices"][0]
                found[answer["custom_id"]] = choice["text"] if "text" in choice else choice["message"]["content"]
        return found


@pytest.fixture
def files(tmp_path: Path, llm: LLM) -> Files:
    return Files(tmp_path, llm)


def line(custom_id: Any, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny"} | GREEDY | body}


def completion(custom_id: Any, given: Any, **body: Any) -> dict[str, Any]:
    return line(custom_id, COMPLETIONS_URL, {"prompt": given} | body)


def chat(custom_id: Any, *contents: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents)]
    return line(custom_id, CHAT_URL, {"messages": messages} | body)


def greedy_texts(llm: LLM, *prompts: Any, max_tokens: int = 6) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_every_kind_of_prompt_gets_what_generate_gives(files: Files, llm: LLM) -> None:
    conversation = ["hello", "what?", "hello again"]
    files.write(
        completion("text", "hello world"),
        completion("ids", [5, 6, 7, 8]),
        chat("chat", *conversation),
        chat("longer", "hello", max_tokens=None, max_completion_tokens=9),
        completion("seeded", "hello", temperature=1.5, seed=7, top_p=0.9, top_k=50, min_p=0.01),
    )
    run = files.run()
    assert (run.num_lines, run.num_done, run.errors) == (5, 0, [])
    assert sorted(files.read) == ["chat", "ids", "longer", "seeded", "text"]
    rendered = llm.render_chat(
        [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(conversation)]
    )
    short = greedy_texts(llm, "hello world", {"prompt_token_ids": [5, 6, 7, 8]}, rendered)
    [longer] = greedy_texts(llm, llm.render_chat([{"role": "user", "content": "hello"}]), max_tokens=9)
    [drawn] = llm.generate(
        "hello",
        SamplingParams(temperature=1.5, seed=7, top_p=0.9, top_k=50, min_p=0.01, max_tokens=6, ignore_eos=True),
    )
    assert files.texts() == dict(
        zip(("text", "ids", "chat", "longer", "seeded"), [*short, longer, drawn.outputs[0].text], strict=True)
    )


def test_an_answer_has_the_fields_of_the_format(files: Files) -> None:
    files.write(completion("a", [5, 6, 7]), chat("b", "hello"))
    files.run()
    a, b = sorted(files.answers(), key=lambda answer: answer["custom_id"])
    assert set(a) == {"id", "custom_id", "response", "error"} and a["id"] != b["id"]
    assert a["response"]["status_code"] == 200
    body = a["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [choice | {"text": ""} for choice in body["choices"]] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert b["response"]["body"]["object"] == "chat.completion"
    assert b["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_a_stop_token_and_the_default_lengths_of_the_two_urls(files: Files, llm: LLM) -> None:
    [output] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    token_ids = output.outputs[0].token_ids
    place = next(place for place in range(2, 6) if token_ids[place] not in token_ids[:place])
    files.write(
        completion("stopped", "hello", stop_token_ids=[token_ids[place]]),
        completion("default", "hello", max_tokens=None),
        chat("endless", "hello", max_tokens=None),
    )
    files.run()
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in files.answers()}
    assert bodies["stopped"]["choices"][0]["finish_reason"] == "stop"
    assert bodies["stopped"]["usage"]["completion_tokens"] == place + 1
    assert bodies["default"]["usage"]["completion_tokens"] == 16  # as OpenAI's
    assert bodies["endless"]["usage"]["total_tokens"] == 96  # to the context's end


def test_parameters_reach_the_engine(files: Files, llm: LLM) -> None:
    """A field of every kind; what each becomes is tested with the format."""
    [plain] = greedy_texts(llm, "hello")
    files.write(
        completion("stop", "hello", stop=[plain[3]]),
        completion("bias", "hello", logit_bias={"70": 100}),
        completion("choice", "hello", guided_choice=["yes", "no"], ignore_eos=False),
        chat("json", "hello", response_format={"type": "json_object"}, max_tokens=40, ignore_eos=False, temperature=1),
        completion("samples", "hello", n=2, temperature=1, seed=1),
        completion("logprobs", "hello", logprobs=2),
        chat("top", "hello", logprobs=True, top_logprobs=2),
    )
    run = files.run()
    assert not run.errors
    answers = {answer["custom_id"]: answer["response"]["body"]["choices"] for answer in files.answers()}
    assert files.texts()["stop"] == plain[: plain.index(plain[3])]
    assert (answers["stop"][0]["finish_reason"], answers["stop"][0]["stop_reason"]) == ("stop", plain[3])
    assert llm.tokenizer is not None
    assert files.texts()["bias"] == llm.tokenizer.decode([70] * 6)
    assert files.texts()["choice"] in ("yes", "no")
    assert files.texts()["json"].startswith("{")
    first, second = answers["samples"]
    assert (first["index"], second["index"]) == (0, 1) and first["text"] != second["text"]
    logprobs = answers["logprobs"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 6
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())  # it is greedy
    for entry in answers["top"][0]["logprobs"]["content"]:
        assert [entry[name] for name in ("token", "logprob", "bytes")] == list(entry["top_logprobs"][0].values())
        assert len(entry["top_logprobs"]) == 2


BAD_LINES: dict[str, tuple[Any, str]] = {
    "no json": ('{"custom_id": "no json", "url"', "this is no JSON"),
    "a list": ("[1, 2]", "a request is an object"),
    "a number": ("17", "a request is an object"),
    "nested": ("[" * 100_000, "nested too deeply"),
    "no body": ({"custom_id": "no body", "url": COMPLETIONS_URL}, "a request is an object"),
    "no custom id": ({"url": COMPLETIONS_URL, "body": {"prompt": "hello"}}, "custom_id is None"),
    "numeric custom id": (completion(5, "hello"), "custom_id is 5, it must be a text"),
    "empty custom id": (completion("", "hello"), "custom_id is ''"),
    "unknown url": (completion("unknown url", "hello") | {"url": "/v1/embeddings"}, "url is '/v1/embeddings'"),
    "no url": ({"custom_id": "no url", "body": {"prompt": "hello"}}, "url is None"),
    "unknown field": (completion("unknown field", "hello", suffix="x"), "body.suffix is not supported"),
    "stop": (completion("stop", "hello", stop=[5]), "stop is 5, it must be a text"),
    "samples": (completion("samples", "hello", n=9), "a step holds 8 sequences"),
    "logprobs": (chat("logprobs", "hello", logprobs=0), "body.logprobs is 0, it must be true or false"),
    "bias": (completion("bias", "hello", logit_bias={"266": 1}), "logit_bias holds 266, the vocabulary has ids 0..265"),
    "schema": (chat("schema", "hello", guided_json={"type": "x"}), "structured_outputs.json_schema cannot be compiled"),
    "tool": (chat("tool", "hello", tools=[{}], tool_choice="required"), "body.tool_choice is 'required'"),
    "streaming": (completion("streaming", "hello", stream=True), "body.stream is True"),
    "temperature": (completion("temperature", "hello", temperature=-1), "temperature is -1, it must be at least 0"),
    "nan": ('{"custom_id": "nan", "url": "/v1/completions", "body": {"prompt": "x", "top_p": NaN}}', "top_p is nan"),
    "text for number": (completion("text for number", "hello", max_tokens="5"), "max_tokens is '5'"),
    "stop ids": (completion("stop ids", "hello", stop_token_ids=5), "stop_token_ids is 5, it must be a list"),
    "stop id": (completion("stop id", "hello", stop_token_ids=[999]), "stop_token_ids holds 999"),
    "flag": (completion("flag", "hello", ignore_eos="no"), "ignore_eos is 'no', it must be true or false"),
    "two limits": (completion("two limits", "hello", max_completion_tokens=5), "say the same"),
    "no prompt": (completion("no prompt", None), "body.prompt is 'None'"),
    "several prompts": (completion("several prompts", ["hello", "you"]), "it must be a text or a list of token ids"),
    "empty prompt": (completion("empty prompt", ""), "the prompt has no tokens"),
    "no ids": (completion("no ids", []), "the prompt has no tokens"),
    "a flag as id": (completion("a flag as id", [5, True]), "prompt_token_ids holds True"),
    "out of vocabulary": (completion("out of vocabulary", [5, 266]), "the vocabulary has ids 0..265"),
    "negative id": (completion("negative id", [5, -1]), "token ids are at least 0"),
    "too long": (completion("too long", [5] * 96), "the prompt has 96 tokens, the limit is 95"),
    "no messages": (chat("no messages"), "body.messages is '[]'"),
    "odd messages": (chat("odd messages", messages=["hello"]), "it must be a list of messages"),
    "prompt in chat": (chat("prompt in chat", "hello", prompt="hello"), "body.prompt is not supported"),
    "no text": (completion("no text", "\ud800"), "cannot be tokenized"),
}


def test_each_bad_line_gets_an_error_of_its_own_and_the_others_are_answered(files: Files, llm: LLM) -> None:
    good = {f"good {place}": [5 + place, 6] for place in range(len(BAD_LINES) + 1)}
    lines: list[Any] = [completion("good 0", good["good 0"])]
    for place, (line, _) in enumerate(BAD_LINES.values(), 1):
        lines += [line, completion(f"good {place}", good[f"good {place}"])]
    files.write(*lines)
    run = files.run()
    assert len(run.errors) == len(BAD_LINES) and len(files.read) == run.num_lines == len(lines)
    expected = greedy_texts(llm, *({"prompt_token_ids": ids} for ids in good.values()))
    assert files.texts() == dict(zip(good, expected, strict=True))
    errors = [answer for answer in files.answers() if answer["error"] is not None]
    assert all(answer["response"] is None for answer in errors)
    with_id = {answer["custom_id"] for answer in errors} - {None, ""}
    assert with_id == set(BAD_LINES) - {
        "no json", "a list", "a number", "nested", "no custom id", "numeric custom id", "empty custom id",
    }  # fmt: skip
    for place, (_, message) in enumerate(BAD_LINES.values()):
        [error] = [text for text in run.errors if text.startswith(f"line {2 * place + 2}: ")]
        assert message in error
        assert error in [answer["error"]["message"] for answer in errors]


def test_a_repeated_custom_id_is_an_error_in_every_run(files: Files, llm: LLM) -> None:
    files.write(completion("a", "hello"), completion("b", "you"), completion("a", "other"))
    for done in (0, 2):
        run = files.run()
        assert run.num_done == done
        assert run.errors == ["line 3: custom_id 'a' stands on an earlier line too; give each its own"]
        assert files.texts() == dict(zip("ab", greedy_texts(llm, "hello", "you"), strict=True))


def test_the_line_before_a_repeated_custom_id_need_not_be_good(files: Files) -> None:
    files.write(completion("a", ""), completion("a", "hello"))
    for _ in range(2):
        run = files.run()
        assert [error.partition(":")[0] for error in run.errors] == ["line 1", "line 2"]


@pytest.mark.parametrize("stop_after", [0, 1, 3, 9, 19])
def test_an_interrupted_run_goes_on_where_it_stopped(files: Files, llm: LLM, stop_after: int) -> None:
    prompts = {f"r{place}": [5 + place] * (1 + place % 7) for place in range(20)}
    files.write(*(completion(custom_id, prompt) for custom_id, prompt in prompts.items()))
    iterator = files.open().answer(llm.engine)
    for _ in range(stop_after):
        next(iterator)
    iterator.close()
    written = files.texts()
    assert len(written) >= stop_after
    lines = files.output.read_text().split("\n")[:-1] if stop_after else []
    run = files.run()
    assert run.num_done == len(written) and set(files.read) == set(prompts) - set(written)
    assert files.output.read_text().split("\n")[: len(lines)] == lines  # not touched, not computed again
    expected = greedy_texts(llm, *({"prompt_token_ids": ids} for ids in prompts.values()))
    assert files.texts() == dict(zip(prompts, expected, strict=True))
    assert (files.run().num_done, files.read) == (20, [])


@pytest.mark.parametrize("cut", [1, 18, 40, -20, -1])
def test_a_line_cut_short_is_answered_again(files: Files, cut: int) -> None:
    files.write(completion("é", "héllo"), completion("你好", "hello"))
    files.run()
    whole, expected = files.output.read_bytes(), files.texts()
    [first, last, _] = whole.split(b"\n")
    files.output.write_bytes(first + b"\n" + last[:cut])
    run = files.run()
    assert run.num_done == 1 and files.texts() == expected
    files.output.write_bytes(first + b"\n" + last)  # only the line's end is missing
    assert files.run().num_done == 2
    assert files.output.read_bytes() == whole


def test_a_character_cut_in_half_is_a_cut_line(files: Files) -> None:
    files.write(completion("a", "hello"), completion("你", "you"))
    files.run()
    whole, expected = files.output.read_bytes(), files.texts()
    place = whole.index("你".encode())
    files.output.write_bytes(whole[: place + 1])
    assert files.run().num_done == 1 and files.texts() == expected


def test_errors_are_tried_again(files: Files, llm: LLM) -> None:
    files.write(completion("a", "hello"), completion("b", ""), "no json")
    assert len(files.run().errors) == 2
    files.write(completion("a", "hello"), completion("b", "you"), completion("c", "hel"))
    run = files.run()
    assert (run.num_done, run.errors, sorted(files.read)) == (1, [], ["b", "c"])
    assert files.texts() == dict(zip("abc", greedy_texts(llm, "hello", "you", "hel"), strict=True))
    assert all(answer["error"] is None for answer in files.answers())


def test_texts_may_hold_what_looks_like_a_line_end(files: Files, llm: LLM) -> None:
    text = "a\u2028b\u2029c\x85d\x0be"
    raw = json.dumps(completion(f"id {text}", text), ensure_ascii=False)
    files.write(raw, completion("b", "hello"))
    assert "\u2028" in files.input.read_text(encoding="utf-8")
    assert files.run().num_lines == 2
    expected = dict(zip((f"id {text}", "b"), greedy_texts(llm, text, "hello"), strict=True))
    assert files.texts() == expected
    assert files.run().num_done == 2 and files.texts() == expected


def test_an_id_that_utf8_cannot_spell_comes_back_as_json_spells_it(files: Files) -> None:
    files.write(completion("\ud800", "hello"), completion("\udfff", ""))
    run = files.run()
    assert len(run.errors) == 1
    assert [answer["custom_id"] for answer in files.answers()] == ["\udfff", "\ud800"]
    assert files.run().num_done == 1


def test_a_byte_that_is_no_utf8_spoils_one_line(files: Files) -> None:
    line = json.dumps(completion("bad", "x?x")).encode().replace(b"?", b"\xff")
    files.input.write_bytes(line + b"\n" + json.dumps(completion("good", "hello")).encode())
    run = files.run()
    assert len(run.errors) == 1 and "cannot be tokenized" in run.errors[0]
    assert set(files.texts()) == {"good"}


def test_blank_lines_other_line_ends_and_a_byte_order_mark_are_fine(files: Files) -> None:
    lines = ["", json.dumps(completion("a", "hello")), "  ", json.dumps(completion("b", "")), "", ""]
    files.input.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    run = files.run()
    assert run.num_lines == 2 and set(files.texts()) == {"a"}
    assert [error.partition(":")[0] for error in run.errors] == ["line 4"]


def test_an_empty_file_has_no_answers(files: Files) -> None:
    files.write()
    run = files.run()
    assert (run.num_lines, run.errors, files.answers()) == (0, [], [])


def test_a_long_file_is_handed_over_piece_by_piece(files: Files, llm: LLM) -> None:
    prompts = [[5 + place % 200, 6] for place in range(100)]
    files.write(*(completion(str(place), prompt, max_tokens=2) for place, prompt in enumerate(prompts)))
    most = 0
    for _ in (run := files.open()).answer(llm.engine):
        stats = llm.stats()
        most = max(most, stats.rows_running + stats.rows_waiting)
    assert run.num_lines == 100 and 8 <= most <= 16  # two for each of the 8 rows
    expected = greedy_texts(llm, *({"prompt_token_ids": ids} for ids in prompts), max_tokens=2)
    assert files.texts() == {str(place): text for place, text in enumerate(expected)}


@pytest.mark.parametrize(
    "content",
    [
        "my notes", "my notes\n", "{}\n", '{"custom_id": "a"}\n', "[]\n", '"text"', "\n\n\n", "\xff",
        '{"custom_id": ["a"], "response": {}, "error": null}\n', '{"id": "batch_req_a", "cus\n',
    ],
)  # fmt: skip
def test_an_output_that_is_no_batch_file_is_refused_and_left_alone(files: Files, content: str) -> None:
    files.write(completion("a", "hello"))
    files.output.parent.mkdir()
    files.output.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequestError, match=r"line 1 of .*out\.jsonl is no batch answer"):
        files.open()
    assert files.output.read_text(encoding="latin-1") == content
    assert [path.name for path in files.output.parent.iterdir()] == ["out.jsonl"]


def test_the_input_cannot_take_the_answers(files: Files) -> None:
    files.write(completion("a", "hello"))
    before = files.input.read_bytes()
    files.output.parent.mkdir()
    files.output.symlink_to(files.input)
    for output in (files.input, files.output):
        with pytest.raises(InvalidRequestError, match=r"in\.jsonl is the input file"):
            BatchRun(files.input, output, "tiny")
    assert files.input.read_bytes() == before


def test_files_that_cannot_be_read_or_written_are_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot read the batch file .*in\.jsonl: No such file"):
        files.open()
    assert not files.output.exists()
    with pytest.raises(InvalidRequestError, match="Is a directory"):
        BatchRun(tmp_path, files.output, "tiny")
    files.write(completion("a", "hello"))
    with pytest.raises(InvalidRequestError, match="is no regular file"):
        BatchRun(files.input, tmp_path, "tiny")
    with pytest.raises(InvalidRequestError, match="is no regular file"):
        BatchRun(files.input, Path("/dev/null"), "tiny")
    with pytest.raises(InvalidRequestError, match=r"cannot write the answers to .*: File exists"):
        BatchRun(files.input, files.input / "out.jsonl", "tiny")


def test_a_link_to_the_output_stays_one(files: Files, tmp_path: Path) -> None:
    files.write(completion("a", ""), completion("b", "hello"))
    files.output.parent.mkdir()
    files.output.symlink_to(tmp_path / "elsewhere.jsonl")
    files.run()
    files.run()  # drops the error and writes it again
    assert files.output.is_symlink() and set(files.texts()) == {"b"}


def test_a_model_without_a_tokenizer_answers_token_ids_with_token_ids(tmp_path: Path) -> None:
    model = write_tiny_chat_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    llm = LLM(str(model), **OPTIONS)
    files = Files(tmp_path, llm)
    files.write(completion("ids", [5, 6]), completion("text", "hello"), chat("chat", "hello"))
    run = files.run()
    assert len(run.errors) == 2 and all("this model has no tokenizer" in error for error in run.errors)
    [answer] = [answer for answer in files.answers() if answer["error"] is None]
    [output] = llm.generate(
        {"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    choice = answer["response"]["body"]["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", output.outputs[0].token_ids)
