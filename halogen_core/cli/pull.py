"""`halogen pull`: bring a model to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from halogen_core.cli.settings import with_settings
from halogen_core.config import Config
from halogen_core.errors import ModelError
from halogen_core.loader.catalogue import KNOWN_MODELS, parse_hub_name, resolve_model
from halogen_core.loader.fetch import Progress, fetch_hub, fetch_known
from halogen_core.loader.opening import open_model
from halogen_core.models import config_of


def pull_model(name: str, models_dir: Path, *, progress: Progress | None = None) -> Path:
    """Bring `name` (known, `hf:org/repo[:file]`, or a path) to disk and return where it is.

    Raises `ModelError`; a model fetched before is checked and kept.
    """
    report = progress or (lambda what, done, total: None)
    try:
        if known := KNOWN_MODELS.get(name):
            return fetch_known(known, models_dir, report)
        hub = parse_hub_name(name)
        path = fetch_hub(hub, models_dir, report) if hub else resolve_model(name, models_dir)
    except OSError as exc:
        raise ModelError(
            f"cannot keep `{name}` in `{models_dir}`: {exc.strerror or exc}",
            code="HRT-2305",
            fix="make room or the directory writable, or choose another one with --models-dir",
        ) from exc
    config_of(open_model(path))
    return path


@click.command("pull")
@click.argument("name", default="smollm2-135m")
@with_settings(also=("models_dir",))
def command(name: str, config: Config) -> None:
    """Download the model NAME, check it, and print where it is.

    NAME is a known model (smollm2-135m, gemma3-270m), hf:org/repo, hf:org/repo:file.gguf, or a
    path, which is only checked.
    """
    with _bar() as progress:
        path = pull_model(name, config.paths.models_dir, progress=progress)
    click.echo(path)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on stderr; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
