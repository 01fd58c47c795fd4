"""Text to token ids and back, and chats to prompts.

tokenizer.json is read by the `tokenizers` library directly and chat templates are rendered here: transformers'
AutoTokenizer gives the same ids and the same text, and takes about a second longer to import and load. It is used for
directories that have no tokenizer.json.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import AddedToken

from jpaged.errors import InvalidRequestError, ModelError

SPACE = "\u2581"  # sentencepiece's visible space
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_of_letter()


@dataclass(frozen=True)
class ByteCodec:
    """What tokens are as bytes, for the two decoders that are functions of single tokens. A text is its tokens' bytes
    joined and read as UTF-8, with U+FFFD for what is not."""

    byte_level: bool  # else sentencepiece: a visible space for a space, <0xNN> for a byte
    strips_leading_space: bool  # of the whole text: the one that encoding put there

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(BYTE_OF_LETTER[letter] for letter in token)
            except KeyError:  # an added token, spelled as text
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token.replace(SPACE, " ").encode()


class ChatTemplate:
    """The Jinja programs that come with a model and turn messages into a prompt, by name: "default", and where there
    is one "tool_use" for chats with tools.

    They are other people's code, so they run in Jinja's sandbox on plain values. The environment (filters, globals,
    white space) is the one that transformers defines and templates are written for.
    """

    def __init__(self, sources: Mapping[str, str]):
        self.sources = dict(sources)
        self._compiled: dict[str, Any] = {}

    @property
    def takes_tools(self) -> bool:
        """Whether a chat with tools has a template that looks at them."""
        return "tool_use" in self.sources or "tools" in self.sources.get("default", "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises InvalidRequestError when the template refuses the messages (it may require that roles
        alternate, say), ModelError when the template itself is broken."""
        import jinja2

        if not messages:
            raise InvalidRequestError("the chat has no messages; give at least one")
        template = self._template("tool_use" if tools and "tool_use" in self.sources else "default")
        try:
            return template.render(
                messages=[_message(message) for message in messages],
                tools=_plain(list(tools)) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **_plain(dict(variables)),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error

    def _template(self, name: str) -> Any:
        import jinja2

        if name not in self.sources:
            raise InvalidRequestError(f"the model has no default chat template, only {sorted(self.sources)}")
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(f"the model's chat template is broken: {error} (line {error.lineno})") from error
        return self._compiled[name]

    @cached_property
    def _environment(self) -> Any:
        return _make_environment()


class Tokenizer:
    """A model's tokenizer: ids, text, special tokens and chat template. Immutable, safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ):
        """`backend` is taken over: truncation and padding are turned off, named tokens are marked as special."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.named_tokens = dict(named_tokens or {})
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in self.named_tokens.values()])
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_codec = _byte_codec(backend)
        self.chat_template = chat_template
        self._token_bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, added tokens included; the model's logits may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    def _named_id(self, name: str) -> int | None:
        return self.token_to_id(self.named_tokens[name]) if name in self.named_tokens else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None beyond the vocabulary."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text; none beyond the vocabulary. Needs `byte_codec`."""
        known = self._token_bytes.get(token_id)
        if known is None:
            assert self.byte_codec is not None, "this tokenizer's decoder does not work byte by byte"
            token = self.id_to_token(token_id)
            known = b"" if token is None else self.byte_codec.token_bytes(token)
            self._token_bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """One token's own text; bytes that are no whole character become U+FFFD."""
        if self.byte_codec is None:
            return self.id_to_token(token_id) or ""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens spelled in `text` become themselves; `add_special_tokens` adds BOS or EOS where the model's
        tokenizer does. Raises InvalidRequestError for what is not Unicode text."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:  # not a str, or one with lone surrogates
            raise InvalidRequestError(f"the text cannot be tokenized: {error}; give valid Unicode text") from error

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `token_ids`. Ids beyond the vocabulary add nothing; bytes that are not UTF-8 become U+FFFD.

        `spaces_between_special_tokens` matters for decoders that put a space between tokens (word-level ones):
        without it, special tokens that follow each other touch.
        """
        codec = self.byte_codec
        if codec is None:
            return self._decode_whole(token_ids, skip_special_tokens, spaces_between_special_tokens)
        kept = self.kept(token_ids, skip_special_tokens)
        text = b"".join(map(self.token_bytes, kept))
        if codec.strips_leading_space:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", errors="replace")

    def kept(self, token_ids: Sequence[int], skip_special_tokens: bool) -> Sequence[int]:
        """`token_ids` without the special ones, if those are to be skipped."""
        if not skip_special_tokens:
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self.special_ids]

    def _decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool, spaces: bool) -> str:
        if self._backend.decoder is not None or skip_special_tokens or spaces:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        text, after_special = "", True
        for token_id in token_ids:
            token, special = self.id_to_token(token_id), token_id in self.special_ids
            if token is not None:
                text += token if not text or (special and after_special) else f" {token}"
                after_special = special
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The token ids of `render_chat`'s prompt; the template writes BOS itself, so none is added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, tools, **variables), False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a chat of {"role", "content"} messages; `variables` are further ones of the template.

        Raises InvalidRequestError when the model has no chat template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; give the prompt as text")
        return self.chat_template.render(messages, add_generation_prompt, tools, {**self.named_tokens, **variables})


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises ModelError when there is none or it cannot be read."""
    config = _read_json(model_dir / "tokenizer_config.json")
    if not (model_dir / "tokenizer.json").is_file():
        return _load_with_transformers(model_dir)
    try:
        backend = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception as error:  # the library raises the bare class
        raise ModelError(f"{model_dir / 'tokenizer.json'} cannot be read: {error}; download it again") from error

    declared = config.get("added_tokens_decoder", {})
    for _, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(fields["content"]) is None or fields.get("special"):
            token = AddedToken(**{name: value for name, value in fields.items() if name != "__type"})
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    # What encoding adds is up to tokenizer.json: like transformers, this ignores the configuration's add_bos_token.
    return Tokenizer(backend, _named_tokens(model_dir, config), load_chat_template(model_dir, config))


