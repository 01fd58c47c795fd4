"""The tokenizer equals transformers' AutoTokenizer on ids and chats, and its decoding equals the library's."""

import json
import random
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from jpaged.engine.demo_model import ensure_demo_model
from jpaged.engine.tokenizer import ChatTemplate, Tokenizer, load_tokenizer
from jpaged.errors import InvalidRequestError, ModelError
from tests.engine.tokenizer_builds import byte_level_backend, sentencepiece_backend, word_level_backend

BACKENDS = {"byte-level": byte_level_backend, "sentencepiece": sentencepiece_backend}
TEXTS = ["hello world", "", " ", "a<s>b</s>", "né你 🙂\n\n  x", "<tool>1234", "\x00\ufeffﬁ"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "né你 <b>&</b> 'q' \"r\""},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"z": [1, 2.5, None], "a": "é"}}]},
    {"role": "tool", "content": "ok"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
        "{% if message.content is defined %}{{ message['content'] }}{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ bos_token }}assistant{% endif %}"
    ),
    "white space": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    ),
    "json": (
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages if m.tool_calls %}"
        "{{ m.tool_calls | tojson }}"
        "{{ m.tool_calls[0].arguments | tojson(sort_keys=true, separators=(',', ':')) }}{% endfor %}"
    ),
    "state": (
        "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ bos_token is defined }}{{ pad_token is defined }}{{ documents }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}A{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ x is defined }}"
    ),
    "date": "{{ strftime_now('%Y') }}{{ custom }}{{ flag }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
}


def save(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def auto(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"pad_token": {"content": "<pad>", "lstrip": False, "__type": "AddedToken"}},
        {"added_tokens_decoder": {"300": {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False,
                                          "single_word": False, "normalized": False}}},
    ],
)  # fmt: skip
def test_ids_equal_those_of_auto_tokenizer(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    backend = BACKENDS[name]()
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    save(tmp_path, backend, **config)
    ours, theirs = load_tokenizer(tmp_path), auto(tmp_path)
    for text in [*TEXTS, "x<pad>y<extra>"]:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id,
    )  # fmt: skip
    assert set(theirs.all_special_ids) <= ours.special_ids


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_those_of_auto_tokenizer(tmp_path: Path, name: str, tools: Any, prompt: bool) -> None:
    save(tmp_path, byte_level_backend(), chat_template=TEMPLATES[name])
    ours, theirs = load_tokenizer(tmp_path), auto(tmp_path)
    chat = [*CHAT, {"role": "assistant", "content": "x", "reasoning": "because"}] if name == "reasoning" else CHAT
    variables = {"custom": "é", "flag": False} if name == "date" else {}
    expected = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=prompt, tokenize=False, **variables)
    assert ours.render_chat(chat, prompt, tools, **variables) == expected
    ids = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=prompt, **variables)["input_ids"]
    assert ours.apply_chat_template(chat, prompt, tools, **variables) == ids


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, byte_level_backend(), chat_template=named)
    for tools in (None, TOOLS):
        expected = auto(tmp_path).apply_chat_template(chat, tools=tools, tokenize=False)
        assert load_tokenizer(tmp_path).render_chat(chat, tools=tools) == expected
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).render_chat(chat) == auto(tmp_path).apply_chat_template(chat, tokenize=False)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    for tools in (None, TOOLS):
        expected = auto(tmp_path).apply_chat_template(chat, tools=tools, tokenize=False)
        assert load_tokenizer(tmp_path).render_chat(chat, tools=tools) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "refuses these messages"),
        ("{{ messages[0]['content'] + 1 }}", "refuses these messages"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "cannot set"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(template: str, message: str) -> None:
    tokenizer = Tokenizer(byte_level_backend(), chat_template=ChatTemplate({"default": template}))
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_the_models_fault() -> None:
    tokenizer = Tokenizer(byte_level_backend(), chat_template=ChatTemplate({"default": "{% for %}"}))
    with pytest.raises(ModelError, match="chat template is broken"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_chats_that_cannot_be_are_refused() -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer(byte_level_backend()).apply_chat_template(chat)
    tokenizer = Tokenizer(byte_level_backend(), chat_template=ChatTemplate({"rag": "x"}))
    with pytest.raises(InvalidRequestError, match="no default chat template"):
        tokenizer.apply_chat_template(chat)
    tokenizer = Tokenizer(byte_level_backend(), chat_template=ChatTemplate({"default": "x"}))
    with pytest.raises(InvalidRequestError, match="no messages"):
        tokenizer.apply_chat_template([])
    with pytest.raises(InvalidRequestError, match="a chat message is a mapping"):
        tokenizer.apply_chat_template(["hi"])  # pyright: ignore[reportArgumentType]


def test_templates_see_plain_values_only() -> None:
    class Role(StrEnum):
        USER = "user"

    template = "{{ messages[0].role }} {{ messages[0].content }} {{ messages[0].n + 1 }} {{ messages[0].image }}"
    tokenizer = Tokenizer(byte_level_backend(), chat_template=ChatTemplate({"default": template}))
    message = {"role": Role.USER, "content": ("a", True), "n": 1, "image": object()}
    assert tokenizer.render_chat([message]) == "user ('a', True) 2 <object>"


@pytest.mark.parametrize("name", BACKENDS)
def test_decoding_equals_the_librarys_where_bytes_are_text(name: str) -> None:
    backend = BACKENDS[name]()
    tokenizer = Tokenizer(backend)

    @given(
        st.lists(st.sampled_from(["he", " w", "你", "🙂", "<s>", "né你", "\n", "  ", "é"]), max_size=12).map("".join)
    )
    @settings(max_examples=150)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)

    check()


def test_byte_level_decoding_equals_the_librarys_for_any_tokens() -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer(backend)

    @given(st.lists(st.integers(min_value=0, max_value=tokenizer.vocab_size + 3), max_size=30))
    @settings(max_examples=300)
    def check(ids: list[int]) -> None:
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)

    check()


