"""Text to token ids and back to bytes, the same whatever file the vocabulary came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property

import attrs
import tokenizers


class TokenKind(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|return|>",
        "<EOT>",
        "</s>",
    }
)
"""Special tokens that end an answer whatever the metadata call them."""


def named_end_tokens(pieces: Sequence[str], kinds: Sequence[int]) -> set[int]:
    """Ids of the special tokens whose names say that they end an answer."""
    special = (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    return {i for i, kind in enumerate(kinds) if kind in special and pieces[i] in END_TOKENS}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al., 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@attrs.frozen(kw_only=True, eq=False)
class Tokenizer:
    """A vocabulary and its rules. Threads may share it."""

    _build: Callable[[], tokenizers.Tokenizer]
    """Makes what cuts text into pieces, and takes control tokens in text for plain text."""
    pieces: Sequence[str]
    """Vocabulary entries by id, as the file spells them."""
    kinds: Sequence[int]
    """`TokenKind` by id."""
    byte_level: bool
    """Pieces are written in GPT-2's byte alphabet, not in SentencePiece's."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    """What templates call `eos_token`; `end_token_ids` are what ends an answer."""
    add_bos: bool = False
    end_token_ids: frozenset[int] = frozenset()
    """An answer ends with any of these."""
    chat_templates: Mapping[str, str] = attrs.field(factory=dict)
    """Jinja sources by name; `default` and perhaps `tool_use`."""

    @cached_property
    def _core(self) -> tokenizers.Tokenizer:
        return self._build()

    def prepare(self) -> Tokenizer:
        """Build what `encode` needs, which takes a second for 262,144 pieces; raises `ModelError`.

        Without it the first `encode` does.
        """
        self._core  # noqa: B018
        return self

    @property
    def vocab_size(self) -> int:
        """Tokens with a text; a model's logits may have more rows (padding)."""
        return len(self.pieces)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; control tokens spelt in it count only when `special`."""
        if not special:
            return self._plain(text)
        ids: list[int] = []
        for part in self.split_control(text):
            ids += self._plain(part) if isinstance(part, str) else [part]
        return ids

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        """`encode`, with BOS in front where the vocabulary wants it and the text has it not."""
        return self.with_bos(self.encode(text, special=special))

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with one BOS in front if the vocabulary wants one."""
        if not self.add_bos or self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; ids beyond the vocabulary add nothing."""
        if not 0 <= token_id < len(self.pieces):
            return b""
        piece, kind = self.pieces[token_id], self.kinds[token_id]
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED):
            return piece.encode()
        if self.byte_level:
            return b"".join(
                bytes((_BYTE_OF[char],)) if char in _BYTE_OF else char.encode() for char in piece
            )
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace("▁", " ").encode()

    def vocabulary_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, for grammars."""
        return [self.token_bytes(i) for i in range(self.vocab_size)]

    def decode(self, ids: Sequence[int], *, control: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, control tokens vanish or show."""
        shown = (i for i in ids if control or not self.is_control(i))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether a token never shows in text."""
        return not 0 <= token_id < len(self.kinds) or self.kinds[token_id] in (
            TokenKind.CONTROL,
            TokenKind.UNKNOWN,
        )

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Spelling -> id of every control token."""
        return {
            self.pieces[i]: i
            for i, kind in enumerate(self.kinds)
            if kind == TokenKind.CONTROL and self.pieces[i]
        }

    def split_control(self, text: str) -> Iterator[str | int]:
        """Plain parts as text, control tokens spelt in between as ids; the longest wins."""
        done = 0
        for match in self._control_starts.finditer(text):
            at = match.start()
            if at < done:
                continue
            for length in self._control_lengths:
                token = self.control_tokens.get(text[at : at + length])
                if token is not None:
                    if at > done:
                        yield text[done:at]
                    yield token
                    done = at + length
                    break
        if done < len(text):
            yield text[done:]

    @cached_property
    def _control_starts(self) -> re.Pattern[str]:
        first = {re.escape(token[0]) for token in self.control_tokens}
        return re.compile(f"[{''.join(sorted(first))}]" if first else r"(?!)")

    @cached_property
    def _control_lengths(self) -> list[int]:
        return sorted({len(token) for token in self.control_tokens}, reverse=True)

    def _plain(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            # JSON may carry half a surrogate pair; UTF-8 cannot.
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._core.encode(whole, add_special_tokens=False).ids
        return ids
