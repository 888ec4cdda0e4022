"""Stored formats to float32, and the two int8 formats of ours taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import gguf
import numpy as np
import torch

from halogen_core.spi import (
    FLOAT8,
    FORMATS,
    ConfigError,
    QuantTensor,
    check_float8,
    float8_values,
)

INT8_FORMATS = frozenset({"W8A8", "W8A16"})


def _check_size(tensor: QuantTensor) -> None:
    form = FORMATS.get(tensor.format)
    if form is None and tensor.format not in INT8_FORMATS:
        raise ConfigError(
            f"weight format `{tensor.format}` of `{tensor.name}` is unknown; "
            f"known: {', '.join([*FORMATS, *sorted(INT8_FORMATS), *FLOAT8])}",
            code="HRT-7107",
            fix="convert the model to one of these",
        )
    block, size = (form.block, form.bytes) if form else (1, 1)
    expected = prod(tensor.shape) // block * size
    if tensor.shape[-1] % block or tensor.data.nbytes != expected:
        raise ConfigError(
            f"`{tensor.name}` of format {tensor.format} and shape {tensor.shape} has "
            f"{tensor.data.nbytes} bytes, expected {expected} in rows of whole {block}-blocks",
            code="HRT-7107",
            fix="the file is damaged; fetch or convert it again",
        )


def int8_parts(tensor: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values int8 [..., N, K] and scales float32 [..., N] of a `W8A8` or `W8A16` tensor."""
    _check_size(tensor)
    if "scale" not in tensor.aux or tensor.aux["scale"].shape != tensor.shape[:-1]:
        raise ConfigError(
            f"`{tensor.name}` is {tensor.format} without a scale for each of its "
            f"{prod(tensor.shape[:-1])} output channels",
            code="HRT-7107",
            fix="convert the model again",
        )
    values = torch.from_numpy(tensor.data.view(np.int8).reshape(tensor.shape).copy())
    return values, torch.from_numpy(tensor.aux["scale"].astype(np.float32))


def stack_int8(parts: Sequence[QuantTensor]) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Scheme, values int8 [N, K] and scales float32 [N] of parts stacked along the outputs.

    Raises `ConfigError` (HRT-7106) when their formats differ: they are one weight on the device.
    """
    formats = sorted({p.format for p in parts})
    if len(formats) > 1:
        raise ConfigError(
            f"parts of one weight have formats {', '.join(formats)}; they must agree",
            code="HRT-7106",
            fix="give Q, K and V (gate and up) the same entry in the quant config",
        )
    pairs = [int8_parts(p) for p in parts]
    return formats[0], torch.cat([v for v, _ in pairs]), torch.cat([s for _, s in pairs])


def dequantize(tensor: QuantTensor) -> torch.Tensor:
    """The float32 values, in the tensor's logical shape.

    Raises ConfigError (HRT-7107) where its bytes do not fit, of 8-bit floats ModelError (HRT-2411).
    """
    if tensor.format in FLOAT8:
        check_float8(tensor)
        return torch.from_numpy(float8_values(tensor).reshape(tensor.shape))
    if tensor.format in INT8_FORMATS:
        values, scales = int8_parts(tensor)
        return values.float() * scales[..., None]
    _check_size(tensor)
    plain = {"F32": np.float32, "F16": np.float16}
    if tensor.format in plain:
        floats = tensor.data.view(plain[tensor.format]).astype(np.float32)
        return torch.from_numpy(floats.reshape(tensor.shape))
    form = FORMATS[tensor.format]
    assert form.ggml_type is not None
    kind = gguf.GGMLQuantizationType(form.ggml_type)
    rows = tensor.data.reshape(-1, form.nbytes(tensor.shape[-1]))
    return torch.from_numpy(gguf.dequantize(rows, kind).reshape(tensor.shape).copy())
