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
from halogen_core.engine.reasoning import OPEN, Part, ReasoningSplitter
from halogen_core.engine.text import TextDelta
from halogen_core.errors import RequestError
from halogen_core.loader.chat_template import chat_template
from halogen_core.server import validation
from halogen_core.server.generation import Choice, Event, Generation, Tally
from halogen_core.server.logprobs import chat_logprobs
from halogen_core.server.openai_models import ChatBody
from halogen_core.server.prompts import Prompt, answer_length, refuse_huge_text
from halogen_core.server.service import Service, new_id
from halogen_core.server.sse import collect, open_stream
from halogen_core.server.structured import Form, answer_form, lark_grammar, tried
from halogen_core.server.tools import Toolbox, ToolDeltas, read_tools

TAIL_TOKENS = 16
"""Of a prompt, in which its template may have opened the thoughts: `<think>` letter by letter."""


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    service.refuse_if_draining()
    body = validation.decode(ChatBody, await request.body())
    model = service.check_model(body.model)
    validation.refuse_unsupported(body)
    tools = read_tools(service.tokenizer, body)
    prompt = await asyncio.to_thread(render_prompt, service, body, tools)
    grammar = await tried(service, await asyncio.to_thread(choose_form, body, tools))
    answer = ChatAnswer(service=service, body=body, model=model, tools=tools)
    choices = make_choices(answer, prompt, grammar)
    generation = Generation(service, choices, validation.stop_strings(body), answer.tally)
    answer.tally.prompt_tokens = len(prompt.token_ids)
    if body.stream:
        return await open_stream(request, generation, answer, service.config.server.sse_ping_s)
    events = await collect(request, generation)
    content = msgspec.json.encode(answer.whole(events))
    return Response(content, media_type="application/json")


def render_prompt(service: Service, body: ChatBody, tools: Toolbox | None) -> Prompt:
    """Messages through the model's chat template; runs in a worker thread."""
    template = chat_template(service.tokenizer, with_tools=bool(tools))
    messages = validation.template_messages(body.messages, template)
    refuse_huge_text(service, "".join(m["content"] for m in messages), "messages")
    add = body.add_generation_prompt is not False
    ids = service.render(
        messages,
        tools=tools.for_template() if tools else None,
        add_generation_prompt=add,
        template_kwargs=body.chat_template_kwargs,
    )
    return Prompt(token_ids=ids, text="")


def choose_form(body: ChatBody, tools: Toolbox | None) -> Form | None:
    """What the answer must match, of its form or of its calls; runs in a worker thread."""
    form = answer_form(body)
    if form and tools:
        raise RequestError(
            "`tools` beside a form for the answer are not supported by this version",
            param="tools",
            code="HRT-4008",
            fix='send `tool_choice`: "none", or leave the form out',
        )
    if tools and (rules := tools.grammar()):
        return Form(lark_grammar(rules), "tools")
    return form


def make_choices(answer: ChatAnswer, prompt: Prompt, grammar: str) -> list[Choice]:
    """The sequences that a body asks for."""
    body, service = answer.body, answer.service
    asked = body.max_completion_tokens or body.max_tokens
    if asked is None:
        asked = service.config.server.default_max_tokens
    length = answer_length(service, len(prompt.token_ids), asked, "messages")
    return [
        Choice(
            index=index,
            prompt=prompt,
            splitter=None if grammar else make_splitter(service, body, prompt),
            request=GenerateRequest(
                request_id=f"{answer.id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=validation.sampling_params(body, service.engine.info.vocab_size, index),
                max_tokens=max(1, length),
                num_logprobs=validation.num_logprobs(body),
                grammar=grammar,
                **validation.engine_fields(body),
            ),
        )
        for index in range(body.n or 1)
    ]


def make_splitter(service: Service, body: ChatBody, prompt: Prompt) -> ReasoningSplitter | None:
    """What parts thoughts from the answer; None where the model's template knows no thoughts."""
    template = chat_template(service.tokenizer, with_tools=bool(body.tools))
    if body.reasoning_format == "none" or OPEN not in template:
        return None
    tail = service.tokenizer.decode(prompt.token_ids[-TAIL_TOKENS:], control=True)
    return ReasoningSplitter(Part.THOUGHTS if tail.rstrip().endswith(OPEN) else Part.START)


@attrs.define(kw_only=True)
class ChatAnswer:
    """The answer to one request: as chunks (`sse.Chunks`), or whole."""

    service: Service
    body: ChatBody
    model: str
    tools: Toolbox | None
    tally: Tally = attrs.field(factory=Tally)
    id: str = attrs.field(factory=lambda: new_id("chatcmpl"))
    created: int = attrs.field(factory=lambda: int(time.time()))
    _calls: dict[int, ToolDeltas] = attrs.field(factory=dict, init=False)

    def begin(self) -> Iterable[dict[str, Any]]:
        for index in range(self.body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        index, delta = event
        logprobs = self._logprobs(delta.logprobs)
        text, calls = self._read(index, delta.text, delta.finish_reason)
        if delta.reasoning:
            yield self._chunk(index, {"reasoning_content": delta.reasoning})
        if text or logprobs:
            yield self._chunk(index, {"content": text}, logprobs=logprobs)
        if calls:
            yield self._chunk(index, {"tool_calls": calls})
        if delta.finish_reason is not None:
            reason = self._finish_reason(index, delta.finish_reason)
            yield self._chunk(index, {}, finish_reason=reason)

    def end(self) -> Iterable[dict[str, Any]]:
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield self._frame("chat.completion.chunk", []) | {"usage": self.tally.usage()}

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The body of an answer in one piece."""
        choices = [
            self._whole_choice(index, [delta for i, delta in events if i == index])
            for index in range(self.body.n or 1)
        ]
        return self._frame("chat.completion", choices) | {"usage": self.tally.usage()}

    def _whole_choice(self, index: int, deltas: list[TextDelta]) -> dict[str, Any]:
        reason = deltas[-1].finish_reason or "stop"
        text, calls = self._read(index, "".join(delta.text for delta in deltas), reason)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thoughts := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = thoughts
        if calls:
            whole = [{k: v for k, v in call.items() if k != "index"} for call in calls]
            message |= {"content": text or None, "tool_calls": whole}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs([row for delta in deltas for row in delta.logprobs]),
            "finish_reason": self._finish_reason(index, reason),
        }

    def _read(
        self, index: int, text: str, finish_reason: str | None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Text to show, and the calls that were in it."""
        if self.tools is None:
            return text, []
        if index not in self._calls:
            self._calls[index] = ToolDeltas(self.tools.format.reader())
        return self._calls[index].push(text, last=finish_reason is not None)

    def _finish_reason(self, index: int, reason: str) -> str:
        called = index in self._calls and self._calls[index].called
        return "tool_calls" if called and reason == "stop" else reason

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
