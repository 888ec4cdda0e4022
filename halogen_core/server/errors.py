"""One table from our errors to HTTP, in the shape that OpenAI clients read."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

import attrs
import msgspec
from starlette.responses import Response

from halogen_core.errors import (
    EngineUnavailable,
    HalogenError,
    ModelError,
    OutOfMemory,
    Overloaded,
    RequestError,
    Transient,
)

log = logging.getLogger(__name__)

RETRY_WHEN_DOWN_S = 2.0


class MethodNotAllowed(RequestError):
    """The route is there for other methods: `allowed`, as the `Allow` header lists them."""

    default_code = "HRT-4050"

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"`{method}` is not allowed here, but {allowed}")
        self.allowed = allowed


@attrs.frozen
class Kind:
    """How clients see a class of errors."""

    status: int
    type: str
    code: str | None = None


BY_CODE = {
    "HRT-3310": Kind(400, "invalid_request_error", "snapshot_refused"),
    "HRT-3311": Kind(400, "invalid_request_error", "snapshot_refused"),
    "HRT-3407": Kind(400, "invalid_request_error", "not_adjustable"),
    "HRT-3408": Kind(400, "invalid_request_error", "not_adjustable"),
    "HRT-4006": Kind(400, "invalid_request_error", "invalid_json"),
    "HRT-4007": Kind(404, "invalid_request_error", "model_not_found"),
    "HRT-4004": Kind(400, "invalid_request_error", "context_length_exceeded"),
    "HRT-4008": Kind(400, "invalid_request_error", "unsupported_feature"),
    "HRT-4010": Kind(401, "invalid_request_error", "invalid_api_key"),
    "HRT-4030": Kind(403, "invalid_request_error", "admin_only"),
    "HRT-4031": Kind(403, "invalid_request_error", "origin_not_allowed"),
    "HRT-4040": Kind(404, "invalid_request_error", "not_found"),
    "HRT-4050": Kind(405, "invalid_request_error", "method_not_allowed"),
    "HRT-4080": Kind(408, "invalid_request_error", "request_timeout"),
    "HRT-4130": Kind(413, "invalid_request_error", "request_too_large"),
    "HRT-4150": Kind(415, "invalid_request_error", "unsupported_encoding"),
}
BY_CLASS: tuple[tuple[type[HalogenError], Kind], ...] = (
    (Overloaded, Kind(429, "rate_limit_error", "queue_full")),
    (EngineUnavailable, Kind(503, "server_error", "engine_unavailable")),
    (RequestError, Kind(400, "invalid_request_error", None)),
    (ModelError, Kind(400, "invalid_request_error", None)),
    (Transient, Kind(503, "server_error", "transient")),
    (OutOfMemory, Kind(503, "server_error", "out_of_memory")),
)
INTERNAL = Kind(500, "server_error", "internal_error")


def kind_of(error: HalogenError) -> Kind:
    """Status, type and code for an error of ours; the most special entry wins."""
    if kind := BY_CODE.get(error.code):
        return kind
    return next((kind for cls, kind in BY_CLASS if isinstance(error, cls)), INTERNAL)


def as_halogen(error: BaseException) -> HalogenError:
    """Any exception as one of ours; what we did not foresee says nothing of its inside."""
    if isinstance(error, HalogenError):
        return error
    log.error("request failed", exc_info=error)
    return HalogenError("the server failed to handle the request", code="HRT-5000")


def error_body(error: HalogenError) -> dict[str, Any]:
    """The `{"error": …}` object, for responses and for events within a stream."""
    kind = kind_of(error)
    if kind is INTERNAL and error.code != "HRT-5000":
        log.error("request failed: %s", error)
    message = f"{error.message} ({error.fix})" if error.fix else error.message
    return {
        "error": {
            "message": message,
            "type": kind.type,
            "param": error.param if isinstance(error, RequestError) else None,
            "code": kind.code or error.code,
            "hrt_code": error.code,
        }
    }


def error_response(error: HalogenError, *, close: bool = False) -> Response:
    """A whole response; `close` also ends the connection (the rest of a body is unread)."""
    kind = kind_of(error)
    headers = {}
    if (retry := retry_after_s(error)) is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry)))
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    if kind.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    content = msgspec.json.encode(error_body(error))
    return Response(content, kind.status, headers, media_type="application/json")


def retry_after_s(error: HalogenError) -> float | None:
    """Seconds after which a client may try again; None: trying again does not help."""
    if isinstance(error, (Overloaded, Transient)):
        return error.retry_after_s
    return RETRY_WHEN_DOWN_S if isinstance(error, (EngineUnavailable, OutOfMemory)) else None
