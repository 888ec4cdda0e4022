"""`halogen inspect`: what a model file says of itself."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click

from halogen_core.cli.profiles import stored_bytes
from halogen_core.cli.settings import with_settings
from halogen_core.config import Config


@click.command("inspect")
@click.argument("model", required=False)
@click.option("--model", "named", metavar="MODEL", help="the same, as other commands take it")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@click.option("--tensors", is_flag=True, help="list every tensor")
@with_settings(also=("models_dir",))
def command(
    config: Config, model: str | None, named: str | None, as_json: bool, tensors: bool
) -> None:
    """Show what MODEL (a name, a file or a directory) says of itself; loads no weights."""
    if (model is None) == (named is None):
        raise click.UsageError("name one MODEL")
    about = describe(config, model or named or "", tensors)
    if as_json:
        click.echo(json.dumps(about, indent=2))
        return
    for name, value in about.items():
        if name == "tensors":
            for row in value:
                click.echo(f"  {row['name']}  {row['format']}  {row['shape']}")
        elif isinstance(value, dict):
            click.echo(f"{name}:")
            for key, item in sorted(value.items()):
                click.echo(f"  {key}: {_short(item)}")
        else:
            click.echo(f"{name}: {value}")


def describe(config: Config, model: str, tensors: bool) -> dict[str, Any]:
    """The model as data."""
    from halogen_core.loader import load_tokenizer, open_model
    from halogen_core.loader.catalogue import resolve_model

    checkpoint = open_model(resolve_model(model, config.paths.models_dir))
    rows = [checkpoint.tensor(name) for name in sorted(checkpoint.names())]
    tokenizer = load_tokenizer(checkpoint)
    about: dict[str, Any] = {
        "path": checkpoint.path,
        "architecture": checkpoint.architecture,
        "content_id": checkpoint.content_id,
        "bytes": sum(stored_bytes(row) for row in rows),
        "formats": dict(Counter(row.format for row in rows)),
        "vocab_size": tokenizer.vocab_size,
        "end_token_ids": sorted(tokenizer.end_token_ids),
        "chat_templates": sorted(tokenizer.chat_templates),
        "hparams": {key: _plain(value) for key, value in checkpoint.hparams.items()},
    }
    if tensors:
        about["tensors"] = [
            {"name": row.name, "format": row.format, "shape": list(row.shape)} for row in rows
        ]
    return about


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
