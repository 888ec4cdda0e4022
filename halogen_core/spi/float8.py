"""Weights of 8-bit floats with scales beside them: what they stand for, how far 16 bits are off.

Formats `F8_E4M3` (no infinities) and `F8_E5M2` of Micikevicius et al., FP8 Formats for Deep
Learning, 2022. Of matrices [..., N, K] a `QuantTensor` holds a code per byte, and in `aux`

- `scale` float32 [..., ceil(N / n), ceil(K / k)],
- `block` int32 [2]: (n, k), the rows and columns under one scale; the last ones may be fewer.

A value is code times scale; without both every scale is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from halogen_core.spi.operations import QuantTensor, misfit

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_LARGEST = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""Codes above it (without the sign) are no numbers."""
_SLAB = 1 << 20
"""Elements looked at together."""
Scales = NDArray[np.float32]


def _table(exponent_bits: int, bias: int) -> NDArray[np.float64]:
    """The value of every code [256]."""
    code = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (code & 127) >> mantissa_bits
    fraction = code & ((1 << mantissa_bits) - 1)
    # exponent 0 is subnormal: no hidden bit, the scale of exponent 1
    whole = fraction + np.where(exponent > 0, 1 << mantissa_bits, 0)
    magnitude = np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    signed: NDArray[np.float64] = np.where(code & 128, -magnitude, magnitude)
    return signed


_VALUES = {"F8_E4M3": _table(4, 7), "F8_E5M2": _table(5, 15)}


def check_float8(tensor: QuantTensor) -> None:
    """Raises `ModelError` (HRT-2411) when codes, scales and blocks do not fit or are no numbers."""
    reason = _misfit(tensor)
    if reason is None and (_peaks(tensor) > _LARGEST[tensor.format]).any():
        reason = "it holds codes that are no numbers (NaN or infinity)"
    if reason is not None:
        raise misfit(tensor, reason)


def float8_values(tensor: QuantTensor, start: int = 0, stop: int | None = None) -> Scales:
    """Rows start to stop of a checked tensor as [rows, K] (experts one after another).

    Each value is the exact product, rounded to float32 once.
    """
    k = tensor.shape[-1]
    codes = tensor.data.reshape(-1, k)[start:stop]
    values: Scales = _VALUES[tensor.format].astype(np.float32)[codes]
    scales, (_, width) = _scales(tensor)
    for rows, matrix, line in _lines(tensor, start, start + len(codes)):
        values[rows] *= np.repeat(scales[matrix, line], width)[:k]
    return values


