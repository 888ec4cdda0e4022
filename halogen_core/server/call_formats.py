"""How families of models write tool calls into their text, and reading them back.

A template that takes tools tells the model how to write calls; which way that is shows in the
template's own source. The same readers serve streams and whole answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from halogen_core.engine.text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@attrs.frozen
class ToolCall:
    """A call that a model wants made; `arguments` is JSON text."""

    name: str
    arguments: str


@attrs.frozen
class Piece:
    """What some text held: text to show, and calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallReader(Protocol):
    """Reads one answer as it grows; text that may belong to a call is held back."""

    def push(self, text: str) -> Piece: ...

    def finish(self) -> Piece:
        """What was held back, at the end of the answer."""
        ...


class CallFormat(Protocol):
    """One family's way to write calls."""

    def reader(self) -> CallReader: ...

    def rules(self, calls: Sequence[tuple[str, str]], *, forced: bool, parallel: bool) -> str:
        """Lark rules of an answer with calls (name, JSON schema of its arguments).

        `forced`: nothing but calls; `parallel`: several.
        """
        ...


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` amid text: Hermes, Qwen 2.5 and 3."""

    def reader(self) -> CallReader:
        return TaggedReader()

    def rules(self, calls: Sequence[tuple[str, str]], *, forced: bool, parallel: bool) -> str:
        if forced:
            more = ' ("\\n" block)*' if parallel else ""
            start = f'start: block{more}\nblock: "{OPEN}\\n" call "\\n{CLOSE}"\n'
        else:
            start = "start: opened* TEXT\n" if parallel else "start: opened | TEXT\n"
            start += f'opened: opening call "\\n{CLOSE}"\nopening[lazy]: TEXT "{OPEN}\\n"\n'
            start += "TEXT: /(.|\\n)*/\n"
        return start + _call_rules(calls, "arguments")


class LlamaJson:
    """The whole answer is `{"name": …, "parameters": {…}}`: Llama 3.1 and later."""

    def reader(self) -> CallReader:
        return WholeReader()

    def rules(self, calls: Sequence[tuple[str, str]], *, forced: bool, parallel: bool) -> str:
        start = "start: call" if forced else "start: call | TEXT\nTEXT: /([^{](.|\\n)*)?/"
        return f"{start}\n{_call_rules(calls, 'parameters')}"


def call_format(template: str) -> CallFormat | None:
    """The format that a chat template teaches; None: none that is known here."""
    xml = "<function=" in template or "<arg_key>" in template
    if OPEN in template and "arguments" in template and not xml:
        return Hermes()
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return LlamaJson()
    return None


@attrs.define
class TaggedReader:
    """Calls between tags; text around them is shown, white space beside them is not."""

    pending: str = ""
    inside: bool = False
    any_calls: bool = False

    def push(self, text: str) -> Piece:
        self.pending += text
        shown, calls = "", []
        while (at := self.pending.find(CLOSE if self.inside else OPEN)) >= 0:
            part = self.pending[:at]
            if not self.inside:
                shown += part.rstrip()
                self.pending = self.pending[at + len(OPEN) :]
            else:
                self.pending = self.pending[at + len(CLOSE) :]
                if call := read_call(part):
                    calls.append(call)
                else:
                    shown += OPEN + part + CLOSE
            self.inside = not self.inside
        self.any_calls |= bool(calls)
        return Piece(shown + self._safe(), tuple(calls))

    def _safe(self) -> str:
        """Pending text that no tag can follow directly; the rest stays."""
        if self.inside:
            return ""
        cut = len(self.pending) - overlap(self.pending, OPEN)
        cut = len(self.pending[:cut].rstrip())
        shown, self.pending = self.pending[:cut], self.pending[cut:]
        return shown

    def finish(self) -> Piece:
        rest, self.pending = self.pending, ""
        if not self.inside:
            return Piece("" if self.any_calls and not rest.strip() else rest)
        call = read_call(rest)
        return Piece("", (call,)) if call else Piece(OPEN + rest)


@attrs.define
class WholeReader:
    """An answer that begins with a brace may be calls, one a line or with `;` between."""

    held: str = ""
    is_text: bool = False

    def push(self, text: str) -> Piece:
        if self.is_text:
            return Piece(text)
        self.held += text
        self.is_text = self.held.lstrip()[:1] not in ("", "{")
        if not self.is_text:
            return Piece()
        shown, self.held = self.held, ""
        return Piece(shown)

    def finish(self) -> Piece:
        held, self.held = self.held, ""
        calls = _row_of_calls(held)
        return Piece("", calls) if calls else Piece(held)


def _row_of_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls that a text consists of; none if anything else is in it."""
    calls: list[ToolCall] = []
    decoder, at = json.JSONDecoder(), 0
    while rest := text[at:].lstrip(" \t\r\n;"):
        at = len(text) - len(rest)
        try:
            data, used = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        if (call := _call_of(data)) is None:
            return ()
        calls.append(call)
        at += used
    return tuple(calls)


def read_call(text: str) -> ToolCall | None:
    """The call that JSON text describes, if it does."""
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _call_of(data: Any) -> ToolCall | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments: Any = data.get("arguments", data.get("parameters"))
    if not isinstance(arguments, (dict, type(None))):
        return None
    return ToolCall(data["name"], json.dumps(arguments or {}, ensure_ascii=False))


def _call_rules(calls: Sequence[tuple[str, str]], key: str) -> str:
    """Rules `call` and `call_0` …; each schema is a document of its own, so its `$ref`s hold."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(calls)))]
    for i, (name, schema) in enumerate(calls):
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        rules.append(f'call_{i}: {begin} %json {schema} "}}"')
    return "\n".join(rules)
