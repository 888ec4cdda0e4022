"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from halogen_core.engine.protocol import TokenLogprobs
from halogen_core.loader import Tokenizer

FLOOR = -9999.0
"""What OpenAI reports for an impossible token; JSON has no -Infinity."""


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {
        "content": [
            _chat_token(tokenizer, row.token_id, row.logprob)
            | {
                "top_logprobs": [
                    _chat_token(tokenizer, token, logprob)
                    for token, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
                ]
            }
            for row in rows
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, FLOOR),
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """The `logprobs` object of a text completion, built as tokens come.

    The pieces in `tokens`, put together, are the text: a token that ends within a character has
    the piece "", the one that completes it has the character. Control tokens show no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def rows(
        self,
        token_ids: Sequence[int],
        rows: Sequence[TokenLogprobs | None],
        top: int,
        *,
        final: bool = False,
    ) -> dict[str, Any]:
        """The object for these tokens; offsets go on from the last call."""
        pieces, offsets = [], []
        for n, token in enumerate(token_ids, start=1):
            offsets.append(self._offset)
            pieces.append(self._piece(token, final and n == len(token_ids)))
            self._offset += len(pieces[-1])
        return {
            "tokens": pieces,
            "text_offset": offsets,
            "token_logprobs": [None if row is None else max(row.logprob, FLOOR) for row in rows],
            "top_logprobs": [self._top(row) for row in rows] if top else None,
        }

    def _piece(self, token: int, last: bool) -> str:
        hidden = self._tokenizer.is_control(token)
        return self._decoder.decode(b"" if hidden else self._tokenizer.token_bytes(token), last)

    def _top(self, row: TokenLogprobs | None) -> dict[str, float] | None:
        if row is None:
            return None
        ranked = zip(row.top_ids, row.top_logprobs, strict=True)
        found: dict[str, float] = {}
        for token, logprob in ((row.token_id, row.logprob), *ranked):
            found.setdefault(_name(self._tokenizer.token_bytes(token)), max(logprob, FLOOR))
        return found


def _name(raw: bytes) -> str:
    """A token's text, or its bytes in hexadecimal where it is only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def join_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object from those of consecutive deltas."""
    joined: dict[str, Any] = {}
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        columns = [part[name] for part in parts]
        joined[name] = (
            None if any(c is None for c in columns) else [row for c in columns for row in c]
        )
    return joined
