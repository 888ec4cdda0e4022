"""What errors advise can be done: flags, settings and commands in their `fix` exist."""

import ast
import re
from pathlib import Path

import click
import pytest

from halogen_core.cli.main import main
from halogen_core.config import SETTINGS
from halogen_core.error_catalogue import catalogue

ROOT = Path(__file__).parents[2]
OF_OTHERS = {"--help", "--index-url", "--gpus", "--ulimit", "--group-add", "--ipc", "--privileged"}
"""Flags of pip and docker."""


def advice():
    """Every text of a `fix=` or `hint=` argument in the sources, and every fix of the catalogue."""
    for code, entry in catalogue().items():
        yield code, entry.fix
    for path in [*ROOT.glob("halogen_core/**/*.py"), *ROOT.glob("plugins/*/halogen_*/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("fix", "hint"):
                strings = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                text = " ".join(part for part in strings if isinstance(part, str))
                yield f"{path.name}:{node.value.lineno}", text


def every_flag():
    """Of all commands, those of plugins too."""
    context, flags = click.Context(main), set(OF_OTHERS)
    main.get_command(context, "asking for a plugin's command loads them all")
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    while commands:
        command = commands.pop()
        flags |= {name for param in command.params for name in param.opts}
        if isinstance(command, click.Group):
            commands += command.commands.values()
    return flags


FLAGS = every_flag()
KEYS = {f"{setting.section}.{setting.name}" for setting in SETTINGS.values()}
SECTIONS = {setting.section for setting in SETTINGS.values()}
ADVICE = [(where, text) for where, text in advice() if text]


def test_there_is_advice():
    assert len(ADVICE) > 200


@pytest.mark.parametrize(("where", "text"), ADVICE, ids=[where for where, _ in ADVICE])
def test_what_is_advised_exists(where, text):
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
        assert flag in FLAGS, f"{flag} in {text!r}"
    for section, name in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", text):
        if section in SECTIONS and name not in ("py", "json", "toml", "yaml"):
            assert f"{section}.{name}" in KEYS, f"{section}.{name} in {text!r}"
    for name in re.findall(r"`halogen ([a-z-]+)", text):
        assert name in main.list_commands(click.Context(main)), f"halogen {name} in {text!r}"
