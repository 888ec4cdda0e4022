"""`halogen serve`: the OpenAI API over an engine process."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import click

from halogen_core.cli.settings import SettingsCommand, with_settings
from halogen_core.config import Config

if TYPE_CHECKING:
    from halogen_core.cli.assembly import Parts

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.command("serve", cls=SettingsCommand)
@with_settings("model", "engine", "cache", "server", "paths")
def command(config: Config) -> None:
    """Serve the OpenAI API: chat, completions, models, health, metrics.

    SIGTERM or Ctrl-C drains: new requests are refused, running ones end; a second one stops at
    once.
    """
    from halogen_core.cli.assembly import assemble
    from halogen_core.server.auth import read_keys
    from halogen_core.server.serving import bind

    logging.basicConfig(level=config.server.log_level.upper(), format=LOG_FORMAT)
    read_keys(config.server)
    parts = assemble(config)
    listener = bind(config.server)  # before the engine: a busy port is known at once
    with listener:
        asyncio.run(_serve(config, parts, listener))


async def _serve(config: Config, parts: Parts, listener: socket.socket) -> None:
    from halogen_core.engine.process import ProcessEngine
    from halogen_core.server.serving import make_service, serve

    engine = await ProcessEngine.start(parts.options, hang_timeout_s=config.engine.hang_timeout_s)
    try:
        await serve(make_service(config, engine, parts.tokenizer), listener)
    finally:
        await engine.close()