def float8_halves(tensor: QuantTensor, dtype: str) -> NDArray[np.uint16]:
    """All rows of a checked tensor as bits of `f16` or `bf16`: [rows, K].

    Rounded to float32, then to these; values out of range become infinite.
    """
    codes = tensor.data.reshape(-1, tensor.shape[-1])
    out = np.empty(codes.shape, np.uint16)
    scales, (_, width) = _scales(tensor)
    lines = scales.reshape(-1, scales.shape[-1])
    # a block's values are looked up in a table of its 256: fewer roundings than elements
    together = max(1, _SLAB // 256 // lines.shape[1])
    values = _VALUES[tensor.format].astype(np.float32)
    for rows, matrix, line in _lines(tensor, 0, len(codes)):
        first, own = divmod(matrix * scales.shape[1] + line, together)
        if own == 0:
            part = lines[first * together : (first + 1) * together]
            tables = _bits(values * part[..., None], dtype)
        for i, table in enumerate(tables[own]):
            columns = slice(i * width, (i + 1) * width)
            out[rows, columns] = table[codes[rows, columns]]
    return out


def float8_rounding(tensor: QuantTensor, dtype: str) -> float:
    """Largest error of a value of a checked tensor in `dtype`, f32, f16 or bf16; 0: exact.

    Relative to the value; where that is below the normal numbers, to the largest value under the
    same scale. Of all codes up to the largest that occurs there, which takes no pass over values.
    Infinite where a value is out of range.
    """
    peaks = _peaks(tensor).reshape(-1)
    scales = np.abs(_scales(tensor)[0].reshape(-1).astype(np.float64))
    step, worst = _SLAB // 128, 0.0
    for at in range(0, len(peaks), step):
        part = peaks[at : at + step, None]
        exact = _VALUES[tensor.format][:128] * scales[at : at + step, None]
        exact[np.arange(128) > part] = 0
        worst = max(worst, _error(exact, dtype))
    return worst


# ---------------------------------------------------------------- checking


def _misfit(tensor: QuantTensor) -> str | None:
    """What sizes and scales are wrong, None: nothing."""
    if len(tensor.shape) < 2 or not 0 < prod(tensor.shape) == tensor.data.size:
        return "a byte for each element of a matrix is needed"
    if set(tensor.aux) not in (set(), {"scale", "block"}):
        return "`scale` and `block` go together"
    if not tensor.aux:
        return None
    scale, block = tensor.aux["scale"], tensor.aux["block"]
    if block.shape != (2,) or (block < 1).any():
        return "a block has two sizes of at least 1"
    *lead, n, k = tensor.shape
    wanted = (*lead, -(-n // int(block[0])), -(-k // int(block[1])))
    if scale.shape != wanted:
        return f"blocks of {block.tolist()} need scales {wanted}"
    most = float(_VALUES[tensor.format][_LARGEST[tensor.format]])
    if not (np.abs(scale) <= np.finfo(np.float32).max / most).all():
        return "a scale is not finite or takes values out of float32's range"
    return None


def _peaks(tensor: QuantTensor) -> NDArray[np.uint8]:
    """The largest code without its sign under each scale, shaped like the scales [E, G, H]."""
    scales, (height, width) = _scales(tensor)
    *_, n, k = tensor.shape
    codes = tensor.data.reshape(-1, n, k)
    out = np.empty(scales.shape, np.uint8)
    lines = max(1, _SLAB // (height * k))
    for matrix, first in product(range(len(out)), range(0, scales.shape[1], lines)):
        part = codes[matrix, first * height : (first + lines) * height]
        by_row = _column_peaks(part, width)
        starts = np.arange(0, len(part), height)
        out[matrix, first : first + lines] = np.maximum.reduceat(by_row, starts, axis=0)
    return out


def _column_peaks(codes: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """The largest code without its sign in each run of `width` columns: [rows, runs]."""
    rows, k = codes.shape
    whole = k - k % width
    runs = [codes[:, :whole].reshape(rows, -1, width), codes[:, None, whole:]]
    # as unsigned the largest is a negative value's, if there are any; as signed a positive one's
    found = [(run.max(-1), run.view(np.int8).max(-1)) for run in runs if run.size]
    both = [np.maximum(np.where(u > 127, u & 127, 0), np.maximum(s, 0)) for u, s in found]
    return np.concatenate(both, axis=1).astype(np.uint8)


# ---------------------------------------------------------------- scales and blocks


def _scales(tensor: QuantTensor) -> tuple[Scales, tuple[int, int]]:
    """Scales [E, G, H] and the size of their blocks."""
    *lead, n, k = tensor.shape
    if not tensor.aux:
        return np.ones((prod(lead), 1, 1), np.float32), (n, k)
    scale, (height, width) = tensor.aux["scale"], tensor.aux["block"].tolist()
    # no block is larger than its matrix, so that few bytes cannot ask for much memory
    return scale.reshape(prod(lead), *scale.shape[-2:]), (min(height, n), min(width, k))


def _lines(tensor: QuantTensor, start: int, stop: int) -> Iterator[tuple[slice, int, int]]:
    """(rows after `start`, matrix, line of scales) of each run of rows under the same scales."""
    n, height = tensor.shape[-2], _scales(tensor)[1][0]
    row = start
    while row < stop:
        matrix, inside = divmod(row, n)
        line = inside // height
        end = min(matrix * n + min((line + 1) * height, n), stop)
        yield slice(row - start, end - start), matrix, line
        row = end


def _error(exact: NDArray[np.float64], dtype: str) -> float:
    """Of values [blocks, codes] >= 0: largest difference by the rule of `float8_rounding`."""
    single = exact.astype(np.float32)
    normal = 2.0**-14 if dtype == "f16" else 2.0**-126
    rounded = single.astype(np.float64)
    if dtype == "f16":
        rounded = _bits(single, dtype).view(np.float16).astype(np.float64)
    elif dtype == "bf16":
        rounded = (_bits(single, dtype).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    against = np.where(exact >= normal, exact, exact.max(-1, keepdims=True))
    moved = np.abs(rounded - exact)
    relative = np.divide(moved, against, out=np.zeros_like(moved), where=against > 0)
    return float(relative.max(initial=0.0))


def _bits(values: Scales, dtype: str) -> NDArray[np.uint16]:
    """Float32 to the bits of `f16` or `bf16`, to the nearest, ties to even.

    Numpy's own float16 takes 100 ns for a value below its normal range, and there are many here.
    """
    bits = values.view(np.uint32)
    if dtype == "bf16":
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return near.astype(np.uint16)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
    # at one half the step of a float32 is float16's smallest number: the addition rounds to it
    small = (np.abs(values) + np.float32(0.5)).view(np.uint32) - 0x3F000000
    half = np.where(magnitude < 113 << 23, small, np.minimum(normal, 0x7C00))
    signed: NDArray[np.uint32] = half | ((bits >> 16) & 0x8000)
    return signed.astype(np.uint16)
