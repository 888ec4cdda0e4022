"""What a step may hold: the configuration's limits, and the backend's own, which may change."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.spi import Limits

REFRESH_S = 1.0


@attrs.define(eq=False)
class StepLimits:
    """The smaller of what was configured and what the device says now.

    A device that throttles, or whose free memory shrinks, lowers its limits while it runs; it is
    asked again every `REFRESH_S` seconds. When fewer sequences fit than run, those that were let
    in last pause: they keep their blocks and go on when others end or the limit rises.
    """

    config: SchedulerConfig
    read: Callable[[], Limits] = Limits
    """`Backend.limits`"""
    max_sequences: int = attrs.field(init=False)
    max_tokens: int = attrs.field(init=False)
    max_context: int | None = attrs.field(init=False)
    _due: float | None = attrs.field(default=None, init=False)
    """When to ask again, on the scheduler's clock."""

    def __attrs_post_init__(self) -> None:
        self._ask()

    def refresh(self, now: float) -> None:
        """Ask the device again if it is time to."""
        if self._due is None or now >= self._due:
            self._due = now + REFRESH_S
            self._ask()

    def _ask(self) -> None:
        own, config = self.read(), self.config
        self.max_tokens = min(config.max_batch_tokens, own.max_tokens or config.max_batch_tokens)
        self.max_sequences = min(
            config.max_batch, own.max_sequences or config.max_batch, self.max_tokens
        )
        self.max_context = own.max_context
