"""From settings to a listening server: sockets, signals, drain."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from halogen_core.config import Config, ServerSettings
from halogen_core.engine.client import EngineClient
from halogen_core.engine.garbage import give_back, set_aside
from halogen_core.engine.grammar_trials import GrammarTrials
from halogen_core.errors import ConfigError
from halogen_core.loader import Tokenizer
from halogen_core.loader.chat_template import has_chat_template, render_chat
from halogen_core.server.admin import keep_cache, restore_cache
from halogen_core.server.admission import Admission
from halogen_core.server.app import create_app, metrics_routes
from halogen_core.server.http import with_deadlines
from halogen_core.server.metrics import Metrics
from halogen_core.server.service import Service

if TYPE_CHECKING:
    from fastapi import APIRouter

log = logging.getLogger(__name__)

BACKLOG = 512
LAST_BYTES_S = 2
"""How long connections may last when the time to drain is over."""


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket; raises `ConfigError` (HRT-1007) when the address cannot be had."""
    if settings.unix_socket is not None:
        return _bind_unix(settings.unix_socket)
    return bind_tcp(settings.host, settings.port)


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bound to an IPv4 or IPv6 address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise _cannot_listen(f"{host}:{port}", exc) from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise _cannot_listen(f"{host}:{port}", exc) from exc
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Bound to a path that only this user may use; a dead server's leftover is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise _cannot_listen(str(path), exc) from exc
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _cannot_listen(where: str, exc: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on `{where}`: {exc.strerror or exc}",
        code="HRT-1007",
        fix="stop the other program, or choose another --port, --host or --unix-socket",
    )


def describe(listener: socket.socket) -> str:
    """Where a listening socket can be reached."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT: refuse new requests, let the running ones end, then stop with 0.

    A second signal stops at once.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._begin_drain = drain
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            self._begin_drain()
        else:
            self.should_exit = self.force_exit = True


def make_server(service: Service, app: Starlette) -> DrainingServer:
    """A uvicorn server for `app` that drains `service` on a signal."""
    settings = service.config.server
    config = uvicorn.Config(
        app,
        http=with_deadlines(head_s=settings.receive_timeout_s, stall_s=settings.send_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def drain() -> None:
        loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(_drain(service, server))))

    server = DrainingServer(config, drain)
    return server


async def _drain(service: Service, server: DrainingServer) -> None:
    service.draining = True
    if not service.has_engine:
        server.should_exit = True
        return
    seconds = service.config.server.drain_timeout_s
    until = time.monotonic() + seconds
    log.info("draining: %d sequences, at most %g s", service.admission.inside, seconds)
    if not await service.engine.drain(seconds):
        log.warning("drain timed out with %d sequences running", service.admission.inside)
    await keep_cache(service)
    # the engine is done, yet clients may still be reading what it said
    left = math.ceil(until - time.monotonic())
    server.config.timeout_graceful_shutdown = max(LAST_BYTES_S, left)
    server.should_exit = True


def make_service(config: Config, tokenizer: Tokenizer) -> Service:
    """The service of one model, with its own chat template, before its engine has started."""
    if not has_chat_template(tokenizer):
        log.warning("the model brings no chat template; ChatML is assumed for chat")
    return Service(
        config=config,
        tokenizer=tokenizer,
        render=functools.partial(render_chat, tokenizer),
        trials=GrammarTrials(lambda: tokenizer),
        admission=Admission(limit=config.engine.max_batch + config.engine.max_queue),
        metrics=Metrics(),
    )


async def serve(
    service: Service,
    listener: socket.socket,
    start_engine: Callable[[], Awaitable[EngineClient]],
    extensions: Sequence[APIRouter] = (),
) -> None:
    """Serve until a signal; `/ready` and requests answer 503 until the engine has started.

    Raises what keeps the engine from starting. The engine is closed at the end.
    """
    server = make_server(service, create_app(service, extensions))
    side = await _serve_metrics(service)
    starting = asyncio.create_task(_start(service, server, listener, start_engine))
    log.info("listening on %s", describe(listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        await _end(side, starting)
        service.trials.close()
        if service.has_engine:
            await service.engine.close()
    if not starting.cancelled():
        starting.result()


async def _start(
    service: Service,
    server: DrainingServer,
    listener: socket.socket,
    start_engine: Callable[[], Awaitable[EngineClient]],
) -> None:
    try:
        service.engine_started(await start_engine())
        set_aside()
        await asyncio.to_thread(give_back)
        await restore_cache(service)
    except BaseException:
        server.should_exit = True
        raise
    _say_what_runs(service)
    log.info("serving %s on %s", service.model_names[0], describe(listener))


async def _end(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel what still runs and wait for it."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _say_what_runs(service: Service) -> None:
    """What was chosen at start and why; nothing falls back in silence."""
    info = service.engine.info
    log.info("using device: %s (backend %s)", info.device, info.backend)
    log.info("KV pool: %d blocks of %d tokens, %s", info.num_blocks, info.block_size, info.kv_dtype)
    for where, ops in groupby(
        sorted(info.placement, key=info.placement.__getitem__), info.placement.__getitem__
    ):
        log.info("ops %s: %s", where, ", ".join(ops))
    for reason in info.reasons:
        log.info("plan: %s", reason)


async def _serve_metrics(service: Service) -> asyncio.Task[None] | None:
    """`/metrics` on its own port, for scrapers that have no key."""
    settings = service.config.server
    if not settings.metrics or settings.metrics_port is None:
        return None
    app = Starlette(routes=metrics_routes(service).served())
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    listener = bind_tcp(settings.host, settings.metrics_port)
    log.info("metrics on %s", describe(listener))
    # without `serve`, which would take the signals that the main server handles
    return asyncio.create_task(server._serve([listener]))
