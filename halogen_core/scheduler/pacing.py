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

    def seconds(self, tokens: int, *, context: int, decodes: int, kv_tokens: int) -> float | None:
        """Predicted time of a step: prompt tokens after `context` others, beside answers.

        `kv_tokens` are those of answers and prompts before the step.
        """
        if self.cost is None:
            return None
        predicted = self.cost(
            StepShape(
                prefill_tokens=tokens,
                decode_sequences=decodes,
                kv_tokens=kv_tokens + tokens,
                prefill_pairs=_pairs(tokens, context),
            )
        )
        return None if predicted is None else predicted.p50

    def prompt_tokens(
        self, within_s: float | None, limit: int, *, context: int, decodes: int, kv_tokens: int
    ) -> int:
        """Most prompt tokens, up to `limit`, with which a step takes no longer; None: any time."""

        def fits(tokens: int) -> bool:
            predicted = self.seconds(tokens, context=context, decodes=decodes, kv_tokens=kv_tokens)
            return within_s is None or predicted is None or predicted <= within_s

        if limit <= self.granule or fits(limit):
            return limit
        low, high = self.granule, limit
        while high - low > self.granule:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def slack(self, decodes: int, kv_tokens: int) -> float | None:
        """What answers leave of the target, at least a tenth of it so that prompts move at all.

        None: there are no answers, no target, or nothing is known about the device.
        """
        alone = self.seconds(0, context=0, decodes=decodes, kv_tokens=kv_tokens)
        if not decodes or self.target_s is None or alone is None:
            return None
        return max(self.target_s - alone, self.target_s / 10)


def block_seconds(cost: CostModel, block_size: int) -> Callable[[int], float | None]:
    """Seconds to compute a block of prompt after `depth` others, as part of a large chunk."""
    chunk = max(block_size, 512)

    def seconds(depth: int) -> float | None:
        context = depth * block_size
        shape = StepShape(
            prefill_tokens=chunk,
            decode_sequences=0,
            kv_tokens=context + chunk,
            prefill_pairs=_pairs(chunk, context),
        )
        predicted = cost(shape)
        return None if predicted is None else predicted.p50 * block_size / chunk

    return seconds


def _pairs(tokens: int, context: int) -> int:
    """Of prompt tokens and those they attend to, themselves included."""
    return tokens * context + tokens * (tokens + 1) // 2


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
