"""Tokenizers built from GGUF vocabularies give the ids of the tokenizers that the vocabularies came from."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jpaged.engine.gguf_tokenizer import PRE_TOKENIZERS, write_tokenizer
from jpaged.engine.tokenizer import SPACE, load_tokenizer
from jpaged.errors import ModelError

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 12:34, don't they'll say 1234567 times?",
    "def f(x):\n    return x ** 2  # squared\n\n\tclass A:\n\t\tpass\r\n",
    "naïve café — 你好,世界! 日本語 한국어 🙂🎉 ½ Ⅷ",
]
TEXTS = [*CORPUS, "", " ", "\n", "a  12   34\n 5", "   leading", "trailing   ", "DON'T we'Re", "🙂" * 3, "\x00\ufeff"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_source(name: str) -> Tokenizer:
    """A trained byte-level tokenizer as its authors would publish it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    first: dict[str, Any] = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "gpt-2": pre_tokenizers.Digits(individual_digits=False),  # changes nothing that GPT-2's split would not
        "llama-bpe": pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
    }
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name != "llama-bpe")
    steps = [byte_level] if name == "gpt-2" else [first[name], byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def byte_level_metadata(source: Tokenizer, name: str, **more: Any) -> dict[str, Any]:
    tokens = [source.id_to_token(token_id) for token_id in range(source.get_vocab_size())]
    merges = json.loads(source.to_str())["model"]["merges"]
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    } | more


@pytest.mark.parametrize("name", ["smollm", "gpt-2", "llama-bpe"])
def test_byte_level_ids_equal_the_source(tmp_path: Path, name: str) -> None:
    source = byte_level_source(name)
    write_tokenizer(byte_level_metadata(source, name), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in [*TEXTS, f"{SPECIAL[1]}user\nhi 12{SPECIAL[2]}\n"]:
        ids = tokenizer.encode(text)
        assert ids == source.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm_cuts_where_digits_then_gpt2_would() -> None:
    pre = PRE_TOKENIZERS["smollm"]
    ours = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits])
    theirs = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["gpt-2"].splits[0]), "isolated")
    reference = pre_tokenizers.Sequence([theirs, gpt2])

    @given(st.text(alphabet=st.sampled_from("ab 1\uff12½\n\t'sé你🙂.-"), max_size=24))
    @settings(max_examples=200)
    def check(text: str) -> None:
        assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text)

    check()


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_loses_no_text(name: str) -> None:
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in PRE_TOKENIZERS[name].splits]
    )
    for text in TEXTS:
        assert "".join(piece for piece, _ in pre.pre_tokenize_str(text)) == text


def test_a_word_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*letters, "hello"],
        "tokenizer.ggml.merges": [],
    }
    for name, expected in (("llama-bpe", ["hello"]), ("gpt-2", list("hello"))):
        write_tokenizer(metadata | {"tokenizer.ggml.pre": name}, tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("hello")] == expected


def test_user_defined_tokens_stay_whole_and_visible(tmp_path: Path) -> None:
    source = byte_level_source("gpt-2")
    metadata = byte_level_metadata(source, "gpt-2")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    write_tokenizer(metadata, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    think = source.get_vocab_size()
    ids = tokenizer.encode("a<think>b<|im_end|>")
    assert ids[1] == think and think not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    ("declared", "name", "adds"),
    [(None, "llama-bpe", True), (None, "gpt-2", False), (True, "gpt-2", True), (False, "llama-bpe", False)],
)
def test_bos_is_added_as_the_file_says(tmp_path: Path, declared: bool | None, name: str, adds: bool) -> None:
    metadata = byte_level_metadata(byte_level_source(name), name)
    del metadata["tokenizer.ggml.add_bos_token"]
    if declared is not None:
        metadata["tokenizer.ggml.add_bos_token"] = declared
    write_tokenizer(metadata, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.encode("hi")[0] == 1) == adds
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != 1


def test_named_templates_are_kept(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level_source("gpt-2"), "gpt-2") | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    write_tokenizer(metadata, tmp_path)
    tokenizer, messages = load_tokenizer(tmp_path), [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"name": "f"}]) == "with tools"


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A small sentencepiece BPE vocabulary: merged pieces score by rank, letters come last, all bytes are there."""
    merged = ["he", "ll", "hell", "hello", f"{SPACE}w", "or", f"{SPACE}wor", "ld", f"{SPACE}world", f"{SPACE}hello",
              f"{SPACE}{SPACE}", "an", f"{SPACE}an", "é"]  # fmt: skip
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz"]
    control = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = control + byte_tokens + merged + letters
    scores = [0.0] * (3 + 256) + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | more


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """Sentencepiece's BPE as it is defined: again and again join the neighbours whose union scores best, the leftmost
    of equals; then spell what has no token in bytes."""
    ids = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    pieces = list((SPACE + text if text else "").replace(" ", SPACE))
    while True:
        unions = enumerate(left + right for left, right in pairwise(pieces))
        joined = [(-scores[ids[union]], place) for place, union in unions if types[ids.get(union, 0)] == 1]
        if not joined:
            break
        _, place = min(joined)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return [1, *found]


def test_sentencepiece_ids_equal_the_definition(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    write_tokenizer(metadata, tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    @given(st.text(alphabet=st.sampled_from("helowrdan é你🙂\n"), max_size=20))
    @settings(max_examples=300)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == sentencepiece_reference(metadata, text)
        assert tokenizer.decode(ids) == text

    check()


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    write_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("hello world")] == [
        "<s>", "hello", f"{SPACE}world",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, r"unknown GGUF pre-tokenizer 'martian'.*llama-bpe.*smollm"),
        ({"tokenizer.ggml.model": "rwkv"}, r"unknown GGUF tokenizer model 'rwkv'; known: \['gpt2', 'llama'\]"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a", "b"]}, "names 1 of its tokens twice"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id is 5000"),
        ({"tokenizer.ggml.merges": ["nope nothing"]}, "do not fit together"),
        ({"tokenizer.ggml.model": "llama"}, "needs a score a token: got 0 scores"),
    ],
)
def test_vocabularies_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(byte_level_source("gpt-2"), "gpt-2") | change
    with pytest.raises(ModelError, match=message):
        write_tokenizer(metadata, tmp_path)
