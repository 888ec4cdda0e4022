"""Weights with scales beside their codes (INT4, int8, fp8) and MXFP4, in formats of ggml's.

| from | to | exact |
|---|---|---|
| INT4, zero 8 everywhere | Q4_0 | but for scales that float16 does not hold |
| INT4 with zeros | Q5_0: code - zero has 5 bits (Q4_1 would round the minimum) | as above |
| W8A8, W8A16 | Q8_0, a row's scale in each of its blocks | as above |
| MXFP4 | Q5_0 of twice the elements, half the scale | yes |
| F8_E4M3, F8_E5M2 | F16 or BF16, if it holds every value: scales of few bits | yes |
| the same, other scales | F16 | within 2^-11 |
| any, where rows, groups or scales do not fit that | F32 | to float32 |

How far values moved is measured and said, never assumed.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import (
    FLOAT8,
    FORMATS,
    ConfigError,
    QuantTensor,
    check_float8,
    float8_halves,
    float8_rounding,
    float8_values,
)

REBLOCKED = ("INT4", "W8A8", "W8A16", "MXFP4")
FOREIGN = (*REBLOCKED, *FLOAT8)
BLOCK = 32
ROUNDING = 2.0**-11
"""Largest relative error of a float16 that is not subnormal."""
MXFP4_BYTES = 17
E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
Array = NDArray[Any]


@attrs.frozen(eq=False)
class Reblocked:
    """A weight in one of ggml's formats."""

    tensor: QuantTensor
    error: float
    """Largest relative difference of a value from the checkpoint's; 0: exact."""
    perm: NDArray[np.int32] | None = None
    """Column j of the tensor multiplies input perm[j]; None: input j."""


@attrs.frozen(eq=False)
class _Scaled:
    """Values codes [rows, K] times scale [rows, G], G groups of neighbours."""

    codes: NDArray[np.int8]
    scale: Array

    def floats(self) -> NDArray[np.float32]:
        """[rows, K], rounded to float32 once."""
        rows, k = self.codes.shape
        grouped = self.codes.reshape(rows, self.scale.shape[1], -1).astype(np.float64)
        return (grouped * self.scale[..., None]).astype(np.float32).reshape(rows, k)