def _load_with_transformers(model_dir: Path) -> Tokenizer:
    """For directories with other files (tokenizer.model, vocab.json): transformers converts them."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(model_dir)
        backend = loaded.backend_tokenizer
    except Exception as error:  # whatever its many classes raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model_dir} has no tokenizer.json, and its other tokenizer files cannot be loaded: {reason}; "
            "add a tokenizer.json"
        ) from error
    templates = {"chat_template": loaded.chat_template}
    return Tokenizer(backend, loaded.special_tokens_map, load_chat_template(model_dir, templates))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}; download it again") from error


def _named_tokens(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": text, ...} from tokenizer_config.json, else from the older special_tokens_map.json."""
    older = _read_json(model_dir / "special_tokens_map.json")
    named = {}
    for name in NAMED_TOKENS:
        token = config.get(name, older.get(name))
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None:
            named[name] = text
    return named


def _byte_codec(backend: tokenizers.Tokenizer) -> ByteCodec | None:
    """The codec, if the decoder is one of the two that have one."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteCodec(byte_level=True, strips_leading_space=False)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    replace, strip = steps[0], steps[3] if len(steps) == 4 else None
    if (replace["pattern"], replace["content"]) != ({"String": SPACE}, " "):
        return None
    if strip and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None
    return ByteCodec(byte_level=False, strips_leading_space=strip is not None)


def load_chat_template(model_dir: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The templates of a model directory: its .jinja files, else those in tokenizer_config.json (`config`)."""
    sources = {}
    if (model_dir / "chat_template.jinja").is_file():
        sources["default"] = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    if not sources:
        found = config.get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        sources = found if isinstance(found, dict) else {"default": found} if found else {}
    return ChatTemplate(sources) if sources else None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: plain, without keys that are None, reasoning under each of its names."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise InvalidRequestError(f'a chat message is a mapping with "role" and "content"; got {message!r}')
    plain = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """`value` rebuilt from plain JSON types, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # subclasses, such as enums
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [_plain(item) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic models
        return _plain(dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"<{type(value).__name__}>"


def _make_environment() -> Any:
    """The Jinja environment; imported on first use, as most processes never render a chat."""
    from jinja2 import TemplateError, ext, nodes, utils
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(ext.Extension):
        """`{% generation %}` marks what the assistant said, for training; here it is only its body."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class SafeNamespace(utils.Namespace):
        """Jinja's, without names that begin with an underscore: they could stand in for Python's own."""

        def __init__(*args: Any, **kwargs: Any):
            self, *rest = args  # so that a template may set an attribute called self
            utils.Namespace.__init__(self, {})
            for name, value in dict(*rest, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"chat templates cannot set the namespace attribute {name!r}")
            utils.Namespace.__setitem__(self, name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter escapes for HTML, which prompts must not be."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = SafeNamespace
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
