"""One opened backend under test, and the moves every case makes with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from halogen_conformance.case import Case, Failure, Filtered, Measurement
from halogen_conformance.oracle.formats import FLOATS, stored
from halogen_conformance.oracle.numbers import Arithmetic, Values, round_to
from halogen_conformance.oracle.scaled import FLOAT8, TOKEN_ROUNDED
from halogen_conformance.target import Target
from halogen_conformance.tolerance import Tolerances, distance, judge, spread
from halogen_core.spi import (
    Backend,
    Capabilities,
    PackedWeight,
    QuantTensor,
    StepBatch,
    StepMeta,
    WeightRole,
)

POISON = 3
"""Arrays of NaN that are made and dropped before a call, so that reused memory shows."""


@attrs.define(kw_only=True)
class Bench:
    """A backend, what it claims, and what one case has measured so far."""

    backend: Backend[Any]
    capabilities: Capabilities
    tolerances: Tolerances
    case: Case
    target: Target | None = None
    reopen: Callable[[], Backend[Any]] | None = None
    """Opens one more, for cases that end a backend's life."""
    measurements: list[Measurement] = attrs.field(factory=list)
    facts: dict[str, Any] = attrs.field(factory=dict)
    rng: np.random.Generator = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rng = np.random.default_rng(zlib.crc32(self.case.id.encode()))

    @property
    def dtype(self) -> str:
        """Of activations."""
        return self.capabilities.compute_dtypes[0]

    @property
    def arithmetic(self) -> Arithmetic:
        """How the same-dtype reference computes."""
        return Arithmetic(self.dtype)

    def arithmetic_for(self, form: str) -> Arithmetic:
        """How the same-dtype reference computes products with weights of a format."""
        claims, rounding, weights = self.capabilities, "", ""
        if form == TOKEN_ROUNDED:
            rounding = "token"
        elif form not in FLOATS and claims.quantized_activations:
            rounding = "block"
        if form in FLOAT8 and self.dtype == "f32" and claims.weight_formats.get(form) == "emulated":
            weights = "f16"
        return Arithmetic(self.dtype, rounding=rounding, weights=weights)

    # -- making inputs

    def draw(self, *shape: int, std: float = 1.0) -> Values:
        """Normal values that the compute dtype holds exactly, float64."""
        return round_to(self.rng.standard_normal(shape) * std, self.dtype)

    def activation(self, values: Values) -> Any:
        """A device array of the compute dtype.

        Narrow dtypes come in the way a model's do, as rows of an embedding table.
        """
        single = np.ascontiguousarray(values, np.float32)
        if self.dtype == "f32":
            return self.backend.upload(single)
        rows, width = single.shape
        table = single if rows else np.zeros((1, width), np.float32)
        packed = self.backend.pack([stored(table, "F32")], WeightRole.EMBEDDING)
        ids = np.arange(rows, dtype=np.int32)
        return self.backend.ops.embed(self.backend.upload(ids), packed)

    def weight(
        self, *parts: Values | QuantTensor, role: WeightRole = WeightRole.LINEAR
    ) -> PackedWeight[Any]:
        """A packed weight of values (as F32) or stored tensors."""
        tensors = [p if isinstance(p, QuantTensor) else stored(p, "F32") for p in parts]
        return self.backend.pack(tensors, role)

    def norm_weight(self, values: Values) -> PackedWeight[Any]:
        return self.weight(values, role=WeightRole.NORM)

    def step(self, batch: StepBatch) -> StepMeta[Any]:
        return self.backend.upload_step(batch)

    def download(self, array: Any) -> Values:
        """On the host; floats must come as float32."""
        values = self.backend.download(array)
        if np.issubdtype(values.dtype, np.floating) and values.dtype != np.float32:
            raise Failure(f"download gave {values.dtype}; floating arrays come back as float32")
        return values

    def poison(self, shape: tuple[int, ...]) -> None:
        """Leave NaN in memory that the next allocation of this size may get."""
        bad = np.full(shape, np.nan, np.float32)
        arrays = [self.backend.upload(bad) for _ in range(POISON)]
        del arrays

    # -- claims

    def require(self, claimed: bool, capability: str) -> None:
        """Filter the case out when the backend does not claim `capability`."""
        if not claimed:
            raise Filtered(capability)

    def require_format(self, form: str) -> None:
        """The same for a weight format; a backend that names none reads whatever it packs."""
        claimed = self.capabilities.weight_formats
        self.require(not claimed or form in claimed, f"weight_formats:{form}")

    # -- judging

    def measure(
        self,
        call: Callable[[], Any],
        exact: Values,
        reference: Values,
        *,
        what: str = "result",
        length: int = 1,
        rounded: bool = False,
        dtype: str | None = None,
        keeps: Sequence[Any] = (),
        slack: float = 0.0,
    ) -> Values:
        """Run `call` twice over poisoned memory; compare with the oracle and with itself.

        `keeps` are inputs that the call must leave as they are; `rounded` says that the reference
        rounds activations, so that all errors are judged and not the largest alone.
        """
        before = [self.download(array) for array in keeps]
        self.poison(exact.shape)
        first = self.download(call())
        for array, old in zip(keeps, before, strict=True):
            if not np.array_equal(self.download(array), old, equal_nan=True):
                raise Failure(f"{what}: the call changed one of its inputs")
        self.poison(exact.shape)
        second = self.download(call())
        if self.capabilities.deterministic and not np.array_equal(first, second, equal_nan=True):
            raise Failure(f"{what}: two equal calls differ, yet `deterministic` is claimed")
        for got in (first, second):
            self.compare(
                got,
                exact,
                reference,
                what=what,
                length=length,
                rounded=rounded,
                dtype=dtype,
                slack=slack,
            )
        return first

    def compare(
        self,
        got: Values,
        exact: Values,
        reference: Values,
        *,
        what: str = "result",
        length: int = 1,
        rounded: bool = False,
        dtype: str | None = None,
        op: str | None = None,
        slack: float = 0.0,
    ) -> None:
        """Judge values against the oracle and record the measurement."""
        op, dtype = op or self.case.topic, dtype or self.dtype
        own = distance(reference, exact, f"reference of {what}")
        allowed = self.tolerances.allowed(op, dtype, length, own) + slack
        self._judge(what, distance(got, exact, what), own, allowed)
        if rounded:
            own = spread(reference, exact, f"reference of {what}")
            allowed = self.tolerances.allowed_spread(op, dtype, length, own, got.size) + slack
            self._judge(f"{what}, all errors", spread(got, exact, what), own, allowed)

    def _judge(self, what: str, error: float, reference: float, allowed: float) -> None:
        measured = Measurement(what=what, error=error, reference=reference, allowed=allowed)
        self.measurements.append(measured)
        judge(measured)


def same_bits(got: Values, expected: Values, what: str) -> None:
    """Raise unless two arrays are equal, NaN included."""
    if got.shape != expected.shape:
        raise Failure(f"{what}: shape is {got.shape}, expected {expected.shape}")
    if not np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
        wrong = int(np.sum(~np.isclose(got, expected, rtol=0, atol=0, equal_nan=True)))
        raise Failure(f"{what}: {wrong} of {got.size} values differ")


def refuses(call: Callable[[], Any], *kinds: type[Exception], what: str = "it") -> str:
    """Raise unless `call` raises one of `kinds`; returns the message."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        call()
    except kinds as exc:
        return str(exc)
    except Exception as exc:
        raise Failure(
            f"{what} must be refused with {names}, raised {type(exc).__name__}: {exc}"
        ) from exc
    raise Failure(f"{what} must be refused with {names}, but was accepted")
