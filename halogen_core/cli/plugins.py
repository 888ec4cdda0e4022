"""`halogen plugins`: what is installed and what it can do here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from halogen_core.cli.settings import with_settings
from halogen_core.config import Config, environment
from halogen_core.plugins import PluginOptions, PluginRegistry, PluginStatus
from halogen_core.plugins.loading import Plugin
from halogen_core.plugins.probe import probe
from halogen_core.spi import BackendSpec, ProbeContext

COLOURS = {
    PluginStatus.OK: "green",
    PluginStatus.BROKEN: "red",
    PluginStatus.INCOMPATIBLE: "yellow",
    PluginStatus.DISABLED: "bright_black",
}


@click.group("plugins")
def command() -> None:
    """Show the installed plugins and what they can do here."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@click.option("--probe/--no-probe", "probing", default=True, help="look for each one's hardware")
@with_settings(also=("plugins", "no_plugin", "cache_dir"))
def list_plugins(config: Config, as_json: bool, probing: bool) -> None:
    """List every plugin, its state, and the reason where it cannot be used."""
    registry = PluginRegistry.discover(plugin_options(config))
    with ThreadPoolExecutor() as pool:  # each probe is a process of its own that one waits for
        rows = list(pool.map(lambda plugin: describe(plugin, config, probing), registry.plugins))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        _show(row)
    if not rows:
        click.echo("no plugins are installed; install a backend, such as halogen-cpu-reference")


def plugin_options(config: Config) -> PluginOptions:
    """Which plugins may load, from the configuration."""
    allow = config.engine.plugins
    return PluginOptions(
        allow=frozenset(allow) if allow is not None else None,
        block=frozenset(config.engine.no_plugin),
    )


def describe(plugin: Plugin, config: Config, probing: bool) -> dict[str, Any]:
    """One plugin as data."""
    manifest = plugin.manifest
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "status": str(plugin.status),
        "reason": plugin.reason,
        "spi": manifest.spi if manifest else None,
        "description": manifest.description if manifest else "",
        "backends": [_describe_backend(plugin, b, config, probing) for b in plugin.backends],
    }


def _describe_backend(
    plugin: Plugin, spec: BackendSpec, config: Config, probing: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "priority": spec.priority,
    }
    if not probing:
        return row
    wanted = plugin.manifest.probe_env if plugin.manifest else ()
    result = probe(
        plugin,
        spec.name,
        ProbeContext(),
        cache_dir=config.paths.cache_dir,
        environment=environment(wanted),
    )
    return row | {
        "usable": result.score > 0,
        "score": result.score,
        "devices": [{"id": d.id, "name": d.name, "driver": d.driver} for d in result.devices],
        "reasons": [{"code": r.code, "text": r.text, "hint": r.hint} for r in result.reasons],
    }


def _show(row: dict[str, Any]) -> None:
    status = click.style(row["status"], fg=COLOURS[PluginStatus(row["status"])])
    click.echo(f"{row['name']}  {row['distribution']} {row['version']}  {status}")
    if row["reason"]:
        click.echo(f"    {row['reason']}")
    for backend in row["backends"]:
        if "usable" not in backend:
            click.echo(f"    {backend['name']}")
            continue
        devices = ", ".join(f"{d['id']} ({d['name']})" for d in backend["devices"])
        state = devices if backend["usable"] else click.style("not usable here", fg="yellow")
        click.echo(f"    {backend['name']}: {state}")
        for reason in backend["reasons"]:
            hint = f" -> {reason['hint']}" if reason["hint"] else ""
            click.echo(f"        {reason['text']}{hint}")
