"""Running the sequences of one request side by side, and stopping them all when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing

import attrs

from halogen_core.engine.protocol import GenerateRequest
from halogen_core.engine.text import Splitter, TextDelta, generate_text
from halogen_core.errors import EngineUnavailable, HalogenError, RequestError
from halogen_core.server.prompts import Prompt
from halogen_core.server.service import Service

Event = tuple[int, TextDelta]
"""The number of a choice and its news."""
WORTH_SHARING = 256
"""Tokens of a prompt from which on it is computed for one answer and cached for the others."""
MAX_PENDING = 4096
"""Deltas a client may lag behind (about 256 KiB of stream) before it is cut off."""


@attrs.frozen(kw_only=True)
class Choice:
    """One answer to make: number `index` of the response."""

    index: int
    prompt: Prompt
    request: GenerateRequest
    splitter: Splitter | None = None
    """Parts thoughts from the answer, for models that think."""


@attrs.define(kw_only=True)
class Tally:
    """What a request used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def count(self, event: Event) -> None:
        """Account for what the client is about to get."""
        index, delta = event
        self.completion_tokens += len(delta.token_ids)
        if index == 0:
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

    def usage(self) -> dict[str, object]:
        """The OpenAI `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ClientGone(Exception):
    """The client closed its connection, or reads too slowly to keep."""


class Generation:
    """Deltas of all choices of one request in one queue; closing it ends every sequence."""

    def __init__(
        self, service: Service, choices: Sequence[Choice], stops: Sequence[str], tally: Tally
    ) -> None:
        self.choices = choices
        self.tally = tally
        self._service = service
        self._stops = stops
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._resources = AsyncExitStack()
        self._open = len(choices)
        self._taken = 0
        self._began = time.monotonic()

    def start(self) -> None:
        """Take places in the queue and begin; raises `Overloaded`."""
        self._resources.enter_context(self._service.admission.enter(len(self.choices)))
        computed: dict[int, asyncio.Event] = {}
        for choice in self.choices:
            own = asyncio.Event()
            before = computed.setdefault(id(choice.prompt), own)
            after = before if before is not own and self._shares(choice) else None
            self._tasks.append(asyncio.create_task(self._run(choice, own, after)))

    def _shares(self, choice: Choice) -> bool:
        """Whether an answer gains by waiting until another one's prompt, the same, is cached."""
        return (
            len(choice.prompt.token_ids) >= WORTH_SHARING
            and choice.request.use_prefix_cache
            and not choice.request.prompt_logprobs
            and self._service.config.cache.prefix_cache
        )

    async def events(self, *, ping_s: float | None = None) -> AsyncIterator[list[Event]]:
        """Whatever came since the last look; an empty list after `ping_s` of silence."""
        while self._open:
            batch: list[Event] = []
            try:
                if (item := await self._next(ping_s)) is not None:
                    self._take(item, batch)
                while not self._queue.empty():
                    self._take(self._queue.get_nowait(), batch)
            except Exception:
                if batch:  # the client gets what came before the failure
                    yield batch
                raise
            yield batch

    def count_error(self, error: HalogenError) -> None:
        """Account for an error that the client learns of within its stream."""
        self._service.metrics.errors.labels(error.code).inc()

    def client_gone(self) -> None:
        """Tell the reader of `events` that there is nobody to read for."""
        self._queue.put_nowait(ClientGone())

    async def close(self) -> None:
        """End what still runs; every sequence is aborted in the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._resources.aclose()

    async def _next(self, seconds: float | None) -> Event | BaseException | None:
        """What comes next, None after `seconds` of silence."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        return None

    def _take(self, item: Event | BaseException, batch: list[Event]) -> None:
        self._taken += 1
        if isinstance(item, BaseException):
            raise item
        self._open -= item[1].finish_reason is not None
        batch.append(item)

    async def _run(
        self, choice: Choice, computed: asyncio.Event, after: asyncio.Event | None
    ) -> None:
        """Pump one choice into the queue, then the exception that ended it, if one did.

        Sets `computed` when its prompt is; waits for `after`.
        """
        watch = self._service.metrics.watch(choice.request, self._began)
        try:
            if after is not None:
                await after.wait()
            deltas = generate_text(
                self._service.engine,
                choice.request,
                self._service.tokenizer,
                stop=self._stops,
                splitter=choice.splitter,
            )
            async with aclosing(deltas):  # type: ignore[type-var]
                async for delta in deltas:
                    computed.set()
                    watch.delta(delta)
                    if delta.finish_reason == "error":
                        raise failure(delta)
                    self._queue.put_nowait((choice.index, delta))
                    await self._refuse_to_pile_up()
        except asyncio.CancelledError:
            watch.cancelled()
            raise
        except ClientGone as exc:
            watch.cancelled()
            self._queue.put_nowait(exc)
        except Exception as exc:
            self._queue.put_nowait(exc)
        finally:
            computed.set()

    async def _refuse_to_pile_up(self) -> None:
        """Raise `ClientGone` when too much waits for a client that does not read.

        After a stall of the server much comes at once, and who reads has not had its turn yet.
        """
        if self._queue.qsize() > MAX_PENDING:
            before = self._taken
            await asyncio.sleep(0)
            if self._taken == before:
                raise ClientGone


def failure(delta: TextDelta) -> HalogenError:
    """The exception for an answer that the engine broke off."""
    code = delta.error_code or "HRT-5031"
    if code.startswith(("HRT-503", "HRT-300")):
        return EngineUnavailable(delta.error or "the engine broke off", code=code)
    if code.startswith("HRT-40"):
        return RequestError(delta.error, code=code)
    return HalogenError(delta.error or "the engine broke off", code=code)
