"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from halogen_core.engine.protocol import GenerateRequest
from halogen_core.engine.text import TextDelta
from halogen_core.errors import RequestError
from halogen_core.server import validation
from halogen_core.server.generation import Choice, Event, Generation, Tally
from halogen_core.server.logprobs import CompletionLogprobs, join_logprobs
from halogen_core.server.openai_models import CompletionBody
from halogen_core.server.prompts import Prompt, answer_length, encode_text
from halogen_core.server.service import Service, new_id
from halogen_core.server.sse import collect, open_stream
from halogen_core.server.structured import answer_form, tried

DEFAULT_MAX_TOKENS = 16
"""What OpenAI's completions do when not told."""


async def completions(service: Service, request: Request) -> Response:
    """Continue one or several prompts, whole or as a stream."""
    service.refuse_if_draining()
    body = validation.decode(CompletionBody, await request.body())
    model = service.check_model(body.model)
    validation.refuse_unsupported(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("`best_of` other than `n` is not supported", param="best_of")
    prompts = await asyncio.to_thread(read_prompts, service, body)
    grammar = await tried(service, await asyncio.to_thread(answer_form, body))
    answer = CompletionAnswer(
        service=service, body=body, model=model, prompts=prompts, grammar=grammar
    )
    generation = Generation(service, answer.choices, validation.stop_strings(body), answer.tally)
    answer.tally.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if body.stream:
        return await open_stream(request, generation, answer, service.config.server.sse_ping_s)
    events = await collect(request, generation)
    content = msgspec.json.encode(answer.whole(events))
    return Response(content, media_type="application/json")


def read_prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """Prompts as tokens; runs in a worker thread."""
    info, tokenizer = service.engine.info, service.tokenizer
    return [
        encode_text(service, prompt)
        if isinstance(prompt, str)
        else Prompt(token_ids=prompt, text=tokenizer.decode(prompt) if body.echo else "")
        for prompt in validation.split_prompts(body.prompt, info.vocab_size)
    ]


@attrs.define(kw_only=True)
class CompletionAnswer:
    """The answer to one request: as chunks (`sse.Chunks`), or whole.

    Choice i belongs to prompt i // n.
    """

    service: Service
    body: CompletionBody
    model: str
    prompts: list[Prompt]
    grammar: str
    tally: Tally = attrs.field(factory=Tally)
    id: str = attrs.field(factory=lambda: new_id("cmpl"))
    created: int = attrs.field(factory=lambda: int(time.time()))
    choices: list[Choice] = attrs.field(init=False)
    _logprobs: dict[int, CompletionLogprobs] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        n = self.body.n or 1
        self.choices = [self._choice(i) for i in range(len(self.prompts) * n)]

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None

    @property
    def wants_answer(self) -> bool:
        """`max_tokens` 0 with `echo` asks for the prompt's log-probabilities only."""
        return self.body.max_tokens != 0

    def begin(self) -> Iterable[dict[str, Any]]:
        return ()

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        index, delta = event
        if not self.wants_answer:
            self.tally.completion_tokens = 0
        text, logprobs = self._piece(index, delta)
        if text or logprobs:
            yield self._chunk(index, text, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(index, "", finish_reason=self._reason(delta))

    def end(self) -> Iterable[dict[str, Any]]:
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield self._frame([]) | {"usage": self.tally.usage()}

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The body of an answer in one piece."""
        found = []
        if not self.wants_answer:
            self.tally.completion_tokens = 0
        for choice in self.choices:
            deltas = [delta for i, delta in events if i == choice.index]
            pieces = [self._piece(choice.index, delta) for delta in deltas]
            parts = [part for _, part in pieces if part]
            found.append(
                {
                    "index": choice.index,
                    "text": "".join(text for text, _ in pieces),
                    "logprobs": join_logprobs(parts) if self.wants_logprobs and parts else None,
                    "finish_reason": self._reason(deltas[-1]),
                }
            )
        return self._frame(found) | {"usage": self.tally.usage()}

    def _choice(self, index: int) -> Choice:
        body, service = self.body, self.service
        n = body.n or 1
        prompt = self.prompts[index // n]
        asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        length = answer_length(service, len(prompt.token_ids), asked, "prompt")
        return Choice(
            index=index,
            prompt=prompt,
            request=GenerateRequest(
                request_id=f"{self.id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=validation.sampling_params(
                    body, service.engine.info.vocab_size, index % n
                ),
                max_tokens=max(1, length),
                num_logprobs=validation.num_logprobs(body),
                prompt_logprobs=bool(body.echo and self.wants_logprobs),
                grammar=self.grammar,
                **validation.engine_fields(body),
            ),
        )

    def _piece(self, index: int, delta: TextDelta) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of a delta; the first carries an echoed prompt."""
        first = index not in self._logprobs
        tracker = self._logprobs.setdefault(index, CompletionLogprobs(self.service.tokenizer))
        top, text = self.body.logprobs or 0, ""
        parts = []
        if first and self.body.echo:
            prompt = self.choices[index].prompt
            text = prompt.text
            if self.wants_logprobs:
                parts.append(tracker.rows(prompt.token_ids, delta.prompt_logprobs, top))
        if self.wants_answer:
            text += delta.text
            if self.wants_logprobs and delta.token_ids:
                final = delta.finish_reason is not None
                parts.append(tracker.rows(delta.token_ids, delta.logprobs, top, final=final))
        return text, join_logprobs(parts) if parts else None

    def _reason(self, delta: TextDelta) -> str | None:
        return delta.finish_reason if self.wants_answer else "length"

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._frame([choice]) | validation.chunk_usage(self.body, self.tally.usage)

    def _frame(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }
