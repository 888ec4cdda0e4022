"""Flags made from the configuration schema, so that each setting is described once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from halogen_core.config import SETTINGS, Setting, resolve


class SettingsCommand(click.Command):
    """A command whose help lists settings by section, after its own options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                setting = SETTINGS.get(param.name or "")
                sections.setdefault(setting.section if setting else "options", []).append(record)
        for section, records in sections.items():
            with formatter.section(section.capitalize()):
                formatter.write_dl(records)


def with_settings(
    *sections: str, also: tuple[str, ...] = (), leave_out: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of `sections` and `also`, and `--config`; the function gets `config`."""
    names = [
        s.name
        for s in SETTINGS.values()
        if (s.section in sections or s.name in also) and s.name not in leave_out
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(config: Path | None, **given: Any) -> Any:
            flags = {name: given.pop(name) for name in names}
            return function(config=resolve(flags, file=config), **given)

        decorated: Callable[..., Any] = command
        for name in reversed(names):
            decorated = _flag(SETTINGS[name])(decorated)
        return click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="TOML or YAML file with settings",
        )(decorated)

    return decorate


def _flag(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    shown = setting.kind.name.upper() if not setting.choices else "|".join(setting.choices)
    return click.option(
        setting.flag,
        setting.name,
        multiple=setting.kind.many,
        metavar=shown,
        help=f"{setting.doc}{_default_words(setting)}",
    )


def _default_words(setting: Setting) -> str:
    value = setting.default
    if value is None or value == () or setting.kind.name in ("path", "key=value"):
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f" [default: {value}]"