def reblocked(tensor: QuantTensor) -> Reblocked:
    """`tensor` of a foreign format in one of ggml's.

    Raises ConfigError (HRT-3610) when its arrays do not fit each other, of 8-bit floats ModelError.
    """
    if tensor.format in FLOAT8:
        return _float8(tensor)
    try:
        scaled, form = _READERS[tensor.format](tensor)
    except (KeyError, ValueError, IndexError) as exc:
        raise ConfigError(
            f"weight `{tensor.name}` of format {tensor.format} and shape {tensor.shape} has "
            f"{tensor.data.nbytes} bytes and { {k: v.shape for k, v in tensor.aux.items()} }, "
            "which do not fit each other",
            code="HRT-3610",
            fix="the file is damaged; fetch or convert it again",
        ) from exc
    half, error = _float16(scaled.scale)
    perm = _order(tensor)
    if error > ROUNDING or (scaled.codes.shape[1] // scaled.scale.shape[1]) % BLOCK:
        values = scaled.floats()
        return Reblocked(_as(tensor, "F32", values.view(np.uint8)), 0.0, perm)
    per_block = np.repeat(half, scaled.codes.shape[1] // half.shape[1] // BLOCK, axis=1)
    blocks = _BLOCKS[form](scaled.codes.reshape(-1, BLOCK))
    data = np.concatenate([per_block.reshape(-1, 1).view(np.uint8), blocks], axis=1)
    return Reblocked(_as(tensor, form, data), error, perm)


def _as(tensor: QuantTensor, form: str, data: NDArray[np.uint8]) -> QuantTensor:
    data = np.ascontiguousarray(data).reshape(-1)
    return QuantTensor(format=form, shape=tensor.shape, data=data, name=tensor.name)


def _float16(scale: Array) -> tuple[NDArray[np.float16], float]:
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    wide = scale.astype(np.float64)
    moved = np.abs(half.astype(np.float64) - wide)
    relative = np.divide(moved, np.abs(wide), out=np.zeros_like(wide), where=wide != 0)
    return half, float(relative.max(initial=0.0))


def _order(tensor: QuantTensor) -> NDArray[np.int32] | None:
    perm = tensor.aux.get("perm")
    if perm is None:
        return None
    if not np.array_equal(np.sort(perm), np.arange(tensor.shape[-1])):
        raise ConfigError(f"`perm` of weight `{tensor.name}` is no order", code="HRT-3610")
    return np.ascontiguousarray(perm, np.int32)


# ---------------------------------------------------------------- reading


def _rows(tensor: QuantTensor) -> int:
    return math.prod(tensor.shape[:-1])


def _int4(tensor: QuantTensor) -> tuple[_Scaled, str]:
    rows, k = _rows(tensor), tensor.shape[-1]
    pairs = tensor.data.reshape(rows, k // 2)
    scale = tensor.aux["scale"].reshape(rows, -1)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, scale.shape[1], -1)
    zero = tensor.aux["zero"].reshape(rows, -1, 1) if "zero" in tensor.aux else np.uint8(8)
    # a broadcast that fits by accident would be wrong: sizes must match
    if codes.size != rows * k or np.size(zero) not in (1, scale.size):
        raise ValueError("groups")
    signed = (codes.astype(np.int8) - zero.astype(np.int8)).reshape(rows, k)
    return _Scaled(signed, scale), "Q5_0" if "zero" in tensor.aux else "Q4_0"


def _int8(tensor: QuantTensor) -> tuple[_Scaled, str]:
    codes = tensor.data.view(np.int8).reshape(_rows(tensor), tensor.shape[-1])
    return _Scaled(codes, tensor.aux["scale"].reshape(len(codes), 1)), "Q8_0"


def _mxfp4(tensor: QuantTensor) -> tuple[_Scaled, str]:
    blocks = tensor.data.reshape(_rows(tensor), -1, MXFP4_BYTES)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    if codes[0].size != tensor.shape[-1]:
        raise ValueError("blocks")
    scale = np.ldexp(1.0, blocks[..., 0].astype(np.int32) - 128)
    return _Scaled(E2M1_TWICE[codes].reshape(len(blocks), -1), scale), "Q5_0"


_READERS = {"INT4": _int4, "W8A8": _int8, "W8A16": _int8, "MXFP4": _mxfp4}


# ---------------------------------------------------------------- writing: [n, 32] to bytes


def _halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Elements j and j + 16 in the nibbles of byte j."""
    low, high = codes[:, :16] & 15, codes[:, 16:] & 15
    return low | high << 4


def _q4_0(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    return _halves((codes + 8).view(np.uint8))


def _q5_0(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    unsigned = (codes + 16).view(np.uint8)
    fifth = np.packbits(unsigned >> 4, axis=1, bitorder="little")
    return np.concatenate([fifth, _halves(unsigned)], axis=1)


def _q8_0(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    return codes.view(np.uint8)


_BLOCKS = {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0}
assert set(_BLOCKS) < set(FORMATS)


# ---------------------------------------------------------------- 8-bit floats


def _float8(tensor: QuantTensor) -> Reblocked:
    """Without blocks: no format of ggml's has a float of 8 bits, so each value becomes one of 16.

    Raises ModelError (HRT-2411) when its arrays do not fit each other or hold no numbers.
    """
    check_float8(tensor)
    errors = {form: float8_rounding(tensor, form.lower()) for form in ("F16", "BF16", "F32")}
    exact = [form for form in ("F16", "BF16") if errors[form] == 0]
    near = "F16" if errors["F16"] <= ROUNDING else "F32"
    form = exact[0] if exact else near
    values = float8_values(tensor) if form == "F32" else float8_halves(tensor, form.lower())
    return Reblocked(_as(tensor, form, values.view(np.uint8)), errors[form])
