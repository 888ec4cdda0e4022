"""Grammars compiled by llguidance, and what it has to know of a tokenizer for that.

Imports little: a process that only compiles starts in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import llguidance  # in use only from the first grammar on: its import takes 60 ms

MAX_LEXER_STATES = 50_000
"""Of 1 to 2 kB each."""
_NO_WAY = "NoExtensionBias"
"""llguidance's word where no token is allowed at the beginning."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a model as bytes, and those that are no text."""

    tokens: list[bytes]
    special_token_ids: list[int]
    end_token_ids: list[int]
    bos_token_id: int | None


def open_words(
    vocabulary: Vocabulary, encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """Llguidance's prefix tree of a vocabulary; `encode` is for text that a grammar dictates."""
    import llguidance

    words = llguidance.TokenizerWrapper(_Words(vocabulary, encode))
    return llguidance.LLTokenizer(words, eos_token=sorted(vocabulary.end_token_ids))


def compile_grammar(words: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher | str:
    """The compiled grammar, or what is wrong with it. Nothing bounds the time this may take."""
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(words, source, log_level=0, limits=limits)
    if matcher.is_error():
        return first_line(matcher.get_error())
    trial = matcher.deep_copy()
    first = int.from_bytes(trial.compute_bitmask(), "little")
    if trial.is_error():
        why = first_line(trial.get_error())
        return "it matches no text" if why == _NO_WAY else why
    ends = sum(1 << token for token in words.eos_tokens)
    if not matcher.is_accepting() and not first & ~ends:
        return "it matches no text"
    return matcher


def first_line(text: str) -> str:
    """Of a message, for one."""
    return (text.strip().splitlines() or ["unknown error"])[0][:300]


class _Words:
    """A vocabulary as llguidance reads it."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = min(vocabulary.end_token_ids)
        self.bos_token_id = vocabulary.bos_token_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))
