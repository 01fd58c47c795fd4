"""Bad input ends a command with exit code 2 and one clear line."""

import json
import shutil

import pytest

from tests.engine.gguf_files import TinyGguf


def assert_refused(result, message: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert message in line and result.stderr.rstrip().endswith(line)
    assert "Traceback" not in result.stderr


@pytest.fixture
def damaged(chat_model, tmp_path):
    """damaged(name) -> a model that cannot be loaded."""

    def make(kind: str):
        if kind == "nothing":
            return tmp_path / "nothing"
        if kind == "an empty directory":
            (tmp_path / "empty").mkdir()
            return tmp_path / "empty"
        if kind == "a text file":
            (tmp_path / "notes.txt").write_text("notes")
            return tmp_path / "notes.txt"
        if kind == "a cut gguf file":
            path = TinyGguf().write(tmp_path / "tiny.gguf")
            path.write_bytes(path.read_bytes()[:-1000])
            return path
        model = tmp_path / "model"
        shutil.copytree(chat_model, model)
        if kind == "an unknown architecture":
            config = json.loads((model / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
            (model / "config.json").write_text(json.dumps(config))
        if kind == "a cut safetensors file":
            weights = (model / "model.safetensors").read_bytes()
            (model / "model.safetensors").write_bytes(weights[:-1000])
        if kind == "a cut tokenizer":
            (model / "tokenizer.json").write_text('{"version": ')
        return model

    return make


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "there is no such directory or file"),
        ("an empty directory", "has no config.json"),
        ("a text file", "is a file but not a GGUF file"),
        ("a cut gguf file", "tiny.gguf"),
        ("an unknown architecture", "MambaForCausalLM"),
        ("a cut safetensors file", "model.safetensors"),
        ("a cut tokenizer", "tokenizer.json cannot be read"),
    ],
)
def test_a_model_that_cannot_be_loaded(run_model, damaged, kind, message, models_cache):
    assert_refused(run_model("generate", "hello", model=damaged(kind)), message)
    assert not list(models_cache.glob("*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", -1], "temperature is -1.0, it must be at least 0"),
        (["--top-p", 0], "top_p is 0.0, it must be above 0 and at most 1"),
        (["--max-tokens", 0], "max_tokens is 0, it must be a whole number of at least 1"),
        (["--dtype", "int3"], "dtype is 'int3', it must be one of auto, bfloat16, float32"),
        (["--policy", "random"], "policy is 'random', it must be one of fcfs"),
        (["--num-pages", 0], "num_pages is 0, it must be a whole number of at least 1"),
        (["--token-ids", "--chat"], "give one of them"),
        (["--frequency-penalty", 3], "frequency_penalty is 3.0, it must be at least -2 and at most 2"),
        (["--min-tokens", 300], "min_tokens is 300, it must be at most max_tokens, which is 256"),
        (["--logit-bias", "5"], "logit_bias is '5', it must be ID=VALUE"),
        (["--logit-bias", "a=1"], "logit_bias is 'a=1', it must be ID=VALUE"),
        (["--logit-bias", "5=nan"], "logit_bias[5] is nan, it must be at least -10000"),
        (["--regex", "a", "--choice", "b"], "structured_outputs sets regex, choice; set exactly one"),
        (["--json-schema", "/no/such/file"], "json_schema names /no/such/file, which cannot be read"),
        (["--grammar", "/"], "grammar names /, which cannot be read"),
        (["--beam-width", 2, "--stop", "a", "--top-k", 3], "stop, top_k cannot go with beam_width"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_before_the_model_is_loaded(run, chat_model, arguments, message):
    result = run("generate", chat_model, "hello", *arguments)
    assert_refused(result, message)
    assert "Loading" not in result.stderr


@pytest.mark.parametrize("prompt", ["no json", "5", '"text"', '{"prompt_token_ids": [5]}', "null", "[5"])
def test_token_ids_that_are_no_list_are_refused_before_the_model_is_loaded(run_model, prompt):
    result = run_model("generate", "[5]", prompt, "--token-ids")
    assert_refused(result, f"the prompt is no JSON list of token ids such as [1, 2, 3]: {prompt!r}")
    assert "Loading" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello", ""], "prompt 1 of 2: the prompt has no tokens"),
        (["x" * 96], "the prompt has 96 tokens, the limit is 95"),
        (["--token-ids", "[5, 266]"], "prompt_token_ids holds 266, the vocabulary has ids 0..265"),
    ],
    ids=str,
)
def test_a_prompt_that_does_not_fit_the_model(run_model, arguments, message):
    assert_refused(run_model("generate", *arguments), message)


def test_an_empty_standard_input_is_an_empty_prompt(run_model):
    assert_refused(run_model("generate", stdin="\n"), "the prompt has no tokens")


def test_an_option_that_is_no_number_or_unknown_is_a_usage_error(run, chat_model):
    for arguments in (["--max-tokens", "many"], ["--no-such-option"]):
        result = run("generate", chat_model, "hello", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert arguments[0] in result.stderr and "Traceback" not in result.stderr


def test_chat_needs_a_chat_template(run_model, chat_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    (model / "tokenizer_config.json").unlink()
    assert_refused(run_model("chat", model=model, stdin="hello\n"), "has no chat template")
    assert_refused(run_model("generate", "hello", "--chat", model=model), "has no chat template")


def test_batch_names_files_that_it_cannot_use(run, chat_model, tmp_path):
    source = tmp_path / "in.jsonl"
    assert_refused(run("batch", chat_model, source, tmp_path / "out.jsonl"), "cannot read the batch file")
    source.write_text("{}\n")
    assert_refused(run("batch", chat_model, source, source), "is the input file")
    assert_refused(run("batch", chat_model, source, tmp_path), "is no regular file")
    (tmp_path / "notes.txt").write_text("notes\n")
    assert_refused(run("batch", chat_model, source, tmp_path / "notes.txt"), "is no batch answer")
    assert (tmp_path / "notes.txt").read_text() == "notes\n"


def test_convert_refuses_what_it_cannot_write(run, chat_model, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert_refused(run("convert", chat_model, tmp_path / "full"), "is not an empty directory")
    assert_refused(run("convert", chat_model, tmp_path / "new", "--to", "onnx"), "known targets: orbax, safetensors")
    assert_refused(run("convert", chat_model, tmp_path / "new", "--dtype", "int3"), "known dtypes: bfloat16")
    assert_refused(run("convert", tmp_path / "nothing", tmp_path / "new"), "no model ")
    assert not (tmp_path / "new").exists()


def test_the_client_says_that_no_server_is_there(run):
    for arguments in (["generate", "hello"], ["info"], ["health"]):
        result = run("client", *arguments, "--address", "127.0.0.1:1")
        assert result.exit_code in (1, 2) and "Traceback" not in result.stderr
        assert "UNAVAILABLE" in result.stderr or "NOT_SERVING" in result.stdout
