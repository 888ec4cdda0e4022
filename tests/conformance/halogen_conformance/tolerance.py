"""How far a result may be from the oracle: one table, one rule."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import attrs
import numpy as np

from halogen_conformance.case import Failure, Measurement
from halogen_conformance.oracle.numbers import EPSILON, Values
from halogen_core.spi import ConfigError


@attrs.frozen(kw_only=True)
class Row:
    """One op's tolerance; see `tolerance.toml`."""

    factor: float
    rounding: float
    accumulate: float
    spread: float


@cache
def table() -> dict[str, Row]:
    """All rows by op; `default` serves those without one."""
    text = files("halogen_conformance").joinpath("tolerance.toml").read_text(encoding="utf-8")
    raw = tomllib.loads(text)
    return {op: Row(**{**raw["default"], **row}) for op, row in raw.items()}


@attrs.frozen(kw_only=True)
class Tolerances:
    """The table for one backend, as it asked to be judged."""

    tightened: Mapping[str, float] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for op, factor in self.tightened.items():
            if not 0 < factor <= 1:
                raise ConfigError(
                    f"tolerance factor of `{op}` is {factor}; a backend may only tighten: (0, 1]",
                    code="HRT-6003",
                    fix="mend the numerics, or file a waiver with a reason, a link and an expiry",
                )

    def allowed(self, op: str, dtype: str, length: int, reference: float) -> float:
        """The largest error, in root mean squares of a row."""
        row = table().get(op, table()["default"])
        return self._of(op, row.factor * reference + _floor(row, dtype, length))

    def allowed_spread(
        self, op: str, dtype: str, length: int, reference: float, count: int
    ) -> float:
        """The root mean square error of `count` values, where activations are rounded to 8 bits."""
        row = table().get(op, table()["default"])
        # two independent draws of a root mean square over n values differ by 1 / sqrt(n): two sigmas
        factor = row.spread * (1 + 2 / math.sqrt(max(count, 1)))
        return self._of(op, factor * reference + _floor(row, dtype, length))

    def _of(self, op: str, allowed: float) -> float:
        return allowed * self.tightened.get(op, 1.0)


def _floor(row: Row, dtype: str, length: int) -> float:
    accumulated = row.accumulate * EPSILON["f32"] * math.sqrt(max(length, 1))
    return row.rounding * EPSILON[dtype] + accumulated


def distance(got: Values, exact: Values, what: str) -> float:
    """Largest difference in root mean squares of its row; raises where NaN or infinity differ."""
    return float(relative_errors(got, exact, what).max(initial=0.0))


def spread(got: Values, exact: Values, what: str) -> float:
    """Root mean square of the differences, each in root mean squares of its row."""
    errors = relative_errors(got, exact, what)
    return float(np.sqrt(np.mean(errors * errors))) if errors.size else 0.0


def relative_errors(got: Values, exact: Values, what: str) -> Values:
    """Differences in root mean squares of their row; raises where NaN or infinity differ."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    if got.shape != exact.shape:
        raise Failure(f"{what}: shape is {got.shape}, expected {exact.shape}")
    finite = np.isfinite(exact)
    strange = ~finite & ~((got == exact) | (np.isnan(got) & np.isnan(exact)))
    strange |= finite & ~np.isfinite(got)
    if strange.any():
        at = tuple(int(i) for i in np.argwhere(strange)[0])
        raise Failure(
            f"{what}: {int(strange.sum())} of {got.size} values differ in kind, first at {at}: "
            f"{got[at]} instead of {exact[at]}"
        )
    if not finite.any():
        return np.zeros(exact.shape)
    clean = np.where(finite, exact, 0)
    difference = np.abs(np.where(finite, got, 0) - clean)
    scale = np.sqrt(np.mean(clean * clean, axis=-1, keepdims=True)) if exact.ndim else 1.0
    relative = np.divide(difference, scale, out=np.zeros_like(difference), where=scale > 0)
    return np.where((scale == 0) & (difference > 0), np.inf, relative)


def judge(measurement: Measurement) -> None:
    """Raise `Failure` when a measurement is out of tolerance."""
    m = measurement
    if not m.error <= m.allowed:
        raise Failure(
            f"{m.what}: error {m.error:.3g} is above {m.allowed:.3g} "
            f"(same-dtype reference: {m.reference:.3g}; unit: rms of the row)"
        )
