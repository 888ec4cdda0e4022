"""Rope scaling, folded into frequencies: none, linear, Llama 3 divisors, YaRN."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from halogen_core.errors import ModelError
from halogen_core.models.hparams import HParams
from halogen_core.spi import RopeSpec

_DIVISORS = "rope_freqs.weight"


def rope_spec(
    hparams: HParams, head_dim: int, *, base: float | None = None, scaled: bool = True
) -> RopeSpec:
    """The rotation of one kind of layer; `scaled` False leaves the file's scaling out."""
    dim = hparams.integer("rope.dimension_count", head_dim)
    if not 0 < dim <= head_dim or dim % 2:
        raise ModelError(
            f"`rope.dimension_count` is {dim}; it must be even and at most the head dim {head_dim}",
            code="HRT-2403",
            fix="fetch or convert the file again",
        )
    if base is None:
        base = hparams.number("rope.freq_base", 10000.0)
    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    factor = 1.0
    if scaled:
        frequencies, factor = _scale(hparams, frequencies, base)
    return RopeSpec(
        dim=dim,
        inv_freq=tuple(frequencies.tolist()),
        style=hparams.checkpoint.rope_style,
        attention_factor=factor,
    )


def _scale(
    hparams: HParams, frequencies: NDArray[np.float64], base: float
) -> tuple[NDArray[np.float64], float]:
    """Frequencies and attention factor as the file scales them."""
    if hparams.has_tensor(_DIVISORS):
        divisors = hparams.tensor(_DIVISORS, (len(frequencies),))
        frequencies = frequencies / divisors.data.view(np.float32).astype(np.float64)
    old_factor = hparams.number("rope.scale_linear", 1.0)
    factor = hparams.number("rope.scaling.factor", old_factor) or 1.0
    kind = hparams.text("rope.scaling.type", "linear")
    if kind == "none" or factor == 1.0:
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "yarn":
        return _yarn(hparams, frequencies, base, factor)
    raise ModelError(
        f"`rope.scaling.type` is `{kind}`; supported are none, linear and yarn, and "
        f"Llama 3's divisors in `{_DIVISORS}`",
        code="HRT-2406",
        fix="choose another model",
    )


def _yarn(
    hparams: HParams, frequencies: NDArray[np.float64], base: float, factor: float
) -> tuple[NDArray[np.float64], float]:
    """YaRN (Peng et al., 2023): a ramp over dimensions, and warmer attention."""
    dim = 2 * len(frequencies)
    key = "rope.scaling.original_context_length"
    original = hparams.integer(key, hparams.integer("context_length"))

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    fast = hparams.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = hparams.number("rope.scaling.yarn_beta_slow", 1.0)
    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    scaled = ramp * frequencies / factor + (1 - ramp) * frequencies
    warmth = hparams.number("rope.scaling.attn_factor", 1.0)
    return scaled, warmth * (1 + 0.1 * math.log(factor))
