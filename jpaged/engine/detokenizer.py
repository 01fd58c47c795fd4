"""Text from tokens as they come.

The pieces join to what decoding the prompt and all the output at once would add to the prompt's text. A character whose
bytes are spread over several tokens is held back until it is whole, so a piece holds U+FFFD only for bytes that can no
longer become a character. Prompt text never appears, except that a character which the prompt began and the output
completed is the output's.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from jpaged.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER_BYTES = 4
CONTEXT_TOKENS = 5  # what a decoder may look back on
MAX_HELD_TOKENS = 8  # no character takes more; bytes that do are broken


class IncrementalDetokenizer:
    """Turns one sequence's output tokens into text. Work and state are bounded for each token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._stream: _Stream
        if tokenizer.byte_codec is not None:
            self._stream = _ByteStream(tokenizer, prompt_token_ids, skip_special_tokens)
        else:
            self._stream = _WindowStream(
                tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens
            )

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; empty while a character is incomplete."""
        return self._stream.push(self._tokenizer.kept(token_ids, self._skip_special_tokens))

    def finish(self) -> str:
        """What was held back, now that no more tokens come; incomplete characters as U+FFFD."""
        return self._stream.finish()


class _Stream(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """For tokenizers whose tokens are bytes: an incremental UTF-8 decoder, which holds at most three of them."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        codec = tokenizer.byte_codec
        assert codec is not None
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        special = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Decoding strips a space only where no text comes before it.
        self._strip_next_space = codec.strips_leading_space and not any(
            tokenizer.token_bytes(token_id) for token_id in prompt_token_ids if token_id not in special
        )
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in special:
                tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= LONGEST_CHARACTER_BYTES:
                break
        self._decoder.decode(tail)
        self._prompt_bytes: bytes = self._decoder.getstate()[0]  # of a character that the prompt leaves incomplete

    def push(self, token_ids: Sequence[int]) -> str:
        new = b"".join(map(self._tokenizer.token_bytes, token_ids))
        if not new:
            return ""
        if self._strip_next_space:
            self._strip_next_space = False
            new = new.removeprefix(b" ")
        if not self._prompt_bytes:
            return self._decoder.decode(new)
        return self._join_prompt(new[:1]) + self._decoder.decode(new[1:])

    def _join_prompt(self, first: bytes) -> str:
        """Decodes the output's very first byte, which settles the prompt's incomplete character."""
        began, text = self._prompt_bytes, self._decoder.decode(first)
        if first:
            self._prompt_bytes = b""
            if text.startswith(REPLACEMENT) and began + first != REPLACEMENT.encode():
                return text[1:]  # the character stayed broken: that is the prompt's, not the output's
        return text

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        return "" if self._prompt_bytes else text


class _WindowStream:
    """For other tokenizers: decodes the last tokens with and without the new ones, and gives the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool, spaces: bool):
        self._tokenizer, self._spaces = tokenizer, spaces
        special = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._known: list[int] = []  # tokens whose text is out, as context
        for token_id in reversed(prompt_token_ids):
            if token_id not in special:
                self._known.insert(0, token_id)
            if len(self._known) == CONTEXT_TOKENS:
                break
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:  # one by one, so that the pieces do not depend on how tokens are grouped
            self._held.append(token_id)
            text += self._emit(self._difference(), final=len(self._held) > MAX_HELD_TOKENS)
        return text

    def finish(self) -> str:
        return self._emit(self._difference(), final=True) if self._held else ""

    def _emit(self, text: str, final: bool) -> str:
        if text.endswith(REPLACEMENT) and not final:
            return ""
        self._known = (self._known + self._held)[-CONTEXT_TOKENS:]
        self._held = []
        return text

    def _difference(self) -> str:
        before, after = self._decode(self._known), self._decode(self._known + self._held)
        if not after.startswith(before):  # a character that was incomplete, at the end of the prompt, no longer is
            before = before.rstrip(REPLACEMENT)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, spaces_between_special_tokens=self._spaces)
