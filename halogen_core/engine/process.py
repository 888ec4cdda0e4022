"""An engine in a process of its own, supervised: it may crash or hang, the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from halogen_core.engine import wire
from halogen_core.engine.child import Child, last_words
from halogen_core.engine.client import Inbox, stream_outputs
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import EngineInfo, EngineStats, GenerateRequest, TokenOutput
from halogen_core.engine.questions import Question, Questions, checked
from halogen_core.errors import EngineUnavailable, HalogenError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

PING_S = 1.0
PONG_TIMEOUT_S = 4.0
STATS_PATIENCE_S = 0.5
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0)
STABLE_S = 60.0
"""A life that lasted so long starts the delays anew."""
MOVE_TIMEOUT_S = 600.0
ADJUST_TIMEOUT_S = 60.0


class ProcessEngine:
    """`EngineClient` over a child process that is restarted when it dies or hangs.

    Hung means: the process does not answer pings for `PONG_TIMEOUT_S`, or one step lasts longer
    than `hang_timeout_s` seconds. Requests in flight then end with `finish_reason="error"`.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        hang_timeout_s: float = 120.0,
        progress: Progress = lambda done, total: None,
        child: Child | None = None,
    ) -> None:
        self._options = options
        self._waiting = child
        self._hang_timeout_s = hang_timeout_s
        self._progress = progress
        self._inbox = Inbox()
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._questions = Questions(self._send)
        self._ready = asyncio.Event()
        self._failure: HalogenError | None = None
        self._draining = False
        self._closing = asyncio.Event()
        self._ended = "engine process ended"
        self._supervisor: asyncio.Task[None] | None = None
        self.restarts = 0

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        *,
        hang_timeout_s: float = 120.0,
        progress: Progress = lambda done, total: None,
        child: Child | None = None,
    ) -> ProcessEngine:
        """Start the child and wait until it is ready; raises what kept it from starting.

        `progress` hears how many bytes of the weights are loaded, of all. `child` was started
        before and told the same options.
        """
        engine = cls(options, hang_timeout_s=hang_timeout_s, progress=progress, child=child)
        ready = asyncio.create_task(engine._ready.wait())
        engine._supervisor = asyncio.create_task(engine._supervise())
        try:
            await asyncio.wait({ready, engine._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            if not engine._ready.is_set():
                await engine.close()
        if not engine._ready.is_set():
            raise engine._failure or EngineUnavailable(engine._ended, code="HRT-5031")
        return engine

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("engine is not ready")
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        return self._child.pid if self._child else None

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        self._refuse_if_down()
        return stream_outputs(
            self._inbox,
            request,
            self._submit,
            lambda request_id: self._send(wire.Abort(request_id)),
        )

    async def stats(self) -> EngineStats:
        """As they were between two steps; of an earlier pair while a long step goes on."""
        try:
            answer: wire.Stats = await self._ask(wire.GetStats, STATS_PATIENCE_S)
            self._stats = answer.stats
        except EngineUnavailable:
            await self._pulse()
            if self._stats is None:
                raise
        return self._stats

    async def check(self) -> None:
        self._refuse_if_down()
        await self._pulse()

    async def _pulse(self) -> None:
        pong: wire.Pong = await self._ask(wire.Ping, PONG_TIMEOUT_S)
        if pong.step_seconds > self._hang_timeout_s:
            raise EngineUnavailable(f"a step has lasted {pong.step_seconds:.0f} s", code="HRT-5032")

    async def save_cache(self, path: str) -> int:
        """Write the prefix cache to `path`; the number of blocks."""
        return checked(await self._ask(wire.SaveCache, MOVE_TIMEOUT_S, path=path)).blocks

    async def load_cache(self, path: str) -> int:
        """Read a prefix cache from `path`; the number of blocks."""
        return checked(await self._ask(wire.LoadCache, MOVE_TIMEOUT_S, path=path)).blocks

    async def adjust(self, settings: dict[str, str]) -> dict[str, str]:
        """Change settings of the backend between two steps; returns all with their values."""
        return checked(await self._ask(wire.Adjust, ADJUST_TIMEOUT_S, settings=settings)).settings

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        return await self._inbox.wait_idle(timeout_s)

    async def close(self) -> None:
        self._closing.set()
        self._send(wire.Stop())
        if not self._ready.is_set():
            self._kill()  # it is loading, and would read the message when it is done
        if self._supervisor:
            _, pending = await asyncio.wait({self._supervisor}, timeout=10)
            for task in pending:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._kill()

    # -- the child's life

    async def _supervise(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._one_life()
            except Exception:
                log.exception("channel to the engine process failed")
            finally:
                self._end_life()
            if self._closing.is_set() or self._info is None:
                return  # told to stop, or it never became ready: `start` raises
            failures = 1 if time.monotonic() - began > STABLE_S else failures + 1
            delay = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1]
            log.error("%s; starting a new one in %.0f s", self._ended, delay)
            self.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
            if self._closing.is_set():
                return

    async def _one_life(self) -> None:
        child, self._waiting = self._waiting, None
        if child is None:
            child = Child.spawn()
            child.tell(self._options)
        self._child = child.process
        reader, self._writer = await asyncio.open_unix_connection(sock=child.connection)
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                header = await reader.readexactly(wire.HEADER_BYTES)
                body = await reader.readexactly(wire.frame_length(header))
                self._handle(wire.from_engine.decode(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            watch.cancel()

    def _end_life(self) -> None:
        self._ready.clear()
        if self._writer:
            self._writer.close()
            self._writer = None
        self._kill()
        lost = EngineUnavailable(self._ended, code="HRT-5031")
        self._questions.fail(lost)
        reason = self._failure or lost
        self._inbox.fail_all(reason.code, reason.message)

    async def _watch(self) -> None:
        """Kill the child when it hangs; its end is then handled like any other."""
        await self._ready.wait()
        with contextlib.suppress(EngineUnavailable):
            await self.stats()  # so that there are some when the first step is long
        while True:
            await asyncio.sleep(PING_S)
            try:
                await self._pulse()
            except EngineUnavailable as exc:
                if self._closing.is_set():
                    return
                log.error("engine hangs (%s): ending it", exc.message)
                self._failure = exc
                self._kill()
                return

    def _kill(self) -> None:
        if child := self._child:
            self._child = None
            self._ended = last_words(child)

    # -- messages

    def _submit(self, request: GenerateRequest) -> None:
        # the stream may have been made in an earlier life: what is not sent is never answered
        if not self._ready.is_set():
            raise self._down()
        self._send(wire.Submit(request))

    def _send(self, message: wire.ToEngine) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(wire.frame(message))

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Loading(done, total):
                self._progress(done, total)
            case wire.Ready(info):
                self._info = info
                self._failure = self._stats = None
                self._ready.set()
            case wire.Failed(code, text, fix):
                self._failure = HalogenError(text, code=code, fix=fix or None)
            case wire.Outputs(outputs):
                self._inbox.deliver(outputs)
            case wire.Stats() | wire.Pong() | wire.Done():
                self._questions.answer(message)

    def _ask(self, question: Question, timeout_s: float, **about: Any) -> Awaitable[Any]:
        if not self._ready.is_set():
            raise self._down()
        return self._questions.ask(question, timeout_s, **about)

    def _refuse_if_down(self) -> None:
        if not self._ready.is_set():
            raise self._down()
        if self._draining:
            raise EngineUnavailable("engine is draining")

    def _down(self) -> EngineUnavailable:
        why = f": {self._failure.message}" if self._failure else ""
        return EngineUnavailable(f"engine is starting or restarting{why}", code="HRT-5030")
