"""Server-sent events: a response that pings, notices a lost client and ends what it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halogen_core.server.errors import as_halogen, error_body
from halogen_core.server.generation import ClientGone, Event, Generation

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: Any) -> bytes:
    """One event; JSON has no raw line breaks, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class Chunks(Protocol):
    """Writes the deltas of one endpoint as its chunks."""

    def begin(self) -> Iterable[dict[str, Any]]:
        """Chunks before any token."""
        ...

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        """Chunks of one delta."""
        ...

    def end(self) -> Iterable[dict[str, Any]]:
        """Chunks after the last."""
        ...


class EventStream(Response):
    """Streams a generation; `first` are events that were awaited before the headers."""

    def __init__(
        self,
        generation: Generation,
        events: AsyncIterator[list[Event]],
        first: list[Event],
        chunks: Chunks,
    ) -> None:
        super().__init__(headers=HEADERS)
        self.generation = generation
        self.events = events
        self.first = first
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_watch(receive, self.generation))
        headers = [h for h in self.raw_headers if h[0] != b"content-length"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._body():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            log.debug("client went away")
        finally:
            watcher.cancel()
            await self.generation.close()

    async def _body(self) -> AsyncIterator[bytes]:
        """Bytes to send; an error midway becomes an event, for the status is already sent."""
        yield b"".join(map(event, self.chunks.begin())) + self._encode(self.first) or PING
        try:
            async for batch in self.events:
                if data := self._encode(batch) or (not batch and PING):
                    yield data
        except ClientGone:
            raise
        except Exception as exc:
            error = as_halogen(exc)
            self.generation.count_error(error)
            yield event(error_body(error)) + DONE
            return
        yield b"".join(map(event, self.chunks.end())) + DONE

    def _encode(self, batch: list[Event]) -> bytes:
        return b"".join(event(chunk) for item in batch for chunk in self._chunks(item))

    def _chunks(self, item: Event) -> Iterable[dict[str, Any]]:
        self.generation.tally.count(item)
        return self.chunks.chunks(item)


async def open_stream(
    request: Request, generation: Generation, chunks: Chunks, ping_s: float
) -> EventStream:
    """Start, and wait for the first token or `ping_s`: refusals are still HTTP errors."""
    generation.start()
    events = generation.events(ping_s=ping_s)
    try:
        async with _watching(request, generation):
            first = await anext(events)
    except BaseException:
        await generation.close()
        raise
    return EventStream(generation, events, first, chunks)


async def collect(request: Request, generation: Generation) -> list[Event]:
    """Every delta of a generation, for answers in one piece; ends it when the client goes."""
    generation.start()
    try:
        async with _watching(request, generation):
            found = [item async for batch in generation.events() for item in batch]
    finally:
        await generation.close()
    for item in found:
        generation.tally.count(item)
    return found


@contextlib.asynccontextmanager
async def _watching(request: Request, generation: Generation) -> AsyncIterator[None]:
    watcher = asyncio.create_task(_watch(request.receive, generation))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.client_gone()
