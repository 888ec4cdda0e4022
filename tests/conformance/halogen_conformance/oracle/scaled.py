"""Weights with scales beside their codes, and MXFP4's blocks: making them, reading them in float64.

What an entry of `QuantTensor.aux` means is the seam's (ADR 0076). How codes become values is
written here from the formats' papers, without halogen's own readers: 8-bit floats by moving their
bits into a float16 (Micikevicius et al., FP8 Formats for Deep Learning, 2022), MXFP4 by the package
`gguf` (OCP Microscaling Formats, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import attrs
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray

from halogen_core.spi import QuantTensor

FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALED = ("INT4", "W8A16", "W8A8", "MXFP4", *FLOAT8)
"""Formats of safetensors that GGUF's table `FORMATS` does not list."""
TOKEN_ROUNDED = "W8A8"
"""The one that wants activations rounded to int8 too, a scale per token."""
WITHOUT_ZERO = 8
"""What INT4 subtracts from a code where no zeros are stored."""
MXFP4_BYTES = 17
LARGEST = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""The codes above it, without their sign, are no numbers."""
SUBNORMAL = {"F8_E4M3": 0x07, "F8_E5M2": 0x03}
"""The largest code of exponent 0."""
LOUD = {"F8_E4M3": 2.0**6, "F8_E5M2": 2.0**13}
"""Standard deviation of codes' values, so that the largest are near the end of their range."""
Codes = NDArray[np.uint8]


@attrs.frozen(kw_only=True)
class Layout:
    """How codes and scales of a weight lie; each field matters to some formats only."""

    groups: int = 0
    """INT4: groups of a row; 0: one per 32 columns."""
    zeros: bool = True
    """INT4: stored zeros, else 8 everywhere."""
    shuffled: bool = False
    """INT4: columns in an order of their own (GPTQ's act-order)."""
    block: tuple[int, int] | None = (128, 128)
    """8-bit floats: rows and columns under one scale, 0: all; None: no scales at all."""
    subnormal: bool = False
    """8-bit floats: codes of exponent 0 only."""
    single: bool = False
    """INT4 and 8-bit floats: scales of float32 that no 16 bits hold."""


PLAIN = Layout()


# ---------------------------------------------------------------- reading


