"""What a long-running command shows: colours and a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Show = Callable[[float], None]
"""Called with the share that is done, 0 to 1."""


@cache
def console() -> Console:
    """Standard error; one object, so that log lines and the bar do not break each other."""
    return Console(stderr=True)


def start_logging(level: str) -> None:
    """Log lines to standard error; those of the HTTP server only where it warns."""
    if console().is_terminal:
        handler: logging.Handler = RichHandler(
            console=console(), show_path=False, log_time_format="[%X]"
        )
        logging.basicConfig(level=level.upper(), format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=level.upper(), format=PLAIN)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


@contextmanager
def loading_shown() -> Iterator[Show]:
    """A bar while the model loads; without a terminal a line every few seconds."""
    if not console().is_terminal:
        yield _lines()
        return
    columns = (TextColumn("loading"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console(), transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _lines() -> Show:
    said = time.monotonic()

    def show(share: float) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_EVERY_S:
            said = time.monotonic()
            log.info("loading: %.0f %%", 100 * share)

    return show
