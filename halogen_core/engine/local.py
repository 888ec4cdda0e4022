"""An engine in a thread of this process, for one-shot commands and tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from halogen_core.engine.client import Inbox, stream_outputs
from halogen_core.engine.loop import EngineLoop, Steppable
from halogen_core.engine.protocol import EngineInfo, EngineStats, GenerateRequest, TokenOutput
from halogen_core.errors import EngineUnavailable, HalogenError


class LocalEngine:
    """`EngineClient` over an engine in this process. Create it inside the event loop."""

    def __init__(self, engine: Steppable, info: EngineInfo) -> None:
        self.info = info
        self._engine = engine
        self._inbox = Inbox()
        self._events = asyncio.get_running_loop()
        self._error: BaseException | None = None
        self._draining = False
        self._loop = EngineLoop(
            engine, lambda outputs: self._later(self._inbox.deliver, outputs), self._loop_failed
        )
        self._loop.start()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        self._refuse_if_down()
        return stream_outputs(self._inbox, request, self._loop.submit, self._loop.abort)

    async def stats(self) -> EngineStats:
        self._refuse_if_down(draining_too=False)
        stats: EngineStats = await asyncio.wrap_future(self._loop.ask(self._engine.stats))
        return stats

    async def check(self) -> None:
        self._refuse_if_down()

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        return await self._inbox.wait_idle(timeout_s)

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.stop)

    def _refuse_if_down(self, *, draining_too: bool = True) -> None:
        if self._error is not None:
            raise EngineUnavailable(f"engine failed: {self._error}", code="HRT-5031")
        if self._draining and draining_too:
            raise EngineUnavailable("engine is draining")

    def _loop_failed(self, error: BaseException) -> None:
        self._error = error
        code = error.code if isinstance(error, HalogenError) else "HRT-5031"
        self._later(self._inbox.fail_all, code, str(error))

    def _later(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function` in the event loop; dropped when that is gone."""
        with contextlib.suppress(RuntimeError):
            self._events.call_soon_threadsafe(function, *arguments)