def scaled_values(tensor: QuantTensor) -> NDArray[np.float64]:
    """The values a tensor of `SCALED` stands for, [*shape] float64."""
    *lead, n, k = tensor.shape
    if tensor.format == "MXFP4":
        rows = tensor.data.reshape(-1, k // 32 * MXFP4_BYTES)
        flat = gguf_dequantize(rows, GGMLQuantizationType.MXFP4)
    elif tensor.format == "INT4":
        flat = _int4(tensor.data.reshape(-1, k // 2), tensor.aux)
    elif tensor.format in FLOAT8:
        codes = float8_values(tensor.data, tensor.format).reshape(prod(lead), n, k)
        flat = codes * float8_scales(tensor.aux, (prod(lead), n, k))
    else:
        rows = tensor.data.view(np.int8).reshape(-1, k).astype(np.float64)
        flat = rows * tensor.aux["scale"].astype(np.float64).reshape(-1, 1)
    return np.asarray(flat, np.float64).reshape(tensor.shape)


def _int4(pairs: Codes, aux: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    rows, k = len(pairs), 2 * pairs.shape[1]
    codes = np.empty((rows, k))
    codes[:, 0::2], codes[:, 1::2] = pairs % 16, pairs // 16
    scale = aux["scale"].astype(np.float64).reshape(rows, -1)
    zero = aux["zero"].reshape(rows, -1) if "zero" in aux else np.full(scale.shape, WITHOUT_ZERO)
    group = np.arange(k) // (k // scale.shape[1])
    stored = scale[:, group] * (codes - zero[:, group])
    out = np.empty_like(stored)
    out[:, aux["perm"] if "perm" in aux else slice(None)] = stored
    return out


def float8_values(codes: Codes, form: str) -> NDArray[np.float64]:
    """What codes stand for without a scale; e5m2 is the upper half of a float16."""
    wide = codes.astype(np.uint16)
    if form == "F8_E5M2":
        return (wide << 8).view(np.float16).astype(np.float64)
    # the same fields one bit to the left; float16's exponent counts from 15 instead of 7
    bits = (wide & 0x80) << 8 | (wide & 0x7F) << 7
    return bits.view(np.float16).astype(np.float64) * 2.0 ** (15 - 7)


def float8_scales(
    aux: Mapping[str, NDArray[Any]], shape: tuple[int, int, int]
) -> NDArray[np.float64]:
    """The scale of each element of [E, N, K], or one for all where there are none."""
    if "scale" not in aux:
        return np.ones((1, 1, 1))
    count, n, k = shape
    height, width = (int(size) for size in aux["block"])
    scale = aux["scale"].astype(np.float64).reshape(count, -(-n // height), -(-k // width))
    return scale[:, np.arange(n)[:, None] // height, np.arange(k)[None, :] // width]


# ---------------------------------------------------------------- making


def random_scaled(
    rng: np.random.Generator, shape: tuple[int, ...], form: str, layout: Layout, std: float
) -> QuantTensor:
    """A weight of about that standard deviation, every code of its format exercised.

    Unless `layout.single`, float16 holds every scale and, of 8-bit floats, every value.
    """
    make = {"INT4": _random_int4, "MXFP4": _random_mxfp4}.get(form)
    if make is None:
        make = _random_float8 if form in FLOAT8 else _random_int8
    data, aux = make(rng, shape, form, layout, std)
    return QuantTensor(format=form, shape=shape, data=data.reshape(-1), aux=aux)


Made = tuple[Codes, dict[str, NDArray[Any]]]


def _random_int4(
    rng: np.random.Generator, shape: tuple[int, ...], form: str, layout: Layout, std: float
) -> Made:
    *lead, k = shape
    table = (*lead, layout.groups or k // 32)
    data = rng.integers(0, 256, (*lead, k // 2), dtype=np.uint8)
    # codes of 0 to 15 deviate by 4.6 from their mean
    aux: dict[str, NDArray[Any]] = {"scale": _scales(rng, table, std / 4.6, layout.single)}
    if layout.zeros:
        aux["zero"] = rng.integers(0, 16, table, dtype=np.uint8)
    if layout.shuffled:
        aux["perm"] = rng.permutation(k).astype(np.int32)
    return data, aux


def _random_int8(
    rng: np.random.Generator, shape: tuple[int, ...], form: str, layout: Layout, std: float
) -> Made:
    data = rng.integers(0, 256, shape, dtype=np.uint8)
    scale = _scales(rng, shape[:-1], std / 74, single=False)
    return data, {"scale": scale.astype(np.float32)}


def _random_mxfp4(
    rng: np.random.Generator, shape: tuple[int, ...], form: str, layout: Layout, std: float
) -> Made:
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, MXFP4_BYTES), dtype=np.uint8)
    # elements of up to 6 deviate by 2.9; a byte holds an exponent that counts from 127
    data[..., 0] = rng.integers(-2, 2, data.shape[:-1]) + 127 + round(np.log2(std / 2.9))
    return data, {}


def _random_float8(
    rng: np.random.Generator, shape: tuple[int, ...], form: str, layout: Layout, std: float
) -> Made:
    *lead, n, k = shape
    if layout.subnormal:
        data = rng.integers(0, SUBNORMAL[form] + 1, shape, dtype=np.uint8)
        data |= rng.integers(0, 2, shape, dtype=np.uint8) << 7
    else:
        data = nearest(rng.standard_normal(shape) * LOUD[form], form)
    if layout.block is None:
        return data, {}
    block = (layout.block[0] or n, layout.block[1] or k)
    table = (*lead, -(-n // block[0]), -(-k // block[1]))
    size = std / float8_values(data, form).std()
    scale = 2.0 ** (np.round(np.log2(size)) + rng.integers(-1, 2, table))
    if layout.single:
        scale = _scales(rng, table, size, single=True)
    return data, {"scale": scale.astype(np.float32), "block": np.array(block, np.int32)}


def _scales(
    rng: np.random.Generator, shape: tuple[int, ...], size: float, single: bool
) -> NDArray[Any]:
    """Around `size`: float16 as files of int4 have them, or float32."""
    return (rng.uniform(0.5, 1.5, shape) * size).astype(np.float32 if single else np.float16)


def nearest(values: NDArray[np.float64], form: str) -> Codes:
    """The codes whose values are next to `values`, the largest number for what is beyond."""
    table = float8_values(np.arange(LARGEST[form] + 1, dtype=np.uint8), form)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values)).astype(np.uint8)
    return codes | np.where(np.signbit(values), np.uint8(128), np.uint8(0))
