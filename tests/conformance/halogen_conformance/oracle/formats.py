"""Weights in stored formats: making them, and reading them back in float64.

Values of GGUF's formats come from the numpy package `gguf`, which shares no code with halogen;
those with scales beside their codes from `scaled`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from numpy.typing import NDArray

from halogen_conformance.oracle.scaled import (
    FLOAT8,
    PLAIN,
    SCALED,
    Layout,
    random_scaled,
    scaled_values,
)
from halogen_core.spi import FORMATS, QuantTensor

ALL = (*FORMATS, *SCALED)
"""Every format that the suite knows."""
DENSE = ("F32", "F16", "BF16")
"""Formats that are no quantisation."""
FLOATS = (*DENSE, *FLOAT8)
"""Formats before which no activation is rounded, whatever the backend declares (ADR 0076)."""
SCALE_BYTES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block keeps float16 scales, for formats that `gguf` cannot quantise."""


def values_of(tensor: QuantTensor) -> NDArray[np.float64]:
    """The values a tensor stands for, [*shape] float64."""
    if tensor.format in SCALED:
        return scaled_values(tensor)
    form = FORMATS[tensor.format]
    if tensor.format == "F32":
        flat = tensor.data.view(np.float32)
    elif tensor.format == "F16":
        flat = tensor.data.view(np.float16)
    else:
        rows = tensor.data.reshape(prod(tensor.shape[:-1]), -1)
        flat = gguf_dequantize(rows, GGMLQuantizationType(form.ggml_type))
    return np.asarray(flat, np.float64).reshape(tensor.shape)


def stored(values: NDArray[Any], form: str, name: str = "") -> QuantTensor:
    """`values` quantised into format `form` (not the K formats: see `random_tensor`)."""
    if form in SCALE_BYTES:
        raise ValueError(f"format `{form}` can only be made at random")
    single = np.ascontiguousarray(values, np.float32)
    if form == "F32":
        data = single.view(np.uint8)
    elif form == "F16":
        data = single.astype(np.float16).view(np.uint8)
    else:
        rows = single.reshape(-1, single.shape[-1])
        data = gguf_quantize(rows, GGMLQuantizationType(FORMATS[form].ggml_type)).view(np.uint8)
    return QuantTensor(format=form, shape=single.shape, data=data.reshape(-1), name=name)


def random_tensor(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    form: str,
    *,
    std: float = 0.05,
    layout: Layout = PLAIN,
) -> QuantTensor:
    """A weight of about that standard deviation, every bit of its blocks exercised."""
    if form in SCALED:
        return random_scaled(rng, shape, form, layout, std)
    if form not in SCALE_BYTES:
        return stored(rng.standard_normal(shape) * std, form)
    block = FORMATS[form]
    count = prod(shape) // block.block
    raw = rng.integers(0, 256, (count, block.bytes), dtype=np.uint8)
    step = {"Q4_K": 2.0**-10, "Q5_K": 2.0**-11, "Q6_K": 2.0**-16}[form] * std / 0.1
    for at in SCALE_BYTES[form]:
        scales = (rng.uniform(0.5, 1.5, count) * step).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return QuantTensor(format=form, shape=shape, data=raw.reshape(-1))
