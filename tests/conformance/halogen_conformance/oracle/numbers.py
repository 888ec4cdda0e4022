"""Number formats in numpy: rounding to narrow floats, and KV rows as bytes and values."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]

EPSILON = {
    "f64": 2.0**-53,
    "f32": 2.0**-24,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "f8_e5m2": 2.0**-3,
    "q8_0": 2.0**-8,
}
"""Largest relative error of one rounding (q8_0: relative to the largest of its 32)."""


def round_to(values: Values, dtype: str) -> Values:
    """`values` rounded to nearest even in `dtype`, kept in float64 (f64: unchanged)."""
    if dtype == "f64":
        return np.asarray(values, np.float64)
    if dtype == "f32":
        return np.asarray(values, np.float32).astype(np.float64)
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float16).astype(np.float64)
    if dtype == "bf16":
        return from_bf16(to_bf16(values))
    raise ValueError(f"dtype `{dtype}` is not one of f64, f32, f16, bf16")


def to_bf16(values: Values) -> NDArray[np.uint16]:
    """Bit patterns: the upper half of float32, to nearest even; NaN stays NaN."""
    single = np.asarray(values, np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> Values:
    """The inverse of `to_bf16`, float64."""
    wide = np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).astype(np.float64)


ACTIVATION_BLOCK = 32
"""Elements that share a scale where activations are rounded to 8 bits."""


def eight_bit(values: Values, block: int = ACTIVATION_BLOCK) -> Values:
    """Each block of the last axis as `scale * code`: scale its largest / 127, codes int8."""
    values = np.asarray(values, np.float64)
    blocks = values.reshape(*values.shape[:-1], -1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    codes = np.rint(blocks / np.where(scale == 0, 1, scale))
    return (codes * scale).reshape(values.shape)


@attrs.frozen
class Arithmetic:
    """How an oracle computes: `f64` exactly, otherwise as a plain implementation in that dtype.

    `store` rounds what such an implementation keeps between two operations; sums run in float32.
    """

    dtype: str = "f64"
    rounding: str = ""
    """What is about to meet a quantised weight is rounded to 8 bits too: `block`, a scale per 32,
    as backends may that declare `quantized_activations`; `token`, a scale per row, as format W8A8
    asks."""
    weights: str = ""
    """Narrower dtype that weights are kept in; empty: `dtype`."""
    fused: bool = False
    """As one kernel: operands of products are rounded, what stays in registers is not."""

    def take(self, values: Values) -> Values:
        """An input as the arithmetic sees it."""
        return np.asarray(values, np.float64 if self.dtype == "f64" else np.float32)

    def store(self, values: Values) -> Values:
        """A result as it would be kept."""
        return self.take(round_to(values, self.dtype))

    def weight(self, values: Values) -> Values:
        """A weight as it would be kept."""
        return self.store(round_to(values, self.weights) if self.weights else values)

    def operand(self, values: Values) -> Values:
        """Stored values on their way into a product."""
        return self.store(values) if self.fused else self.take(values)

    def between(self, values: Values) -> Values:
        """A result on its way to the next operation, which a fused kernel keeps in float32."""
        return self.take(values) if self.fused else self.store(values)

    def meet(self, x: Values) -> Values:
        """Activations as they enter a product with a weight."""
        if not self.rounding:
            return self.take(x)
        width = x.shape[-1] if self.rounding == "token" else ACTIVATION_BLOCK
        return self.take(eight_bit(x, width))

    @property
    def dense(self) -> Arithmetic:
        """The same where the weight is not quantised."""
        return Arithmetic(self.dtype)


EXACT = Arithmetic()


def farther(exact: Values, one: Values, other: Values) -> Values:
    """Of two references, element by element the one that is farther from the truth."""
    return np.where(np.abs(one - exact) >= np.abs(other - exact), one, other)


# ---------------------------------------------------------------- KV rows


def kv_values(raw: NDArray[np.uint8], dtype: str) -> Values:
    """Values [..., D] float64 of canonical KV rows [..., bytes]."""
    raw = np.ascontiguousarray(raw)
    if dtype == "q8_0":
        blocks = raw.reshape(*raw.shape[:-1], -1, 34)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
        codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float64)
        return (scale * codes).reshape(*raw.shape[:-1], -1)
    if dtype == "f8_e5m2":
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    if dtype == "bf16":
        return from_bf16(raw.view(np.uint16))
    return raw.view({"f32": np.float32, "f16": np.float16}[dtype]).astype(np.float64)


def kv_bytes(values: Values, dtype: str) -> NDArray[np.uint8]:
    """Canonical KV rows [..., bytes] of values [..., D]."""
    if dtype == "q8_0":
        return _q8_0(np.asarray(values, np.float32))
    if dtype == "f8_e5m2":
        return _f8_e5m2(values)
    if dtype == "bf16":
        return to_bf16(values).view(np.uint8)
    kind = {"f32": np.float32, "f16": np.float16}[dtype]
    return np.ascontiguousarray(np.asarray(values, kind)).view(np.uint8)


def _q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    codes = np.where(scale > 0, blocks / np.where(scale > 0, scale, 1), 0)
    rounded = (np.sign(codes) * np.floor(np.abs(codes) + 0.5)).astype(np.int8)
    packed = np.concatenate(
        [scale.astype(np.float16).view(np.uint8), rounded.view(np.uint8)], axis=-1
    )
    return packed.reshape(*values.shape[:-1], -1)


def _f8_e5m2(values: Values) -> NDArray[np.uint8]:
    half = np.asarray(values, np.float16).view(np.uint16).astype(np.uint32)
    rounded = (half + 0x7F + ((half >> 8) & 1)) >> 8
    return rounded.astype(np.uint8)


def kv_error(values: Values, dtype: str) -> Values:
    """The largest error that storing `values` [..., D] in a KV dtype may make, elementwise."""
    magnitude = np.abs(values)
    if dtype == "q8_0":
        blocks = magnitude.reshape(*magnitude.shape[:-1], -1, 32)
        largest = np.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape)
        return largest.reshape(magnitude.shape) * (0.5 / 127 + EPSILON["f16"]) * 1.02
    tiny = {"f32": 2.0**-149, "f16": 2.0**-25, "bf16": 2.0**-134, "f8_e5m2": 2.0**-17}[dtype]
    return magnitude * EPSILON[dtype] * 1.001 + tiny
