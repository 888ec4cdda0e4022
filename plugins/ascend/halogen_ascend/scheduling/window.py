"""When to start a batch, and of whom: a greedy window that never waits to fill."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from halogen_ascend.scheduling.arrivals import Arrival
from halogen_core.spi import ConfigError


@attrs.frozen(kw_only=True)
class BatchWindow:
    """`min_s`: the least wait, so that a burst is caught whole; `max_s`: nobody waits longer."""

    min_s: float = 0.0
    max_s: float = 0.010

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.min_s <= self.max_s:
            raise ConfigError(
                f"min_batch_window_ms {self.min_s * 1e3:g} is not within 0 to "
                f"max_batch_window_ms {self.max_s * 1e3:g}",
                code="HRT-7109",
                fix="the minimum is the floor of the wait, the maximum its cap",
            )

    def dispatch_at(self, waiting: Sequence[Arrival], device_free_at: float) -> float | None:
        """When the next batch starts: as soon as the device is free, at the earliest `min_s` after
        the last arrival (a burst is caught whole), at the latest `max_s` after the first.
        """
        if not waiting:
            return None
        first, last = min(a.at for a in waiting), max(a.at for a in waiting)
        return max(device_free_at, min(last + self.min_s, first + self.max_s))


@attrs.frozen(kw_only=True)
class BatchBudget:
    """What one batch may hold: tokens of KV memory, new tokens per step, sequences."""

    kv_tokens: int
    step_tokens: int
    sequences: int


def compose(
    waiting: Sequence[Arrival], budget: BatchBudget, *, running_kv: int = 0, running: int = 0
) -> list[Arrival]:
    """Who joins: by priority, then arrival, each with memory for its whole life, none skipped over.

    Stopping at the first that does not fit keeps a big request from waiting for ever.
    """
    chosen: list[Arrival] = []
    kv, tokens = running_kv, 0
    for request in sorted(waiting, key=lambda a: (-a.priority, a.at)):
        life = request.input_len + request.output_len
        fits = (
            kv + life <= budget.kv_tokens
            and tokens + request.input_len <= budget.step_tokens
            and running + len(chosen) < budget.sequences
        )
        if not fits:
            break
        chosen.append(request)
        kv, tokens = kv + life, tokens + request.input_len
    return chosen
