"""The step loop: one thread owns the engine, everybody else leaves commands in its queue."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from halogen_core.engine.protocol import EngineStats, GenerateRequest, TokenOutput
from halogen_core.errors import Transient

log = logging.getLogger(__name__)

MAX_TRANSIENT_RETRIES = 3


class Steppable(Protocol):
    """What the loop drives (`Engine`)."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: GenerateRequest) -> list[TokenOutput]: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenOutput]: ...

    def stats(self) -> EngineStats: ...

    def next_wake(self) -> float | None:
        """Seconds until a step could do something, None: now."""
        ...

    def close(self) -> None: ...


class EngineLoop:
    """Runs `engine` until stopped or until a step fails for good.

    `deliver` receives outputs, `failed` the exception that ended the loop, and `after_step` the
    number of steps done; all in the loop's thread.
    """

    def __init__(
        self,
        engine: Steppable,
        deliver: Callable[[list[TokenOutput]], None],
        failed: Callable[[BaseException], None],
        after_step: Callable[[int], None] = lambda num_steps: None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._failed = failed
        self._after_step = after_step
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False
        self.steps = 0
        self._step_began: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run the loop in a daemon thread."""
        self._thread = threading.Thread(target=self.run, name="halogen-engine", daemon=True)
        self._thread.start()

    def step_seconds(self) -> float:
        """How long the current step has been going on; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, request: GenerateRequest) -> None:
        self._commands.put(lambda: self._deliver(self._engine.submit(request)))

    def abort(self, request_id: str) -> None:
        self._commands.put(lambda: self._engine.abort(request_id))

    def ask(self, question: Callable[[], Any]) -> Future[Any]:
        """Run `question` between two steps, in the loop's thread."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as exc:
                answer.set_exception(exc)

        self._commands.put(run)
        return answer

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the loop after the current step and close the engine."""
        self._commands.put(self._stop)
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def run(self) -> None:
        """The loop itself, in the calling thread."""
        try:
            while not self._stopped:
                self._run_commands()
                if not self._stopped and self._engine.has_work:
                    self._step()
        except BaseException as exc:
            log.exception("engine loop failed")
            self._failed(exc)
        finally:
            self._engine.close()

    def _stop(self) -> None:
        self._stopped = True

    def _run_commands(self) -> None:
        """All commands that wait; with no work to do, sleep until one comes."""
        wait = None if not self._engine.has_work else self._engine.next_wake()
        block = not self._engine.has_work or wait is not None
        try:
            self._commands.get(block=block, timeout=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            outputs = self._step_with_retries()
        finally:
            self._step_began = None
        self.steps += 1
        if outputs:
            self._deliver(outputs)
        self._after_step(self.steps)

    def _step_with_retries(self) -> list[TokenOutput]:
        for _ in range(MAX_TRANSIENT_RETRIES):
            try:
                return self._engine.step()
            except Transient as exc:
                log.warning("step failed, retrying in %.2f s: %s", exc.retry_after_s, exc)
                time.sleep(exc.retry_after_s)
        return self._engine.step()
