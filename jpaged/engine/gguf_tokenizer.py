"""GGUF files as Hugging Face directories: tokenizer.json and tokenizer_config.json from the vocabulary in the metadata,
beside the configuration and weights that `jpaged.weights.gguf_names` writes.

A GGUF file keeps tokens, merges or scores, and the NAME of a pre-tokenizer; what each name stands for is in
PRE_TOKENIZERS below, after llama.cpp's `src/llama-vocab.cpp`, which defines the names.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from jpaged.engine.tokenizer import SPACE
from jpaged.errors import ModelError
from jpaged.weights.gguf_names import write_checkpoint
from jpaged.weights.gguf_reader import read_gguf

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SPECIAL_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class PreTokenizer:
    """How byte-level BPE cuts text into words: each pattern in turn isolates its matches in the pieces left so far."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer((_GPT2_SPLIT,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2_SPLIT))
_LLAMA3 = PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_SPLIT,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "mpt", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3_SPLIT,))),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _QWEN2),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "tekken": PreTokenizer((_TEKKEN_SPLIT,), ignore_merges=True, add_bos=True),
}


def convert_gguf(
    gguf_path: Path, target: Path, dtype: str = "bfloat16", progress: Callable[[str], None] | None = None
) -> Path:
    """Writes a GGUF file as a Hugging Face directory (configuration, weights, tokenizer), and returns `target`.

    If `target` comes into being meanwhile (another process converting the same file), it is left as it is.
    Raises ModelError when the file is damaged or holds something unknown; nothing is left behind then.
    """
    gguf = read_gguf(gguf_path)
    if progress:
        progress(f"converting {gguf_path.name} ({len(gguf.tensors)} tensors) to {target}")
    with publish(target) as staging:
        write_tokenizer(gguf.metadata, staging)
        write_checkpoint(gguf, staging, dtype)
    return target


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A new directory to fill, renamed to `target` on success and removed on failure.

    When another process has published `target` first, that one stays and this one's work is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        yield staging
        try:
            staging.rename(target)  # replaces an empty directory, refuses a full one
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_tokenizer(metadata: Mapping[str, Any], target_dir: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `target_dir`.

    Raises ModelError for an unknown tokenizer model or pre-tokenizer (naming it and the known ones) and for a
    vocabulary that does not fit together.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the GGUF file has no tokenizer.ggml.tokens; take a file that includes its vocabulary")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"the GGUF vocabulary names {len(tokens) - len(set(tokens))} of its tokens twice")
    model = metadata.get("tokenizer.ggml.model")
    if model not in _BUILDERS:
        raise ModelError(f"unknown GGUF tokenizer model {model!r}; known: {sorted(_BUILDERS)}")
    special = _special_tokens(metadata, tokens)
    tokenizer, add_bos = _BUILDERS[model](metadata, tokens, special)

    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    named = set(special.values())
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL or token in named]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    user_defined = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined if token not in named])

    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and "bos_token" in special
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special
    tokenizer.post_processor = _bos_eos_processor(
        (special["bos_token"], tokens.index(special["bos_token"])) if add_bos else None,
        (special["eos_token"], tokens.index(special["eos_token"])) if add_eos else None,
    )
    tokenizer.save(str(target_dir / "tokenizer.json"))
    config = {
        # The class that takes tokenizer.json as it stands; the model-specific ones rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "added_tokens_decoder": {
            str(token_id): _added_token_fields(token)
            for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
        },
        "chat_template": _chat_template(metadata),
    }
    config = {key: value for key, value in config.items() if value is not None}
    (target_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _bos_eos_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.TemplateProcessing:
    """The post-processor that puts `bos` before a text and `eos` after it; each is (token, id), or None for neither."""
    before, after = (f"{bos[0]}:0 " if bos else ""), (f" {eos[0]}:0" if eos else "")
    single = f"{before}$A:0{after}"
    return processors.TemplateProcessing(
        single=single,
        pair=f"{single} {before.replace(':0', ':1')}$B:1{after.replace(':0', ':1')}",
        special_tokens=[token for token in (bos, eos) if token],
    )


def _added_token_fields(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """{"bos_token": text, ...} for the special tokens the file names."""
    special = {}
    for name, key in SPECIAL_TOKEN_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ModelError(f"tokenizer.ggml.{key}_token_id is {token_id}, the vocabulary has {len(tokens)} tokens")
        special[name] = tokens[token_id]
    return special


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The template, or when the file has several, Hugging Face's list of named ones."""
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", ())
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    templates = [{"name": name, "template": text} for name, text in {"default": default, **named}.items() if text]
    return templates if named and templates else default


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], special: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    """The `gpt2` model: byte-level BPE with explicit merges. Returns it and whether it adds BOS by default."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"unknown GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre); known: {sorted(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocab, merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], special: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    """The `llama` model: sentencepiece BPE, whose merges are implied by scores, with bytes for what has no token."""
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"a GGUF vocabulary of model 'llama' needs a score a token: got {0 if scores is None else len(scores)} "
            f"scores for {len(tokens)} tokens"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, scores, types)
    unknown = special.get("unk_token")
    if unknown is None and UNKNOWN in types:
        unknown = tokens[types.index(UNKNOWN)]
    byte_fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    tokenizer = Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_visible = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_visible]) if prefix else to_visible
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _bpe(vocab: dict[str, int], merges: list[tuple[str, ...]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocab, merges=merges, **options)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # the library raises the bare class
        raise ModelError(f"the GGUF vocabulary and its merges do not fit together: {error}") from error


def _merges_from_scores(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, ...]]:
    """Every way to make a normal token out of two tokens, best score first.

    Sentencepiece merges the neighbours whose union scores best; a ranked list of pairs is the same rule.
    """
    found = []
    for token, token_id in vocab.items():
        if types[token_id] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[token_id], token_id, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
