"""How many sequences the server takes at once; the rest are told when to come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from halogen_core.errors import Overloaded, RequestError

SMOOTHING = 0.2


@attrs.define
class Admission:
    """Counts sequences from parsing to the last byte, so that nothing can pile up unseen."""

    limit: int
    """Running and waiting sequences together."""
    inside: int = 0
    seconds: float = 1.0
    """Smoothed duration of a request, the estimate for `Retry-After`."""

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Hold `count` places; raises `Overloaded` when they are not there."""
        if count > self.limit:
            raise RequestError(
                f"the request asks for {count} sequences, the server holds {self.limit}",
                param="n",
                fix="send fewer prompts or a smaller `n`",
            )
        if self.inside + count > self.limit:
            raise Overloaded(
                f"the queue is full: {self.inside} sequences of at most {self.limit}",
                retry_after_s=min(30.0, self.seconds),
            )
        self.inside += count
        began = time.monotonic()
        try:
            yield
        finally:
            self.inside -= count
            self.seconds += SMOOTHING * (time.monotonic() - began - self.seconds)
