"""What every request passes first: an id, a key, and a body that is whole, small and in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid

import attrs
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halogen_core.config import ServerSettings
from halogen_core.errors import RequestError
from halogen_core.server.auth import ADMIN_PATHS, OPEN_PATHS, check_admin_key, check_key
from halogen_core.server.errors import as_halogen, error_response, kind_of
from halogen_core.server.generation import ClientGone
from halogen_core.server.metrics import Metrics
from halogen_core.server.origins import check_name, check_page, listens_here_only, read_origins

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
LINGER_S = 2.0
"""How long the rest of a refused body is read."""
WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Gate:
    """ASGI middleware; errors of the application leave here as OpenAI-shaped responses."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keys: tuple[bytes, ...], metrics: Metrics
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self._origins = read_origins(settings)
        self._here_only = listens_here_only(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        reply = _Reply(send=send, request_id=_request_id(headers))
        try:
            self._check_caller(scope, headers)
            if scope["method"] in WITH_BODY:
                receive = _replay(await self._body(headers, receive), receive)
            await self._app(scope, receive, reply)
        except ClientGone:
            log.debug("client went away: %s", reply.request_id)
            return  # nobody reads an answer
        except Exception as exc:
            await self._fail(exc, scope, receive, reply)
        finally:
            self._metrics.responses.labels(str(reply.status)).inc()
            _access_line(scope, reply)

    def _check_caller(self, scope: Scope, headers: Headers) -> None:
        """Raise `RequestError` unless a key was sent, or none is needed and no web page asks."""
        path = scope["path"]
        if path.startswith(ADMIN_PATHS):
            check_admin_key(self._settings.admin_key, headers)
        elif self._keys:
            check_key(self._keys, path, headers)
        elif path not in OPEN_PATHS:
            if self._here_only:
                check_name(self._origins, headers)
            if scope["method"] in WITH_BODY:
                check_page(self._origins, headers)

    async def _fail(self, exc: Exception, scope: Scope, receive: Receive, reply: _Reply) -> None:
        error = as_halogen(exc)
        kind = kind_of(error)
        self._metrics.errors.labels(error.code).inc()
        if kind.status in (429, 503):
            self._metrics.rejected.labels(kind.code or "other").inc()
        if reply.status:
            raise exc  # too late for a status; the connection is closed
        close = kind.status in (408, 413, 415)
        patient = _Lingering(send=reply, receive=receive) if kind.status in (413, 415) else reply
        await error_response(error, close=close)(scope, receive, patient)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body; raises for encodings, for more bytes than allowed, and for slowness."""
        limit, seconds = self._settings.max_body_size, self._settings.receive_timeout_s
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", ""):
            raise RequestError(
                f"content-encoding `{encoding[:32]}` is not accepted",
                code="HRT-4150",
                fix="send the body uncompressed",
            )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise _too_large(length, limit)
        try:
            async with asyncio.timeout(seconds):
                return await _read(receive, limit)
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {seconds:g} s", code="HRT-4080"
            ) from None


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(f"more than {limit}", limit)
        more = message.get("more_body", False)
    return bytes(body)


@attrs.frozen(kw_only=True)
class _Lingering:
    """A `send` that reads on for a while between an answer's last byte and closing.

    A connection closed over unread bytes is reset, and the answer lost to who is still sending.
    """

    send: Send
    receive: Receive

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self.send(message)
            return
        await self.send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await self.receive()).get("more_body", False):
                    pass
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _too_large(size: str, limit: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes, at most {limit} are allowed",
        code="HRT-4130",
        fix="send less or raise --max-body-size",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what really comes (the disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


@attrs.define(kw_only=True)
class _Reply:
    """A `send` that adds the request's id and remembers the status."""

    send: Send
    request_id: str
    status: int = 0
    began: float = attrs.field(factory=time.monotonic)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self.send(message)


def _request_id(headers: Headers) -> str:
    """The client's own id if it is harmless, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _access_line(scope: Scope, reply: _Reply) -> None:
    took = time.monotonic() - reply.began
    path = scope["path"].encode("unicode_escape").decode()[:200]
    log.debug("%s %s %d %.3fs %s", scope["method"], path, reply.status, took, reply.request_id)
