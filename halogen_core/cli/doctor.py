"""`halogen doctor`: check this machine and what is installed on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import click

from halogen_core.cli.doctor_checks import core_findings, plugin_findings, worst
from halogen_core.cli.plugins import plugin_options
from halogen_core.cli.selftest import versions
from halogen_core.cli.selftest_record import record_findings
from halogen_core.cli.settings import with_settings
from halogen_core.config import Config, environment
from halogen_core.plugins import PluginRegistry
from halogen_core.spi import DoctorContext, Finding, Severity

LOOKS = {
    Severity.OK: ("ok", "green"),
    Severity.INFO: ("info", "blue"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.ERROR: ("error", "red"),
}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@click.option(
    "--root",
    default="/",
    type=click.Path(exists=True, file_okay=False),
    help="judge a copy of another machine's /proc and /sys, with what its `env` and commands said",
)
@with_settings(also=("plugins", "no_plugin", "cache_dir"))
def command(config: Config, as_json: bool, root: str) -> None:
    """Check this machine and what is installed; exit code 1 when something must be mended."""
    context = where_to_look(root)
    registry = PluginRegistry.discover(plugin_options(config))
    findings = [*core_findings(context), *plugin_findings(registry, context)]
    if context.live:
        findings += record_findings(config.paths.cache_dir, versions())
    if as_json:
        click.echo(json.dumps([attrs.asdict(f) for f in findings], indent=2))
    else:
        for finding in findings:
            _show(finding)
    sys.exit(int(worst(findings) is Severity.ERROR))


def where_to_look(root: str) -> DoctorContext:
    """This machine, or a copied tree: nothing of this machine counts there.

    Beside the copied folders a tree may hold `environ` (what `env` printed) and a folder `commands`
    with a file for each command line, such as `id -Gn`, of what it printed.
    """
    if root == "/":
        return DoctorContext(root=root, environment=environment())
    kept = Path(root, "environ")
    lines = kept.read_text(errors="replace").splitlines() if kept.is_file() else []
    return DoctorContext(
        root=root,
        environment=dict(line.split("=", 1) for line in lines if "=" in line),
        commands={
            file.name: file.read_text(errors="replace").strip()
            for file in Path(root, "commands").glob("*")
            if file.is_file()
        },
        live=False,
    )


def _show(finding: Finding) -> None:
    word, colour = LOOKS[finding.severity]
    click.echo(f"{click.style(f'{word:>7}', fg=colour)}  {finding.text}")
    for line in (finding.evidence, finding.fix and f"fix: {finding.fix}"):
        if line and finding.severity is not Severity.OK:
            click.echo(f"         {line}")
