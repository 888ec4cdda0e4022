"""How many prompt tokens a step may take, and when a step should wait for company."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.spi import Cost, StepShape

CostModel = Callable[[StepShape], Cost | None]


@attrs.frozen
class StepBudget:
    """Bounds a step by the time that the backend's cost model predicts (Sarathi-Serve, 2024)."""

    cost: CostModel | None
    target_s: float | None
    granule: int = 16
    """Prompts make progress by at least so many tokens."""

    def prefill_tokens(self, decodes: int, kv_tokens: int, limit: int) -> int:
        """Most prompt tokens, up to `limit`, that keep running sequences at the target."""
        if not decodes or self.cost is None or self.target_s is None or limit <= self.granule:
            return limit
        if self._fits(decodes, kv_tokens, limit):
            return limit
        low, high = self.granule, limit
        while high - low > self.granule:
            middle = (low + high) // 2
            if self._fits(decodes, kv_tokens, middle):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, decodes: int, kv_tokens: int, tokens: int) -> bool:
        assert self.cost is not None
        assert self.target_s is not None
        shape = StepShape(
            prefill_tokens=tokens, decode_sequences=decodes, kv_tokens=kv_tokens + tokens
        )
        predicted = self.cost(shape)
        return predicted is None or predicted.p50 <= self.target_s


def block_seconds(cost: CostModel, block_size: int) -> Callable[[int], float | None]:
    """Seconds to compute a block of prompt after `depth` others, as part of a large chunk."""
    chunk = max(block_size, 512)

    def seconds(depth: int) -> float | None:
        shape = StepShape(
            prefill_tokens=chunk, decode_sequences=0, kv_tokens=depth * block_size + chunk
        )
        predicted = cost(shape)
        return None if predicted is None else predicted.p50 * block_size / chunk

    return seconds


@attrs.frozen
class BatchWindow:
    """When waiting sequences may enter: at once if the device is idle, else in company.

    `min_s` is a floor that always holds; `max_s` caps the wait while others run (C6-C10, X8).
    """

    min_s: float
    max_s: float

    @staticmethod
    def of(config: SchedulerConfig) -> BatchWindow:
        return BatchWindow(config.min_window_s, max(config.min_window_s, config.max_window_s))

    def opens(self, oldest_arrival: float, *, busy: bool, full: bool) -> float:
        """The time from which they may enter; `full`: no more would fit, so why wait."""
        if full:
            return oldest_arrival
        return oldest_arrival + (self.max_s if busy else self.min_s)
