"""Every `halogen …` line in the documentation is a command that exists, with options that exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from halogen_core.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/[!a]*/*.md"),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("benchmarks/*/README.md"),
        ROOT / "tests/conformance/README.md",
    ]
    if page.name not in ("CHANGELOG.md", "cli.md")
]
INLINE = re.compile(r"`(?:[A-Z_]+=\S+ )*(halogen [a-z][^`\n]*)`")
LINE = re.compile(r"^(?:    |\$ |- run: )*(?:[A-Z_]+=\S+ )*(halogen [a-z][^#\n]*)", re.MULTILINE)


def commands(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = "\n".join(re.findall(r"^    .*$", prose, re.MULTILINE))
    found = INLINE.findall(prose) + LINE.findall(blocks) + LINE.findall(indented)
    return sorted({line.strip() for line in found})


CASES = [(page, line) for page in PAGES for line in commands(page)]


def test_there_are_commands_to_check():
    assert len(CASES) > 40


@pytest.mark.parametrize(
    ("page", "line"), CASES, ids=lambda v: v if isinstance(v, str) else v.parent.name
)
def test_a_documented_command_parses(page, line):
    parts = [part for part in shlex.split(line)[1:] if part not in ("...", "…")]
    for symbol in ("|", ">", "2>&1", "&&", ";", "&"):
        parts = parts[: parts.index(symbol)] if symbol in parts else parts
    if parts[0] == "explain" and len(parts) > 1 and parts[1].islower():
        parts[:2] = [f"explain-{parts[1]}"]
    check(main, click.Context(main, info_name="halogen"), parts)


def check(command, context, parts):
    """Raises for a command or an option that does not exist."""
    if isinstance(command, click.Group) and parts and not parts[0].startswith("-"):
        name, found, rest = command.resolve_command(context, parts)
        check(found, click.Context(found, info_name=name, parent=context), rest)
        return
    known = {name: option for option in command.params for name in option.opts}
    if len(parts) > 1 or not context.parent:
        given = {part.partition("=")[0] for part in parts}
        lacking = [p for p in command.params if isinstance(p, click.Option) and p.required]
        assert not [p.opts for p in lacking if not given & set(p.opts)], "required"
    for at, part in enumerate(parts):
        name, _, value = part.partition("=")
        if not part.startswith("--") or name == "--help":
            continue
        assert name in known, f"no option {name}"
        if isinstance(known[name].type, click.Choice):
            known[name].type.convert(value or parts[at + 1], known[name], context)
