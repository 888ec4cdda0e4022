"""`halogen explain`: what an error code means."""

from __future__ import annotations

import difflib

import click

from halogen_core.error_catalogue import catalogue
from halogen_core.errors import ConfigError


@click.command("explain", context_settings={"ignore_unknown_options": True})
@click.argument("code", required=False)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, code: str | None, rest: tuple[str, ...]) -> None:
    """Say what an HRT error code means and how to mend it; without CODE, list all.

    A plugin may explain more: `explain step` is its command `explain-step`.
    """
    if code and code.isalpha() and (topic := _topic(ctx, code)):
        with topic.make_context(f"{ctx.info_name} {code}", list(rest), parent=ctx.parent) as inner:
            topic.invoke(inner)
        return
    if rest:
        raise click.UsageError(f"unexpected argument `{rest[0]}`", ctx)
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


def _topic(ctx: click.Context, name: str) -> click.Command | None:
    group = ctx.parent.command if ctx.parent else None
    if not isinstance(group, click.Group) or ctx.parent is None:
        return None
    return group.get_command(ctx.parent, f"explain-{name}")
