"""One engine in this process and a conversation with it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import attrs
import msgspec

from halogen_core.cli.assembly import Parts
from halogen_core.engine.building import build_engine
from halogen_core.engine.engine import Engine
from halogen_core.engine.local import LocalEngine
from halogen_core.engine.protocol import EngineInfo, GenerateRequest, SamplingParams, Timings
from halogen_core.engine.text import generate_text
from halogen_core.errors import HalogenError, RequestError
from halogen_core.loader import Tokenizer
from halogen_core.loader.chat_template import render_chat


@attrs.frozen(kw_only=True)
class Ask:
    """How to answer."""

    sampling: SamplingParams
    max_tokens: int | None = None
    raw: bool = False


@attrs.define(kw_only=True)
class Answer:
    """An answer as far as it came."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    timings: Timings | None = None
    began: float = attrs.field(factory=time.monotonic)
    first: float | None = None
    last: float = 0.0

    def report(self, info: EngineInfo) -> dict[str, Any]:
        """What `--json` prints."""
        first = self.first if self.first is not None else self.last
        ttft, decode = first - self.began, self.last - first
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "timings": {
                "ttft_s": round(ttft, 6),
                "prefill_tok_s": _rate(len(self.prompt_token_ids), ttft),
                "decode_tok_s": _rate(len(self.token_ids) - 1, decode),
            },
            "backend": info.backend,
            "device": info.device,
            "model": info.model_id,
            "placement": info.placement,
        }


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else None


def load_engine(
    parts: Parts, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Engine:
    """An engine for one user.

    Call it outside of an event loop: asyncio keeps Ctrl-C until the next `await`.
    """
    alone = msgspec.structs.replace(parts.options, max_batch=1)  # no pool for others
    return build_engine(alone, progress=progress)


@attrs.define(kw_only=True)
class Session:
    """Answers prompts one after another, with history unless `raw`."""

    engine: LocalEngine
    tokenizer: Tokenizer
    ask: Ask
    history: list[dict[str, str]] = attrs.field(factory=list)
    _ids: itertools.count[int] = attrs.field(factory=itertools.count)

    @classmethod
    async def open(
        cls, engine: Engine, tokenizer: Tokenizer, ask: Ask, system: str | None
    ) -> Session:
        """Start `engine`; call it inside the event loop that all answers use."""
        history = [{"role": "system", "content": system}] if system else []
        client = LocalEngine(engine, engine.info)
        return cls(engine=client, tokenizer=tokenizer, ask=ask, history=history)

    async def answer(self, prompt: str, show: Callable[[str], None]) -> Answer:
        """Answer one prompt; what came before an interruption stays in the history."""
        answer = Answer(prompt_token_ids=self._prompt_ids(prompt))
        try:
            await self._generate(answer, show)
        finally:
            if not self.ask.raw:
                self.history.append({"role": "assistant", "content": answer.text})
        return answer

    async def close(self) -> None:
        await self.engine.close()

    def _prompt_ids(self, prompt: str) -> list[int]:
        if self.ask.raw:
            return self.tokenizer.encode_prompt(prompt)
        self.history.append({"role": "user", "content": prompt})
        return render_chat(self.tokenizer, self.history)

    async def _generate(self, answer: Answer, show: Callable[[str], None]) -> None:
        room = self.engine.info.context_length - len(answer.prompt_token_ids)
        request = GenerateRequest(
            request_id=f"run-{next(self._ids)}",
            prompt_token_ids=answer.prompt_token_ids,
            sampling=self.ask.sampling,
            max_tokens=max(1, min(room, self.ask.max_tokens or room)),
        )
        async with aclosing(generate_text(self.engine, request, self.tokenizer)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.finish_reason == "error":
                    raise _failure(delta.error_code, delta.error)
                answer.last = time.monotonic()
                if delta.token_ids and answer.first is None:
                    answer.first = answer.last
                answer.text += delta.text
                answer.token_ids += delta.token_ids
                answer.finish_reason = delta.finish_reason
                answer.timings = delta.timings
                show(delta.text)


def _failure(code: str, text: str) -> HalogenError:
    kind = RequestError if code.startswith("HRT-4") else HalogenError
    return kind(text or "the engine broke off", code=code or "HRT-5031")
