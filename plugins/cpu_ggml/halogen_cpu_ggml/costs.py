"""A step's predicted time, fitted to what the core measured."""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np

from halogen_core.spi import Cost, StepShape

KEPT = 256
ENOUGH = 8
TAIL = 1.3
"""p95 over p50 until residuals say otherwise."""


@attrs.define(eq=False)
class CostModel:
    """Time = a + b prompt tokens + c decoding sequences + d KV tokens + e prompt pairs."""

    seen: deque[tuple[StepShape, float]] = attrs.field(factory=lambda: deque(maxlen=KEPT))
    fit: tuple[np.ndarray, float] | None = None

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Remember a measurement; the fit is renewed when it is next asked for."""
        self.seen.append((shape, seconds))
        self.fit = None

    def predict(self, shape: StepShape) -> Cost | None:
        """None until enough steps were seen."""
        if len(self.seen) < ENOUGH:
            return None
        if self.fit is None:
            self.fit = self._solve()
        weights, tail = self.fit
        p50 = max(1e-5, float(_features(shape) @ weights))
        return Cost(p50=p50, p95=p50 * tail)

    def _solve(self) -> tuple[np.ndarray, float]:
        x = np.array([_features(shape) for shape, _ in self.seen])
        y = np.array([seconds for _, seconds in self.seen])
        # relative errors count, so that short steps are predicted as well as long ones
        relative = x / y[:, None]
        scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
        weights = np.linalg.lstsq(relative / scale, np.ones_like(y), rcond=None)[0] / scale
        ratio = y / np.maximum(x @ weights, 1e-9)
        return weights, max(TAIL, float(np.quantile(ratio, 0.95)))


def _features(shape: StepShape) -> np.ndarray:
    sizes = (shape.prefill_tokens, shape.decode_sequences, shape.kv_tokens, shape.prefill_pairs)
    return np.array([1.0, *sizes])
