"""Times and sizes of steps, as histograms that cost a bisection each; memory as gauges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import attrs

from halogen_core.engine.protocol import Histogram
from halogen_core.spi import MemoryPlan, MemoryTier

SECONDS = (1e-4, 2e-4, 5e-4, *(d * 10.0**e for e in (-3, -2, -1, 0) for d in (1, 2, 5)), 10.0)
TOKENS = tuple(float(1 << i) for i in range(15))


@attrs.define(eq=False)
class Counts:
    """How many values fell at or under each bound, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = attrs.field(init=False)
    total: float = attrs.field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> Histogram:
        return Histogram(bounds=list(self.bounds), counts=list(self.counts), total=self.total)


@attrs.define(eq=False)
class StepMeasures:
    """What steps take. The device's part counts as `prefill` when it computes any prompt.

    Picking tokens belongs to the device's part: a step synchronises once, so it cannot be told
    apart. `results` is what the engine does with the tokens afterwards.
    """

    schedule: Counts = attrs.field(factory=lambda: Counts(SECONDS))
    prefill: Counts = attrs.field(factory=lambda: Counts(SECONDS))
    decode: Counts = attrs.field(factory=lambda: Counts(SECONDS))
    results: Counts = attrs.field(factory=lambda: Counts(SECONDS))
    tokens: Counts = attrs.field(factory=lambda: Counts(TOKENS))

    def snapshot(self) -> dict[str, Histogram]:
        """By metric name; labels in braces."""
        phases = ("schedule", "prefill", "decode", "results")
        return {
            **{f"step_seconds{{phase={name}}}": getattr(self, name).snapshot() for name in phases},
            "step_tokens": self.tokens.snapshot(),
        }


def memory_gauges(plan: MemoryPlan, tiers: Iterable[MemoryTier]) -> dict[str, float]:
    """Bytes of the pools of `plan`, and what `tiers` say is free; by metric name, with labels."""
    pools = {(p.tier, p.name): p.bytes for p in plan.pools}
    pools |= {(tier.name, "free"): tier.free for tier in tiers}
    return {f"device_memory_bytes{{tier={t},pool={p}}}": float(n) for (t, p), n in pools.items()}
