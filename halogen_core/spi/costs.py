"""A step's time as a linear function of its size, fitted to what was measured."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from halogen_core.spi.records import Cost, StepShape

_KEPT = 256
_REFIT_AFTER = 1 / 16
"""Of the steps that are known: a young model learns from every step, an old one now and then."""
_LEAST = 8


class LinearCost:
    """Seconds = a + b prompt tokens + c decoding sequences + d KV tokens + e prompt pairs.

    No weight is negative. Fitted to relative errors, so that small steps count as much as big ones.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[NDArray[np.float64], float]] = deque(maxlen=_KEPT)
        self._weights: NDArray[np.float64] | None = None
        self._p95_over_p50 = 1.0
        self._since_fit = 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Remember one step; non-positive times are ignored."""
        if seconds <= 0:
            return
        self._steps.append((_features(shape), seconds))
        self._since_fit += 1
        due = self._weights is None or self._since_fit >= _REFIT_AFTER * len(self._steps)
        if due and len(self._steps) >= _LEAST:
            self._fit()

    def predict(self, shape: StepShape) -> Cost | None:
        """None until enough steps were seen, and for a shape of which they tell nothing."""
        p50 = 0.0 if self._weights is None else float(_features(shape) @ self._weights)
        if p50 <= 0:
            return None
        return Cost(p50=p50, p95=p50 * self._p95_over_p50)

    def _fit(self) -> None:
        sizes = np.stack([size for size, _ in self._steps])
        seconds = np.array([second for _, second in self._steps])
        relative = sizes / seconds[:, None]
        self._weights = _non_negative(relative, np.ones(len(seconds)))
        predicted = np.maximum(sizes @ self._weights, 1e-9)
        self._p95_over_p50 = max(1.0, float(np.quantile(seconds / predicted, 0.95)))
        self._since_fit = 0


def _features(shape: StepShape) -> NDArray[np.float64]:
    sizes = (shape.prefill_tokens, shape.decode_sequences, shape.kv_tokens, shape.prefill_pairs)
    return np.array([1, *sizes], dtype=np.float64)


def _non_negative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative weights: drop the most negative column until none is."""
    scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
    columns = list(range(a.shape[1]))
    weights = np.zeros(a.shape[1])
    while columns:
        found = np.linalg.lstsq(a[:, columns] / scale[columns], b, rcond=None)[0]
        if found.min() >= 0:
            weights[columns] = found / scale[columns]
            break
        columns.pop(int(found.argmin()))
    return weights
