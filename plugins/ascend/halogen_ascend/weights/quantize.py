"""Round-to-nearest int8 with a scale per output channel, and how far that is from the original."""

from __future__ import annotations

import numpy as np
import torch

from halogen_ascend.weights.dequantize import dequantize
from halogen_core.spi import QuantTensor

LEVELS = 127.0


def quantize_rows(tensor: QuantTensor, scheme: str) -> QuantTensor:
    """`tensor` [N, K] as `W8A8` or `W8A16`: symmetric, one scale per row."""
    values = dequantize(tensor)
    scale = values.abs().amax(-1).clamp_min(1e-30) / LEVELS
    rows = (values / scale.unsqueeze(-1)).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    return QuantTensor(
        format=scheme,
        shape=tensor.shape,
        data=rows.numpy().reshape(-1).view(np.uint8),
        name=tensor.name,
        aux={"scale": scale.numpy()},
    )


def signal_to_noise(original: QuantTensor, quantized: QuantTensor) -> float:
    """Decibels of signal over rounding error."""
    a, b = dequantize(original), dequantize(quantized)
    noise = float((a - b).square().sum())
    return float("inf") if noise == 0 else 10 * np.log10(float(a.square().sum()) / noise)
