"""How a server or command talks to an engine, wherever the engine runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from halogen_core.engine.protocol import EngineInfo, EngineStats, GenerateRequest, TokenOutput
from halogen_core.errors import EngineUnavailable, HalogenError, Overloaded, RequestError


class EngineClient(Protocol):
    """An engine that is ready, or was and may be again."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        """Outputs until `finish_reason`; closing the generator aborts the sequence.

        Raises `RequestError` when the request can never run, `Overloaded` when the queue is full,
        `EngineUnavailable` when there is no engine now. An engine that dies midway ends the
        stream with `finish_reason="error"`.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def check(self) -> None:
        """Raise `EngineUnavailable` unless the step loop is alive and making progress."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the running ones; whether all ended in time."""
        ...

    async def close(self) -> None: ...


class Inbox:
    """Outputs on their way to the coroutines that wait for them, by request."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, request_id: str) -> asyncio.Queue[TokenOutput]:
        """A queue for a new request."""
        if request_id in self._queues:
            raise RequestError(f"request id `{request_id}` is in use", code="HRT-4002")
        self._idle.clear()
        return self._queues.setdefault(request_id, asyncio.Queue())

    def close(self, request_id: str) -> None:
        """Forget a request; later outputs of it are dropped."""
        self._queues.pop(request_id, None)
        if not self._queues:
            self._idle.set()

    def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Hand outputs to their waiters."""
        for output in outputs:
            if queue := self._queues.get(output.request_id):
                queue.put_nowait(output)

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error."""
        for request_id in list(self._queues):
            self.deliver(
                [
                    TokenOutput(
                        request_id=request_id,
                        finish_reason="error",
                        error_code=code,
                        error=message,
                    )
                ]
            )

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether all requests ended within `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()


async def stream_outputs(
    inbox: Inbox,
    request: GenerateRequest,
    submit: Callable[[GenerateRequest], None],
    abort: Callable[[str], None],
) -> AsyncGenerator[TokenOutput, None]:
    """Submit a request and yield its outputs; aborts it when left before the end."""
    queue = inbox.open(request.request_id)
    started = ended = False
    try:
        submit(request)
        while not ended:
            output = await queue.get()
            ended = output.finish_reason is not None
            if output.finish_reason == "error" and not started:
                raise refusal(output)
            started = True
            yield output
    finally:
        inbox.close(request.request_id)
        if not ended:
            abort(request.request_id)


def refusal(output: TokenOutput) -> HalogenError:
    """The exception for a request that ended with an error before its first token."""
    if output.error_code == Overloaded.default_code:
        return Overloaded(output.error)
    if output.error_code.startswith("HRT-4"):
        return RequestError(output.error, code=output.error_code)
    return EngineUnavailable(output.error, code=output.error_code)
