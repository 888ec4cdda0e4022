"""`halogen`: a group that imports a command only when it is run."""

from __future__ import annotations

import difflib
import importlib

import click

from halogen_core import __version__
from halogen_core.cli.interrupts import ended_by_ctrl_c
from halogen_core.errors import HalogenError

EXIT_ERROR = 2
INTERRUPTED = 130
"""As shells number a program that Ctrl-C ended."""

COMMANDS: dict[str, str] = {
    "bench": "Measure the engine here, beside what the device can do at most.",
    "conform": "Check a backend against the conformance suite.",
    "convert": "Quantise a model layer by layer.",
    "doctor": "Check this machine and what is installed on it.",
    "explain": "Say what an HRT error code means and how to mend it.",
    "inspect": "Show what a model file says of itself.",
    "kv": "Write and read the prefix cache of a running server.",
    "new-backend": "Write the skeleton of a backend plugin.",
    "plan": "Say what would fit on a device and how fast it could be at most.",
    "plugins": "Show the installed plugins and what they can do here.",
    "pull": "Download a model and check it.",
    "run": "Answer a prompt, or chat.",
    "selftest": "Check a backend's numbers here; compile and tune what a model needs.",
    "serve": "Serve the OpenAI API.",
    "simulate": "Size a box, or compare eviction policies, without the box.",
}
"""Command -> help; `some-name` is the object `command` of module `halogen_core.cli.some_name`."""

PURPOSES: dict[str, tuple[str, ...]] = {
    "Use a model": ("run", "serve", "pull", "inspect", "convert", "kv"),
    "Know the machine": ("doctor", "plugins", "plan", "bench", "selftest", "simulate", "explain"),
    "Make a backend": ("new-backend", "conform"),
}


class LazyGroup(click.Group):
    """Finds commands by name; errors of ours end the program with exit code 2, without a trace."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            with ended_by_ctrl_c():  # an interrupt within an import can get lost
                module = importlib.import_module("halogen_core.cli." + cmd_name.replace("-", "_"))
            command: click.Command = module.command
            return command
        if cmd_name not in self.commands:
            self._add_plugin_commands()
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            if near := difflib.get_close_matches(args[0], self.list_commands(ctx), n=1):
                raise click.UsageError(f"{exc.message} Did you mean '{near[0]}'?", ctx) from exc
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for purpose, names in PURPOSES.items():
            with formatter.section(purpose):
                formatter.write_dl([(name, COMMANDS[name]) for name in names])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except HalogenError as exc:
            report(exc)
            ctx.exit(EXIT_ERROR)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)

    def _add_plugin_commands(self) -> None:
        """Let plugins add theirs; only for names that the core does not know."""
        from halogen_core.plugins import PluginRegistry

        for _ in PluginRegistry.discover().call("halogen_cli_commands", group=self):
            pass


def report(error: HalogenError) -> None:
    """One error for people, on stderr."""
    click.secho(f"error [{error.code}]: {error.message}", fg="red", err=True)
    if error.fix:
        click.echo(f"  fix: {error.fix}", err=True)
    click.echo(f"  more: halogen explain {error.code}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="halogen")
def main() -> None:
    """Run language models on whatever hardware a plugin speaks to."""