def test_token_bytes_are_what_tokens_add() -> None:
    byte_level, sentencepiece = Tokenizer(byte_level_backend()), Tokenizer(sentencepiece_backend())
    assert [byte_level.token_bytes(token_id) for token_id in range(256)] == [bytes([byte]) for byte in range(256)]
    for token, expected in (("<tool>", b"<tool>"), ("né你", "né你".encode()), ("<s>", b"<s>")):
        token_id = byte_level.token_to_id(token)
        assert token_id is not None and byte_level.token_bytes(token_id) == expected
    for token, expected in (("<0x0A>", b"\n"), ("\u2581w", b" w"), ("<unk>", b"<unk>")):
        token_id = sentencepiece.token_to_id(token)
        assert token_id is not None and sentencepiece.token_bytes(token_id) == expected
    assert byte_level.token_bytes(10**6) == b"" and byte_level.id_to_token(-1) is None


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    text = "a long text " * 20
    assert load_tokenizer(save(tmp_path, backend)).decode(load_tokenizer(tmp_path).encode(text)) == text


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", 3])
def test_what_is_not_text_is_the_requests_fault(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
        Tokenizer(byte_level_backend()).encode(text)


def test_other_tokenizer_files_go_through_transformers(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("he 你") == auto(tmp_path).encode("he 你")
    assert tokenizer.decode(tokenizer.encode("he 你")) == "he 你"


def test_directories_without_a_readable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_word_level_tokenizers_decode_with_spaces() -> None:
    tokenizer = Tokenizer(word_level_backend())
    assert tokenizer.byte_codec is None
    assert tokenizer.decode(tokenizer.encode("red blue")) == "red blue"


def test_the_demo_tokenizer_equals_auto_tokenizer() -> None:
    demo_dir = ensure_demo_model()
    ours, theirs = load_tokenizer(demo_dir), auto(demo_dir)
    texts = [
        "The quick brown fox; don't they'll I'M 12 345 6.78e9",
        "def f(x):\n\treturn  x**2\r\n\n\n    # é",
        "你好,世界! 日本語 한국어 مرحبا नमस्ते",
        "🙂🎉👩‍👩‍👧‍👦 ½ Ⅷ \ufb01",
        "<|im_start|>user\nhi<|im_end|>\n",
        "   \t\t   a  12   34\n 5 ",
        "",
    ]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    for prompt in (True, False):
        ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
        assert ours.apply_chat_template(chat, prompt) == ids
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(ours.vocab_size) for _ in range(30)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (49152, 1, 2, 2)
