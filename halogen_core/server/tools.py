"""The tools of a chat request: checked, rendered by the template, enforced where that was asked."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import attrs
import msgspec

from halogen_core.errors import RequestError
from halogen_core.loader import Tokenizer
from halogen_core.loader.chat_template import chat_template
from halogen_core.server.call_formats import CallFormat, CallReader, ToolCall, call_format
from halogen_core.server.closed_schemas import closed
from halogen_core.server.openai_models import ChatBody, NamedTool, Tool
from halogen_core.server.structured import JSON_OPTIONS

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@attrs.frozen(kw_only=True)
class Toolbox:
    """What the model may call in one conversation."""

    tools: tuple[Tool, ...]
    format: CallFormat
    callable: tuple[Tool, ...]
    """All tools, or the one that `tool_choice` names."""
    forced: bool
    """Whether the answer must be a call."""
    parallel: bool

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates write them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.function.name,
                    "description": tool.function.description or "",
                    "parameters": tool.function.parameters or {"type": "object", "properties": {}},
                },
            }
            for tool in self.tools
        ]

    def grammar(self) -> str:
        """Calls as they must be; empty where the model is free to write what it likes."""
        strict = any(tool.function.strict for tool in self.tools)
        if not self.forced and self.parallel and not strict:
            return ""
        calls = [(tool.function.name, _schema(tool)) for tool in self.callable]
        return self.format.rules(calls, forced=self.forced, parallel=self.parallel)


def read_tools(tokenizer: Tokenizer, body: ChatBody) -> Toolbox | None:
    """The tools of a body; None if it has none or forbids them. Raises `RequestError`."""
    choice, tools = body.tool_choice or "auto", tuple(body.tools or ())
    if not tools and choice not in ("auto", "none"):
        raise RequestError("`tool_choice` asks for a call, `tools` are not given", param="tools")
    if not tools or choice == "none":
        return None
    template = chat_template(tokenizer, with_tools=True)
    found = call_format(template) if "tools" in template else None
    if found is None:
        raise RequestError(_why_not(template), param="tools", code="HRT-4008")
    return Toolbox(
        tools=tools,
        format=found,
        callable=_named(tools, choice) if isinstance(choice, NamedTool) else tools,
        forced=choice != "auto",
        parallel=body.parallel_tool_calls is not False,
    )


def _named(tools: tuple[Tool, ...], choice: NamedTool) -> tuple[Tool, ...]:
    found = tuple(tool for tool in tools if tool.function.name == choice.function.name)
    if not found:
        names = ", ".join(f"`{tool.function.name}`" for tool in tools)
        raise RequestError(
            f"`tool_choice` names `{choice.function.name[:64]}`; the tools are {names}",
            param="tool_choice",
        )
    return found[:1]


def _why_not(template: str) -> str:
    if "tools" not in template:
        return "this model's chat template has no place for `tools`; take a model trained for them"
    return (
        "this model writes tool calls in a way that is not known here; known are Hermes and Llama"
    )


def _schema(tool: Tool) -> str:
    schema = closed(tool.function.parameters or NO_ARGUMENTS)
    return msgspec.json.encode({"x-guidance": JSON_OPTIONS} | schema).decode()


@attrs.define
class ToolDeltas:
    """Text and calls of one choice, in OpenAI's form."""

    _reader: CallReader
    _index: itertools.count[int] = attrs.field(factory=itertools.count)
    called: bool = False

    def push(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text to show and calls that are whole now; each call comes in one piece."""
        piece = self._reader.push(text)
        shown, calls = piece.text, list(piece.calls)
        if last:
            rest = self._reader.finish()
            shown, calls = shown + rest.text, calls + list(rest.calls)
        self.called |= bool(calls)
        return shown, [self._delta(call) for call in calls]

    def _delta(self, call: ToolCall) -> dict[str, Any]:
        return {
            "index": next(self._index),
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
