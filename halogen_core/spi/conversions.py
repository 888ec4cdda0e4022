"""Weights that a backend keeps in another format than the checkpoint's, and what that cost."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import attrs

from halogen_core.errors import ModelError
from halogen_core.spi.float8 import float8_rounding
from halogen_core.spi.operations import Placement, QuantTensor

logger = logging.getLogger(__name__)
WEIGHED = ("embed", "linear", "mlp", "moe", "logits")
"""Ops that read weights of the checkpoint's formats."""
_FLOAT32 = 2.0**-23
"""Any float32 is within this of what it stands for: no warning, but not called exact."""


@attrs.define
class Conversions:
    """What was converted, by (from, to, cause of the error): how many tensors, the worst error."""

    seen: dict[tuple[str, str, str], tuple[int, float]] = attrs.field(factory=dict)

    def add(self, source: str, form: str, error: float, cause: str) -> None:
        """Count one tensor; the first of its kind is logged, as a warning where values moved."""
        key = (source, form, cause if error else "")
        count, worst = self.seen.get(key, (0, 0.0))
        self.seen[key] = (count + 1, max(worst, error))
        if count == 0:
            level = logging.WARNING if error > _FLOAT32 else logging.INFO
            text = _exactness(error, cause)
            logger.log(level, "%s weights are kept as %s, %s", source, form, text)

    def add_float8(self, tensor: QuantTensor, dtype: str) -> None:
        """Count a checked tensor of 8-bit floats whose values are kept in `dtype` (f32, f16, bf16).

        Raises ModelError (HRT-2412) where a value is out of that dtype's range.
        """
        error = float8_rounding(tensor, dtype)
        if error == float("inf"):
            raise ModelError(
                f"tensor `{tensor.name}` of format `{tensor.format}` has values out of {dtype}'s "
                "range",
                code="HRT-2412",
                fix="open the backend with dtype bf16 or f32, e.g. --backend-option dtype=bf16",
            )
        self.add(tensor.format, dtype.upper(), error, "rounded once")

    def lines(self) -> tuple[str, ...]:
        """A sentence each."""
        return tuple(
            f"{count} {source} tensors are kept as {form}, {_exactness(worst, cause)}"
            for (source, form, cause), (count, worst) in sorted(self.seen.items())
        )

    def told(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        """Placements with these sentences among the reasons of the ops that read weights."""
        lines = self.lines()
        return tuple(
            attrs.evolve(p, reasons=(*p.reasons, *lines)) if p.op in WEIGHED else p
            for p in placements
        )


def _exactness(error: float, cause: str) -> str:
    if error > _FLOAT32:
        return f"values within {error:.2%} ({cause})"
    return "to float32" if error else "exactly"
