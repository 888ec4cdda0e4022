"""Questions to an engine process that wait for their answers, by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from halogen_core.engine import wire
from halogen_core.errors import EngineUnavailable, HalogenError

Question = (
    type[wire.GetStats]
    | type[wire.Ping]
    | type[wire.SaveCache]
    | type[wire.LoadCache]
    | type[wire.Adjust]
)
OWN_STALL_S = 0.25


class Questions:
    """Those of one engine process; `send` puts a message on the wire."""

    def __init__(self, send: Callable[[wire.ToEngine], None]) -> None:
        self._send = send
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def ask(self, question: Question, timeout_s: float, **about: Any) -> Coroutine[Any, Any, Any]:
        """Send it now; awaiting the result gives the answer.

        Raises `EngineUnavailable` (HRT-5032) where none comes in time.
        """
        token = next(self._tokens)
        future = self._waiting[token] = asyncio.get_running_loop().create_future()
        self._send(question(token, **about))

        async def wait() -> Any:
            try:
                # twice: after a stall of our own the answer waits in the socket, not yet read
                for patience in (timeout_s, OWN_STALL_S):
                    done, _ = await asyncio.wait({future}, timeout=patience)
                    if done:
                        return future.result()
                raise EngineUnavailable(
                    f"engine did not answer within {timeout_s:.0f} s", code="HRT-5032"
                )
            finally:
                self._waiting.pop(token, None)
                future.cancel()

        return wait()

    def answer(self, message: wire.Stats | wire.Pong | wire.Done) -> None:
        """Give an answer to whoever waits for it still."""
        future = self._waiting.pop(message.token, None)
        if future and not future.done():
            future.set_result(message)

    def fail(self, error: EngineUnavailable) -> None:
        """Nobody is going to answer any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()


def checked(done: wire.Done) -> wire.Done:
    """The answer; raises the error that it may be."""
    if done.code:
        raise HalogenError(done.message, code=done.code, fix=done.fix or None)
    return done
