"""Ctrl-C while native code runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C ends this process at once, as SIGTERM does; shells show status 130.

    Python's own handler waits for native code to return: building a tokenizer of 262,144 pieces
    or importing torch takes seconds on a busy machine. Only for what leaves nothing behind.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a shell's background job
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
