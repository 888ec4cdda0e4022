"""Grammars that answers must follow, as masks of the tokens allowed next.

llguidance does the work: lazy lexer derivatives and an Earley parser over the vocabulary's prefix
tree, so nothing is computed ahead and a mask costs microseconds. A grammar is its source text (a
JSON schema, regular expression or Lark grammar in llguidance's notation).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.engine.grammar_compiler import (
    Vocabulary,
    compile_grammar,
    first_line,
    open_words,
)
from halogen_core.errors import RequestError
from halogen_core.loader import Tokenizer
from halogen_core.loader.tokenizer import TokenKind

if TYPE_CHECKING:
    import llguidance  # in use only from the first grammar on: its import takes 60 ms

KEPT = 16
"""Compiled grammars remembered, failed ones too; one may hold 100 MB (`grammar_trial`)."""
SLOW_S = 0.05
"""Of processor time for the mask of one token: some hundred times what it usually takes."""
MAX_SLOW_TOKENS = 20
"""An answer may have so many; all sequences of the step wait for each."""


@attrs.define(eq=False)
class AnswerGrammar:
    """How far one answer has come in its grammar."""

    _matcher: llguidance.LLMatcher
    _known_words: int
    mask_words: int
    """Of a row of the mask, ceil(V / 32); the model may know more tokens than the tokenizer."""
    error: str = ""
    """Why the answer cannot go on; empty while it can."""
    _slow_tokens: int = 0

    def allow(self, row: NDArray[np.uint32]) -> None:
        """Write the mask of the next token into `row`, [ceil(V / 32)]."""
        began = time.thread_time()
        row[self._known_words :] = 0
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._known_words)
        self._slow_tokens += time.thread_time() - began > SLOW_S
        if self._slow_tokens > MAX_SLOW_TOKENS:
            self.error = (
                f"the grammar is too ambiguous: {MAX_SLOW_TOKENS} tokens took more than "
                f"{SLOW_S * 1000:g} ms each to find"
            )

    def record(self, token: int, *, ends: bool) -> None:
        """Note a sampled token; `ends` if it ends the answer."""
        if ends and not self._matcher.is_accepting():
            self.error = "the grammar allows no way to finish this answer"
        elif not self._matcher.consume_token(token):
            self.error = first_line(self._matcher.get_error())

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
        self._opened: llguidance.LLTokenizer | None = None
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
            found = compile_grammar(self._words(), source)
            with self._lock:
                self._compiled[source] = found
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise RequestError(f"the grammar does not compile: {found}", code="HRT-4009")
        return found

    def _words(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._opened is None:
                tokenizer = self._open_tokenizer()
                self._opened = open_words(vocabulary_of(tokenizer), tokenizer.encode)
            return self._opened


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Raises `RequestError` (HRT-4009) for a model whose answers no grammar could end."""
    if not tokenizer.end_token_ids:
        raise RequestError(
            "this model has no end token, so a grammar could not end an answer", code="HRT-4009"
        )
    special = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED)
    return Vocabulary(
        tokens=tokenizer.vocabulary_bytes(),
        special_token_ids=[i for i, kind in enumerate(tokenizer.kinds) if kind in special],
        end_token_ids=sorted(tokenizer.end_token_ids),
        bos_token_id=tokenizer.bos_token_id,
    )
