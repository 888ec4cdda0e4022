"""Grammars that answers must follow, as masks of the tokens allowed next.

llguidance does the work: lazy lexer derivatives and an Earley parser over the vocabulary's prefix
tree, so nothing is computed ahead and a mask costs microseconds. A grammar is its source text (a
JSON schema, regular expression or Lark grammar in llguidance's notation).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.errors import RequestError
from halogen_core.loader import Tokenizer
from halogen_core.loader.tokenizer import TokenKind

if TYPE_CHECKING:
    import llguidance  # in use only from the first grammar on: its import takes 60 ms

KEPT = 64
"""Compiled grammars remembered, failed ones too."""
MAX_LEXER_STATES = 50_000
"""Of 1 to 2 kB each."""

_NO_WAY = "NoExtensionBias"
"""llguidance's word where no token is allowed at the beginning."""


@attrs.define(eq=False)
class AnswerGrammar:
    """How far one answer has come in its grammar."""

    _matcher: llguidance.LLMatcher
    _known_words: int
    mask_words: int
    """Of a row of the mask, ceil(V / 32); the model may know more tokens than the tokenizer."""
    error: str = ""
    """Why the answer cannot go on; empty while it can."""

    def allow(self, row: NDArray[np.uint32]) -> None:
        """Write the mask of the next token into `row`, [ceil(V / 32)]."""
        row[self._known_words :] = 0
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._known_words)

    def record(self, token: int, *, ends: bool) -> None:
        """Note a sampled token; `ends` if it ends the answer."""
        if ends and not self._matcher.is_accepting():
            self.error = "the grammar allows no way to finish this answer"
        elif not self._matcher.consume_token(token):
            self.error = _first_line(self._matcher.get_error())

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but an end token."""
        return self._matcher.is_stopped()


class Grammars:
    """Compiled grammars over one vocabulary. Threads may share it."""

    def __init__(self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._open_tokenizer = open_tokenizer
        self._mask_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher | str] = OrderedDict()

    def start(self, source: str) -> AnswerGrammar:
        """A grammar at its beginning; raises `RequestError` (HRT-4009) if it is none."""
        matcher = self._compile(source).deep_copy()
        known = -(-self._words().vocab_size // 32)
        assert known <= self._mask_words, "the tokenizer names tokens that have no logits"
        return AnswerGrammar(matcher=matcher, known_words=known, mask_words=self._mask_words)

    def check(self, source: str) -> None:
        """Compile `source` ahead of `start`; raises `RequestError` (HRT-4009) if it is none."""
        self._compile(source)

    def _compile(self, source: str) -> llguidance.LLMatcher:
        with self._lock:
            if found := self._compiled.get(source):
                self._compiled.move_to_end(source)
        if found is None:
            found = self._new(source)
            with self._lock:
                self._compiled[source] = found
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise RequestError(f"the grammar does not compile: {found}", code="HRT-4009")
        return found

    def _new(self, source: str) -> llguidance.LLMatcher | str:
        """The compiled grammar, or what is wrong with it."""
        import llguidance

        words = self._words()
        limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(words, source, log_level=0, limits=limits)
        if matcher.is_error():
            return _first_line(matcher.get_error())
        trial = matcher.deep_copy()
        first = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
        if trial.is_error():
            why = _first_line(trial.get_error())
            return "it matches no text" if why == _NO_WAY else why
        if not matcher.is_accepting() and set(np.flatnonzero(first)) <= set(words.eos_tokens):
            return "it matches no text"
        return matcher

    def _words(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._open_tokenizer())
            return self._vocabulary


class _Words:
    """A vocabulary as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.end_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens: Sequence[bytes] = tokenizer.vocabulary_bytes()
        special = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED)
        self.special_token_ids = [i for i, k in enumerate(tokenizer.kinds) if k in special]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


def _vocabulary(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    import llguidance

    if not tokenizer.end_token_ids:
        raise RequestError(
            "this model has no end token, so a grammar could not end an answer", code="HRT-4009"
        )
    words = llguidance.TokenizerWrapper(_Words(tokenizer))
    return llguidance.LLTokenizer(words, eos_token=sorted(tokenizer.end_token_ids))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown error"])[0][:300]
