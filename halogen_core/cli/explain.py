"""`halogen explain`: what an error code means."""

from __future__ import annotations

import difflib

import click

from halogen_core.error_catalogue import catalogue
from halogen_core.errors import ConfigError


@click.command("explain")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Say what an HRT error code means and how to mend it; without CODE, list all."""
    entries = catalogue()
    if code is None:
        for name, entry in sorted(entries.items()):
            click.echo(f"{name}  {entry.title}")
        return
    name = code.upper().strip("[]")
    name = name if name.startswith("HRT-") else f"HRT-{name}"
    if name not in entries:
        near = ", ".join(difflib.get_close_matches(name, entries, n=3)) or "none"
        raise ConfigError(
            f"error code `{code}` is unknown; similar: {near}",
            code="HRT-1006",
            fix="`halogen explain` lists every code",
        )
    entry = entries[name]
    click.secho(f"{name}: {entry.title}", bold=True)
    click.echo(f"cause: {entry.cause}")
    click.echo(f"fix:   {entry.fix}")
