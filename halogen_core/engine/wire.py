"""Messages between a server and its engine process: length-prefixed msgpack, closed set of types.

The channel is an anonymous socket pair inherited by the child, so there is no path, port or
permission that anybody else could use; nothing that arrives is ever unpickled or evaluated.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from halogen_core.engine.protocol import EngineInfo, EngineStats, GenerateRequest, TokenOutput
from halogen_core.errors import EngineUnavailable

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message to the child: everything it needs to build the engine."""

    options: msgspec.Raw


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Answered by the step loop, between two steps."""

    token: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered at once, with the step loop's progress."""

    token: int


class SaveCache(msgspec.Struct, tag=True, frozen=True):
    """Write the prefix cache to `path`."""

    token: int
    path: str


class LoadCache(msgspec.Struct, tag=True, frozen=True):
    """Read a prefix cache from `path`."""

    token: int
    path: str


class Adjust(msgspec.Struct, tag=True, frozen=True):
    """Change settings of the backend between two steps; an empty mapping only asks for them."""

    token: int
    settings: dict[str, str]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End after the current step."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """How much of the weights is on the device; in bytes, at most once per percent."""

    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start, or its loop ended; the child exits after this."""

    code: str
    message: str
    fix: str = ""


class Outputs(msgspec.Struct, tag=True, frozen=True):
    outputs: list[TokenOutput]


class Stats(msgspec.Struct, tag=True, frozen=True):
    token: int
    stats: EngineStats


class Pong(msgspec.Struct, tag=True, frozen=True):
    token: int
    steps: int
    step_seconds: float


class Done(msgspec.Struct, tag=True, frozen=True):
    """Answer to `SaveCache`, `LoadCache` (blocks moved) and `Adjust` (settings), or the error."""

    token: int
    blocks: int = 0
    settings: dict[str, str] = {}
    code: str = ""
    message: str = ""
    fix: str = ""


ToEngine = Start | Submit | Abort | GetStats | Ping | SaveCache | LoadCache | Adjust | Stop
FromEngine = Loading | Ready | Failed | Outputs | Stats | Pong | Done

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: object) -> bytes:
    """A message as it goes over the wire."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Length of the body that follows; refuses absurd ones before anything is allocated."""
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME:
        raise EngineUnavailable(f"frame of {length} bytes refused, at most {MAX_FRAME}")
    return length


HEADER_BYTES = _LENGTH.size


def receive(connection: socket.socket) -> ToEngine | None:
    """The next message to the engine; None when the other side is gone."""
    body = receive_body(connection)
    return to_engine.decode(body) if body else None


def receive_body(connection: socket.socket) -> bytes | None:
    """The next message, not decoded; None when the other side is gone."""
    header = _exactly(connection, HEADER_BYTES)
    return header and _exactly(connection, frame_length(header))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if not (part := connection.recv(count - len(parts))):
            return None
        parts += part
    return bytes(parts)
