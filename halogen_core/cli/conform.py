"""`halogen conform`: the conformance suite, which is a distribution of its own."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import click

from halogen_core.errors import PluginError

TARGET = (
    click.option("--device", help="as for `halogen serve`"),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads of the backend"),
    click.option("--backend-option", "options", multiple=True, metavar="KEY=VALUE"),
)


def _suite() -> Any:
    """The suite's commands; raises `PluginError` (HRT-6000) when it is not installed."""
    if importlib.util.find_spec("halogen_conformance") is None:
        raise PluginError(
            "the conformance suite is not installed",
            code="HRT-6000",
            fix="in a checkout of halogen: pip install ./tests/conformance",
        )
    return importlib.import_module("halogen_conformance.commands")


def _with_target(function: Any) -> Any:
    for option in reversed(TARGET):
        function = option(function)
    return function


@click.group("conform", invoke_without_command=True)
@click.option("--backend", help="the backend to certify")
@click.option("--level", type=click.IntRange(0, 5), default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="folder for the report")
@click.option("--only", multiple=True, metavar="PATTERN", help="cases to run; certifies nothing")
@click.option("--waivers", type=click.Path(path_type=Path), help="TOML file of waivers")
@click.option("--patience", type=float, default=1.0, help="multiplies all timeouts")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="processes that run cases beside each other; those that need the machine follow alone",
)
@click.option("--resume", is_flag=True, help="go on with the run in --out that was cut")
@_with_target
@click.pass_context
def command(ctx: click.Context, /, **chosen: Any) -> None:
    """Certify a backend: run every case up to a level and write a report.

    Exits with 0 only when the level is certified.
    """
    if ctx.invoked_subcommand is None:
        if not chosen["backend"]:
            raise click.UsageError("--backend is required", ctx)
        ctx.exit(_suite().run(**chosen))


@command.command()
@click.argument("case_id")
@click.option("--backend", required=True)
@_with_target
@click.pass_context
def repro(ctx: click.Context, /, **chosen: Any) -> None:
    """Run one case alone, in this process, and show all it measured."""
    ctx.exit(_suite().repro(**chosen))


@command.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.pass_context
def verify(ctx: click.Context, folder: Path) -> None:
    """Prove that a report is complete and consistent."""
    ctx.exit(_suite().verify(folder))


@command.command()
@click.argument("old", type=click.Path(exists=True, path_type=Path))
@click.argument("new", type=click.Path(exists=True, path_type=Path))
@click.pass_context
def diff(ctx: click.Context, old: Path, new: Path) -> None:
    """Compare two reports; exits with 1 when something that passed does not any more."""
    ctx.exit(_suite().diff(old, new))


@command.command("list")
@click.option("--level", type=click.IntRange(0, 5), help="of this level only")
@click.option("--why", is_flag=True, help="with each case's reason to exist")
def list_cases(level: int | None, why: bool) -> None:
    """List the cases of the suite."""
    _suite().list_cases(level, why)
