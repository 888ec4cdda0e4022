"""uvicorn's HTTP protocol with two deadlines it lacks: for slow senders and for slow readers."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class DeadlineProtocol(H11Protocol):
    """Closes a connection whose request head does not come, or whose client does not read.

    A request's body has its own deadline in `gate.py`. Deadlines are class attributes because
    uvicorn makes the protocols; `with_deadlines` makes a class with others.
    """

    head_timeout_s = 30.0
    stall_timeout_s = 30.0

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        super().resume_writing()

    def _expect_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)


def with_deadlines(*, head_s: float, stall_s: float) -> type[DeadlineProtocol]:
    """The protocol with these deadlines in seconds."""
    return type(
        "Deadlines", (DeadlineProtocol,), {"head_timeout_s": head_s, "stall_timeout_s": stall_s}
    )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
