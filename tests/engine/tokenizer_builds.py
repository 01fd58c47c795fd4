"""Small tokenizers of each kind, for tests of text handling."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.engine.gguf_files import byte_letters

SPACE = "\u2581"
SPECIAL = ["<s>", "</s>"]


def byte_level_backend() -> Tokenizer:
    """Byte-level BPE with a few merges, some of which end inside a character."""
    letters = byte_letters()
    spell = lambda data: "".join(letters[byte] for byte in data)  # noqa: E731
    pairs = [
        (b"h", b"e"),
        (b" ", b"w"),
        (b"\xe4", b"\xbd"),
        (b"\xf0", b"\x9f"),
        (b"\xf0\x9f", b"\x99"),
        (b"a", b"\xc3"),
    ]
    vocab = [*letters, *(spell(left + right) for left, right in pairs)]
    merges = [(spell(left), spell(right)) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("né你", normalized=False)])
    return tokenizer


def sentencepiece_backend(prefix: bool = True) -> Tokenizer:
    """Sentencepiece BPE with byte fallback, built as Hugging Face publishes Llama's."""
    words = [SPACE, *"helowrdan", "é", f"{SPACE}w", "he", "ll", f"{SPACE}{SPACE}"]
    vocab = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [(SPACE, "w"), ("h", "e"), ("l", "l"), (SPACE, SPACE)]
    model = models.BPE(
        vocab={token: place for place, token in enumerate(vocab)}, merges=merges,
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def metaspace_backend() -> Tokenizer:
    """A unigram vocabulary with a metaspace decoder: its tokens are not bytes."""
    pieces = [("<unk>", 0.0), (f"{SPACE}he", -1.0), ("llo", -2.0), (f"{SPACE}you", -2.5), (SPACE, -3.0), ("x", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_level_backend() -> Tokenizer:
    """Whole words and no decoder: a space goes between any two tokens."""
    words = ["red", "green", "blue", *SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="red"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
