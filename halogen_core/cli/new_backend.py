"""`halogen new-backend`: a backend plugin that works from the first minute, through the host."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

import click

from halogen_core.errors import ConfigError
from halogen_core.spi import SPI_VERSION

FILES = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "manifest.toml.tmpl": "halogen_{name}/halogen-backend.toml",
    "plugin.py.tmpl": "halogen_{name}/plugin.py",
    "backend.py.tmpl": "halogen_{name}/backend.py",
    "test_conformance.py.tmpl": "tests/test_{name}_conformance.py",
}
"""Template -> path in the new package."""
EMPTY = ("halogen_{name}/__init__.py", "halogen_{name}/py.typed")


@click.command("new-backend")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), default=Path(), help="parent folder")
def command(name: str, into: Path) -> None:
    """Write a backend plugin NAME whose every op falls back to the host."""
    folder = write_skeleton(name, into)
    click.echo(f"wrote {folder}; next:")
    click.echo(f"  pip install -e {folder}")
    click.echo(f"  halogen conform --backend {name} --level 0")


def write_skeleton(name: str, into: Path) -> Path:
    """The new package's folder; raises `ConfigError` for a bad name or an existing folder."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise ConfigError(
            f"backend name is `{name}`; allowed are small letters, digits and _, a letter first",
            code="HRT-6007",
            fix="for example `halogen new-backend acme_npu`",
        )
    folder = into / f"halogen-{name.replace('_', '-')}"
    if folder.exists():
        raise ConfigError(
            f"`{folder}` exists already", code="HRT-6008", fix="choose another name or --into"
        )
    values = {
        "name": name,
        "dashed": name.replace("_", "-"),
        "class_name": "".join(word.capitalize() for word in name.split("_")) + "Backend",
        "spi": ".".join(map(str, SPI_VERSION)),
        "next_spi": str(SPI_VERSION[0] + 1),
    }
    templates = files("halogen_core.cli").joinpath("templates", "new_backend")
    for template, path in FILES.items():
        text = templates.joinpath(template).read_text(encoding="utf-8")
        _write(folder / path.format(name=name), Template(text).substitute(values))
    for path in EMPTY:
        _write(folder / path.format(name=name), "")
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
