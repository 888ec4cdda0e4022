"""From tokens to text: incremental UTF-8, stop strings with hold-back, one end.

The same code serves streaming and whole answers, so the two are equal by construction.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import attrs

from halogen_core.engine.client import EngineClient
from halogen_core.engine.protocol import GenerateRequest, Timings, TokenLogprobs, TokenOutput


class TokenBytes(Protocol):
    """What text needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (control tokens too)."""
        ...

    def is_control(self, token_id: int) -> bool:
        """Whether a token never shows in text."""
        ...


@attrs.frozen(kw_only=True)
class TextDelta:
    """New text and the tokens since the last delta; the last one carries `finish_reason`.

    Text may lag behind tokens: bytes of an unfinished character and characters that may begin a
    stop string are held back.
    """

    text: str = ""
    reasoning: str = ""
    """What the model thought before its answer, where that was parted."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer."""
    cached_tokens: int = 0
    timings: Timings | None = None
    error_code: str = ""
    error: str = ""


@attrs.define
class StopMatcher:
    """Finds stop strings in a growing text and holds back what may begin one."""

    stops: tuple[str, ...]
    pending: str = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string met, if one is complete.

        The stop that is complete first wins; of those complete at the same character, the longest.
        """
        self.pending += text
        hits = [(at + len(s), at, s) for s in self.stops if (at := self.pending.find(s)) >= 0]
        if hits:
            _, at, stop = min(hits)
            shown, self.pending = self.pending[:at], ""
            return shown, stop
        keep = max((overlap(self.pending, s) for s in self.stops), default=0)
        cut = len(self.pending) - keep
        shown, self.pending = self.pending[:cut], self.pending[cut:]
        return shown, None

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        shown, self.pending = self.pending, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Splitter(Protocol):
    """Parts a growing text into thoughts and answer."""

    def push(self, text: str) -> tuple[str, str]: ...

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end."""
        ...


class TextStream:
    """Turns the token outputs of one request into text deltas; stop strings end answers only."""

    def __init__(
        self, tokenizer: TokenBytes, stop: Sequence[str] = (), splitter: Splitter | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(tuple(s for s in stop if s))

    def push(self, output: TokenOutput) -> TextDelta:
        """The delta for `output`; a stop string cuts its tokens and ends the answer."""
        thoughts, shown, used, stop = "", "", 0, None
        for token in output.token_ids:
            used += 1
            thought, answer = self._split(self._decode(token))
            text, stop = self._matcher.push(answer)
            thoughts, shown = thoughts + thought, shown + text
            if stop is not None:
                break
        reason = "stop" if stop is not None else output.finish_reason
        if reason is not None and stop is None:
            thought, answer = self._last()
            text, stop = self._matcher.push(answer)
            thoughts, shown = thoughts + thought, shown + text + self._matcher.flush()
        return TextDelta(
            text=shown,
            reasoning=thoughts,
            token_ids=tuple(output.token_ids[:used]),
            logprobs=tuple(output.logprobs[:used]),
            prompt_logprobs=tuple(output.prompt_logprobs),
            finish_reason=reason,
            stop_reason=stop if stop is not None else output.stop_token_id,
            cached_tokens=output.cached_tokens,
            timings=output.timings,
            error_code=output.error_code,
            error=output.error,
        )

    def _split(self, text: str) -> tuple[str, str]:
        return self._splitter.push(text) if self._splitter else ("", text)

    def _last(self) -> tuple[str, str]:
        """Unfinished bytes and what the splitter held back."""
        thought, answer = self._split(self._decoder.decode(b"", final=True))
        if self._splitter is None:
            return thought, answer
        more_thought, more_answer = self._splitter.finish()
        return thought + more_thought, answer + more_answer

    def _decode(self, token: int) -> str:
        if self._tokenizer.is_control(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))


async def generate_text(
    client: EngineClient,
    request: GenerateRequest,
    tokenizer: TokenBytes,
    *,
    stop: Sequence[str] = (),
    splitter: Splitter | None = None,
) -> AsyncIterator[TextDelta]:
    """Generate as text; closing the iterator, or meeting a stop string, ends the sequence."""
    stream = TextStream(tokenizer, stop, splitter)
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            delta = stream.push(output)
            yield delta
            if delta.finish_reason is not None:
                return
