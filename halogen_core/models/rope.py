"""Rotary embedding from hyper-parameters: every scaling ends up in `inv_freq`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halogen_core.errors import ModelError
from halogen_core.spi import Checkpoint, RopeSpec, RopeStyle

_SCALINGS = ("none", "linear", "yarn")


def rope_spec(checkpoint: Checkpoint, head_dim: int) -> RopeSpec:
    """The checkpoint's own rotation (its global one, where layers differ)."""
    h = checkpoint.hparams
    dim = int(h.get("rope.dimension_count", head_dim))
    base = float(h.get("rope.freq_base", 10000.0))
    inv_freq, attention_factor = _scaled(base ** -(np.arange(0, dim, 2) / dim), base, dim, h)
    if "rope_freqs.weight" in checkpoint.names():
        inv_freq = inv_freq / _frequency_factors(checkpoint)
    return _spec(inv_freq, checkpoint.rope_style, attention_factor)


def plain_rope_spec(base: float, dim: int, style: RopeStyle) -> RopeSpec:
    """An unscaled rotation, as of Gemma 3's sliding-window layers."""
    return _spec(base ** -(np.arange(0, dim, 2) / dim), style, 1.0)


def _spec(inv_freq: NDArray[np.float64], style: RopeStyle, attention_factor: float) -> RopeSpec:
    return RopeSpec(
        dim=2 * len(inv_freq),
        inv_freq=tuple(inv_freq.tolist()),
        style=style,
        attention_factor=attention_factor,
    )


def _scaled(
    inv_freq: NDArray[np.float64], base: float, dim: int, h: Mapping[str, Any]
) -> tuple[NDArray[np.float64], float]:
    factor = float(h.get("rope.scaling.factor", h.get("rope.scale_linear", 1.0)) or 1.0)
    kind = h.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind == "none" or factor == 1.0:
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / factor, 1.0
    if kind == "yarn":
        return _yarn(inv_freq, base, dim, factor, h)
    raise ModelError(
        f"rope scaling is `{kind}`; known are {', '.join(_SCALINGS)}",
        code="HRT-2401",
        fix="use a model without it, or a newer halogen",
    )


def _yarn(
    inv_freq: NDArray[np.float64], base: float, dim: int, factor: float, h: Mapping[str, Any]
) -> tuple[NDArray[np.float64], float]:
    """YaRN (Peng et al., 2023): interpolate slow dimensions, keep fast ones, ramp between."""
    original = float(h.get("rope.scaling.original_context_length", h.get("context_length", 4096)))

    def turns_at(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_at(float(h.get("rope.scaling.yarn_beta_fast", 32.0)))), 0)
    high = min(math.ceil(turns_at(float(h.get("rope.scaling.yarn_beta_slow", 1.0)))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled = inv_freq / factor * ramp + inv_freq * (1.0 - ramp)
    attention = float(h.get("rope.scaling.attn_factor", 1.0))
    return scaled, attention * (0.1 * math.log(factor) + 1.0)


def _frequency_factors(checkpoint: Checkpoint) -> NDArray[np.float64]:
    """Per-dimension divisors (Llama 3.1), stored as float32."""
    tensor = checkpoint.tensor("rope_freqs.weight")
    if tensor.format != "F32":
        raise ModelError(
            f"`rope_freqs.weight` is stored as {tensor.format}; F32 is needed", code="HRT-2402"
        )
    return tensor.data.view(np.float32).astype(np.float64)
