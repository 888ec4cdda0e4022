"""Bits of packed weights in numpy: nibbles out of words, and back into pairs along K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halogen_core.spi.arrays import Bytes

Array = NDArray[Any]
_DTYPES = {
    "I32": np.int32, "I64": np.int64, "U8": np.uint8, "I8": np.int8,
    "F16": np.float16, "F32": np.float32,
    "F8_E8M0": np.uint8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
}  # fmt: skip
EMPTY: Array = np.zeros(0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble that holds output column 8 c + i."""


class Unfit(Exception):
    """What was found does not fit; becomes a `ModelError` that names file and tensor."""


def array(data: Bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    """A stored tensor; bfloat16 as float32, 8-bit floats as their codes."""
    if dtype == "BF16":
        wide = data.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype not in _DTYPES:
        raise Unfit(f"it has a tensor of type {dtype}")
    return data.view(_DTYPES[dtype]).reshape(shape)


def nibbles(words: Array, order: Sequence[int] = range(8)) -> Array:
    """Codes uint8 [A, 8 B] of int32 words [A, B]; nibble `order[i]` is column 8 b + i."""
    if words.ndim != 2 or words.dtype != np.int32:
        raise Unfit(f"packed words are {words.dtype} {words.shape}")
    codes = np.empty((*words.shape, 8), np.uint8)
    source = np.ascontiguousarray(words).view(np.uint32)
    for i, nibble in enumerate(order):
        codes[:, :, i] = (source >> (4 * nibble)) & 15
    return codes.reshape(len(words), -1)


def awq_columns(words: Array) -> Array:
    """Codes of AWQ's words along the output axis."""
    return nibbles(words, _AWQ_ORDER)


def pairs(codes: Array) -> Bytes:
    """Two codes per byte along the last axis, the first in the low nibble; flat."""
    codes = np.ascontiguousarray(codes)
    both: Bytes = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
    return both


def act_order(group: Array | None, k: int, groups: int) -> NDArray[np.int32] | None:
    """Columns sorted by group [K]; None where they are sorted already."""
    if group is None or (group == np.arange(k) // (k // groups)).all():
        return None
    if group.shape != (k,) or (np.bincount(group, minlength=groups) != k // groups).any():
        raise Unfit(f"its {groups} groups of {k} columns are not of one size")
    return np.argsort(group, kind="stable").astype(np.int32)


def floats(values: Array) -> Array:
    """Scales, contiguous; float16 stays float16."""
    if values.dtype not in (np.float16, np.float32):
        raise Unfit(f"scales are {values.dtype}")
    if not np.isfinite(values).all():
        raise Unfit("a scale is not finite")
    return np.ascontiguousarray(values)


def per_row(scale: Array, rows: int) -> NDArray[np.float32]:
    """One float32 scale per row, from one per row or one for all."""
    flat = scale.reshape(-1).astype(np.float32)
    return flat if flat.size == rows else np.repeat(flat, rows)


def contiguous(values: Array) -> Array:
    """The same values in row-major order."""
    return np.ascontiguousarray(values)


def joined(arrays: Sequence[Array]) -> Array:
    """Arrays one after another."""
    return np.concatenate(arrays)


def mxfp4_blocks(codes: Array, exponents: Array) -> Bytes:
    """GGUF's blocks (exponent, then elements j and j + 16 in byte j) of pairs [..., K / 2]."""
    both = codes.reshape(-1, 16)
    elements = np.stack([both & 15, both >> 4], -1).reshape(-1, 2, 16)
    blocks = np.empty((len(both), 17), np.uint8)
    blocks[:, 0] = exponents.reshape(-1)
    blocks[:, 1:] = elements[:, 0] | elements[:, 1] << 4
    return blocks.reshape(-1)
