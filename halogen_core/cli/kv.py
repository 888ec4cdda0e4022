"""`halogen kv`: write and read the prefix cache of a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import click

from halogen_core.cli.settings import with_settings
from halogen_core.config import Config
from halogen_core.errors import ConfigError, EngineUnavailable, HalogenError

TIMEOUT_S = 600


@click.group("kv")
def command() -> None:
    """Write and read the prefix cache of a running server (it needs --admin-key)."""


@command.command("dump")
@click.argument("name")
@click.option("--url", help="of the server [default: from --host and --port]")
@with_settings(also=("host", "port", "admin_key"))
def dump(config: Config, name: str, url: str | None) -> None:
    """Write the cache as snapshot NAME, below the server's cache directory."""
    click.echo(f"{ask(config, url, 'dump', name)} blocks written")


@command.command("load")
@click.argument("name")
@click.option("--url", help="of the server [default: from --host and --port]")
@with_settings(also=("host", "port", "admin_key"))
def load(config: Config, name: str, url: str | None) -> None:
    """Fill the cache from snapshot NAME; a damaged or foreign one changes nothing."""
    click.echo(f"{ask(config, url, 'load', name)} blocks read")


def ask(config: Config, url: str | None, what: str, name: str) -> int:
    """Ask the server; raises what it answers."""
    if config.server.admin_key is None:
        raise ConfigError(
            "no admin key is set", code="HRT-1002", fix="set HALOGEN_ADMIN_KEY as the server has it"
        )
    request = urllib.request.Request(
        f"{url or _own_url(config)}/admin/kv/{what}",
        data=json.dumps({"name": name}).encode(),
        headers={"authorization": f"Bearer {config.server.admin_key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return int(json.load(response)["blocks"])
    except urllib.error.HTTPError as exc:
        error = json.loads(exc.read())["error"]
        raise HalogenError(error["message"], code=error["hrt_code"]) from exc
    except OSError as exc:
        raise EngineUnavailable(
            f"no server answers at `{request.full_url}`: {exc}", fix="check --url"
        ) from exc


def _own_url(config: Config) -> str:
    host = config.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.server.port}"
