"""`halogen serve`: the OpenAI API over an engine process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halogen_core.cli.settings import SettingsCommand, with_settings
from halogen_core.config import Config
from halogen_core.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from fastapi import APIRouter

    from halogen_core.cli.assembly import Parts
    from halogen_core.engine.child import Child

log = logging.getLogger(__name__)


@click.command("serve", cls=SettingsCommand)
@with_settings("model", "engine", "cache", "server", "paths")
def command(config: Config) -> None:
    """Serve the OpenAI API: chat, completions, models, health, metrics.

    SIGTERM or Ctrl-C drains: new requests are refused, running ones end; a second one stops at
    once.
    """
    from halogen_core.engine.child import Child
    from halogen_core.engine.garbage import none_while_starting

    child = Child.spawn()  # first of all: it imports while we do
    none_while_starting()
    try:
        _serve_with(config, child)
    finally:
        child.end()


def _serve_with(config: Config, child: Child) -> None:
    import asyncio

    from halogen_core.cli.assembly import assemble
    from halogen_core.cli.interrupts import ended_by_ctrl_c
    from halogen_core.cli.terminal import start_logging
    from halogen_core.server.auth import read_keys
    from halogen_core.server.origins import read_origins

    start_logging(config.server.log_level)
    with ended_by_ctrl_c():  # the child ends with us
        read_keys(config.server)
        read_origins(config.server)  # what is wrong in settings is said before a model loads
        check_room(config.cache.kv_snapshot)
        parts = assemble(config)
        log.info("loading %s", parts.options.model_path)
        child.tell(parts.options)  # it loads the model while we import the server
        parts.tokenizer.prepare()

        from halogen_core.server.serving import bind

    with bind(config.server) as listener:
        asyncio.run(_serve(config, parts, listener, child))


def check_room(path: Path | None) -> None:
    """Raise `ConfigError` (HRT-3311) for a snapshot that could not be written at the end."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(
            f"the KV snapshot `{path}` could not be written: `{path.parent}` is no folder that "
            "this user may write to",
            code="HRT-3311",
            fix="make the folder, or name another file with --kv-snapshot",
        )


async def _serve(config: Config, parts: Parts, listener: socket.socket, child: Child) -> None:
    from halogen_core.cli.terminal import loading_shown
    from halogen_core.engine.process import ProcessEngine
    from halogen_core.server.serving import make_service, serve

    service = make_service(config, parts.tokenizer)

    async def start() -> ProcessEngine:
        with loading_shown() as show:

            def progress(done: int, total: int) -> None:
                service.loaded = done / max(1, total)
                show(service.loaded)

            return await ProcessEngine.start(
                parts.options,
                hang_timeout_s=config.engine.hang_timeout_s,
                progress=progress,
                child=child,
            )

    await serve(service, listener, start, plugin_routes(config))


def plugin_routes(config: Config) -> list[APIRouter]:
    """Routes that plugins add; a broken plugin adds none and is logged."""
    from halogen_core.cli.plugins import plugin_options
    from halogen_core.plugins import PluginRegistry, PluginStatus

    registry = PluginRegistry.discover(plugin_options(config))
    routers = []
    if registry.implements("halogen_server_routes"):
        from fastapi import APIRouter

        routers.append(APIRouter())
        for _ in registry.call("halogen_server_routes", router=routers[0]):
            pass
    for plugin in registry.plugins:
        if plugin.status in (PluginStatus.BROKEN, PluginStatus.INCOMPATIBLE):
            log.warning("plugin %s is %s: %s", plugin.name, plugin.status, plugin.reason)
    return routers
