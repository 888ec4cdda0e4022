"""POST /v1/chat/completions"""

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
from halogen_core.server import validation
from halogen_core.server.generation import Choice, Event, Generation, Tally
from halogen_core.server.logprobs import chat_logprobs
from halogen_core.server.openai_models import ChatBody
from halogen_core.server.prompts import Prompt, answer_length, refuse_huge_text
from halogen_core.server.service import Service, new_id
from halogen_core.server.sse import collect, open_stream
from halogen_core.server.structured import answer_grammar


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    service.refuse_if_draining()
    body = validation.decode(ChatBody, await request.body())
    model = service.check_model(body.model)
    validation.refuse_unsupported(body)
    prompt = await asyncio.to_thread(render_prompt, service, body)
    grammar = await asyncio.to_thread(answer_grammar, service.grammars, body)
    answer = ChatAnswer(service=service, body=body, model=model, grammar=grammar, tally=Tally())
    generation = Generation(
        service, make_choices(answer, prompt), validation.stop_strings(body), answer.tally
    )
    answer.tally.prompt_tokens = len(prompt.token_ids)
    if body.stream:
        return await open_stream(request, generation, answer, service.config.server.sse_ping_s)
    events = await collect(request, generation)
    content = msgspec.json.encode(answer.whole(events))
    return Response(content, media_type="application/json")


def render_prompt(service: Service, body: ChatBody) -> Prompt:
    """Messages through the model's chat template; runs in a worker thread."""
    messages = validation.template_messages(body.messages)
    refuse_huge_text(service, "".join(m["content"] for m in messages), "messages")
    add = body.add_generation_prompt is not False
    ids = service.render(
        messages, add_generation_prompt=add, template_kwargs=body.chat_template_kwargs
    )
    return Prompt(token_ids=ids, text="")


def make_choices(answer: ChatAnswer, prompt: Prompt) -> list[Choice]:
    """The sequences that a body asks for."""
    body, service = answer.body, answer.service
    asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if asked is None:
        asked = service.config.server.default_max_tokens
    length = answer_length(service, len(prompt.token_ids), asked, "messages")
    return [
        Choice(
            index=index,
            prompt=prompt,
            request=GenerateRequest(
                request_id=f"{answer.id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=validation.sampling_params(body, service.engine.info.vocab_size, index),
                max_tokens=max(1, length),
                num_logprobs=validation.num_logprobs(body),
                grammar=answer.grammar,
                **validation.engine_fields(body),
            ),
        )
        for index in range(body.n or 1)
    ]


@attrs.define(kw_only=True)
class ChatAnswer:
    """The answer to one request: as chunks (`sse.Chunks`), or whole."""

    service: Service
    body: ChatBody
    model: str
    grammar: str
    tally: Tally
    id: str = attrs.field(factory=lambda: new_id("chatcmpl"))
    created: int = attrs.field(factory=lambda: int(time.time()))

    def begin(self) -> Iterable[dict[str, Any]]:
        for index in range(self.body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        index, delta = event
        logprobs = self._logprobs(delta.logprobs)
        if delta.text or logprobs:
            yield self._chunk(index, {"content": delta.text}, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(index, {}, finish_reason=delta.finish_reason)

    def end(self) -> Iterable[dict[str, Any]]:
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield self._frame("chat.completion.chunk", []) | {"usage": self.tally.usage()}

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The body of an answer in one piece."""
        choices = []
        for index in range(self.body.n or 1):
            deltas = [delta for i, delta in events if i == index]
            rows = [row for delta in deltas for row in delta.logprobs]
            choices.append(
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": "".join(delta.text for delta in deltas),
                        "refusal": None,
                    },
                    "logprobs": self._logprobs(rows),
                    "finish_reason": deltas[-1].finish_reason,
                }
            )
        return self._frame("chat.completion", choices) | {"usage": self.tally.usage()}

    def _logprobs(self, rows: Any) -> dict[str, Any] | None:
        return chat_logprobs(self.service.tokenizer, rows) if self.body.logprobs and rows else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = self._frame("chat.completion.chunk", [choice])
        return chunk | validation.chunk_usage(self.body, self.tally.usage)

    def _frame(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }
