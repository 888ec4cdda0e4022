"""Routes for whoever runs the server, not for its users: the prefix cache on disk, settings."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from halogen_core.errors import ConfigError, HalogenError, RequestError
from halogen_core.server.info_routes import json_response
from halogen_core.server.routes import Routes
from halogen_core.server.service import Service
from halogen_core.server.validation import decode

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@runtime_checkable
class CacheKeeper(Protocol):
    """An engine client whose prefix cache can be kept on disk."""

    async def save_cache(self, path: str) -> int: ...

    async def load_cache(self, path: str) -> int: ...


@runtime_checkable
class AdjustableEngine(Protocol):
    """An engine client whose backend has settings that change while it runs."""

    async def adjust(self, settings: dict[str, str]) -> dict[str, str]: ...


class SnapshotBody(msgspec.Struct, kw_only=True):
    """Body of both routes: a name, never a path."""

    name: str


def admin_routes(service: Service) -> Routes:
    """Routes under `/admin/`, which `Gate` opens only to the admin key."""
    routes = Routes("/admin")

    @routes.post("/kv/dump")
    async def dump(request: Request) -> Response:
        path = snapshot_path(service, decode(SnapshotBody, await request.body()).name)
        engine = keeper(service)
        make_room(path.parent)
        return json_response({"blocks": await engine.save_cache(str(path))})

    @routes.post("/kv/load")
    async def load(request: Request) -> Response:
        path = snapshot_path(service, decode(SnapshotBody, await request.body()).name)
        return json_response({"blocks": await keeper(service).load_cache(str(path))})

    @routes.get("/backend")
    async def settings(request: Request) -> Response:
        return json_response(await adjustable(service).adjust({}))

    @routes.patch("/backend")
    async def adjust(request: Request) -> Response:
        wanted = decode(dict[str, str | int], await request.body())
        told = {key: str(value) for key, value in wanted.items()}
        return json_response(await adjustable(service).adjust(told))

    return routes


def adjustable(service: Service) -> AdjustableEngine:
    """The engine, if its backend's settings can be reached."""
    if not isinstance(service.engine, AdjustableEngine):
        raise RequestError("this engine has no settings to change", code="HRT-4008")
    return service.engine


def snapshot_path(service: Service, name: str) -> Path:
    """Where the snapshot of a name is kept; raises `RequestError` for anything like a path."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"`name` is `{name[:128]}`; it must be letters, digits, `.`, `_`, `-`", param="name"
        )
    return service.config.paths.cache_dir / "snapshots" / f"{name}.kv"


def make_room(folder: Path) -> None:
    """Make a folder for snapshots; raises `ConfigError` (HRT-3311)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot keep snapshots in `{folder}`: {exc.strerror or exc}",
            code="HRT-3311",
            fix="make it writable, or start the server with another --cache-dir",
        ) from exc


def keeper(service: Service) -> CacheKeeper:
    """The engine, if it can keep its cache on disk."""
    if not isinstance(service.engine, CacheKeeper):
        raise RequestError("this engine keeps no cache on disk", code="HRT-4008")
    return service.engine


async def restore_cache(service: Service) -> None:
    """Load the snapshot that the settings name; a refused one leaves the cache empty."""
    path = service.config.cache.kv_snapshot
    if path is None or not path.exists():
        return
    try:
        log.info(
            "prefix cache: %d blocks from %s", await keeper(service).load_cache(str(path)), path
        )
    except HalogenError as exc:
        log.warning("prefix cache starts empty: %s", exc)


async def keep_cache(service: Service) -> None:
    """Write the snapshot that the settings name; failing to is logged and harms nothing."""
    path = service.config.cache.kv_snapshot
    if path is None:
        return
    try:
        log.info("prefix cache: %d blocks to %s", await keeper(service).save_cache(str(path)), path)
    except HalogenError as exc:
        log.warning("prefix cache was not written: %s", exc)
