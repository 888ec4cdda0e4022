"""Parting what a model thinks from what it answers, as text grows.

Reasoning models think first, between tags, then answer. Stop strings and tool calls are looked for
in the answer only (vllm#14399: a stop within the thoughts left nothing to show).
"""

from __future__ import annotations

from enum import Enum, auto

import attrs

from halogen_core.engine.text import overlap

OPEN, CLOSE = "<think>", "</think>"


class Part(Enum):
    """Where in an answer we are."""

    START = auto()
    THOUGHTS = auto()
    GAP = auto()
    """Behind the thoughts, in front of the first letter of the answer."""
    ANSWER = auto()


@attrs.define
class ReasoningSplitter:
    """Splits an answer that begins with `<think>`; another one is an answer from its first letter.

    White space around the thoughts is formatting and left out. `part` is `THOUGHTS` from the start
    where the prompt has opened the tag.
    """

    part: Part = Part.START
    _pending: str = ""
    _began: bool = False
    """Whether any thought was shown."""

    def push(self, text: str) -> tuple[str, str]:
        """Thoughts and answer that are safe to show now."""
        self._pending += text
        thoughts = ""
        if self.part is Part.START:
            self._look_for_opening()
        if self.part is Part.THOUGHTS:
            thoughts = self._take_thoughts()
        if self.part is Part.GAP and (rest := self._pending.lstrip("\n")):
            self._pending, self.part = rest, Part.ANSWER
        return thoughts, self._take() if self.part is Part.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        rest = self._take()
        if self.part is Part.THOUGHTS:
            return rest.rstrip(), ""
        return "", rest if self.part is not Part.GAP else ""

    def _look_for_opening(self) -> None:
        start = self._pending.lstrip()
        if start.startswith(OPEN):
            self._pending, self.part = start[len(OPEN) :], Part.THOUGHTS
        elif not OPEN.startswith(start):
            self.part = Part.ANSWER

    def _take_thoughts(self) -> str:
        """Thoughts that neither the closing tag nor the white space before it can follow."""
        if not self._began:
            self._pending = self._pending.lstrip()
        at = self._pending.find(CLOSE)
        if at >= 0:
            thoughts = self._pending[:at].rstrip()
            self._pending, self.part = self._pending[at + len(CLOSE) :], Part.GAP
            return thoughts
        cut = len(self._pending[: len(self._pending) - overlap(self._pending, CLOSE)].rstrip())
        thoughts, self._pending = self._pending[:cut], self._pending[cut:]
        self._began |= bool(thoughts)
        return thoughts

    def _take(self) -> str:
        taken, self._pending = self._pending, ""
        return taken
