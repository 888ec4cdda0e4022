"""Int8 weights in a directory of safetensors: values of type I8, scales in a file beside them.

`config.json` says under `halogen_int8` which tensor is `W8A8` (activations are quantised per token
too) or `W8A16`; `int8_scales.safetensors` holds a float32 scale per output channel, same keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.loader.failures import damaged
from halogen_core.loader.safetensors import read_safetensors
from halogen_core.spi.arrays import Float32
from halogen_core.spi.model import Checkpoint
from halogen_core.spi.operations import QuantTensor, RopeStyle

CONFIG_KEY = "halogen_int8"
SCALES_FILE = "int8_scales.safetensors"
SCHEMES = ("W8A8", "W8A16")
_LEVELS = np.float32(127)


@attrs.frozen(eq=False)
class Int8:
    """How one tensor was quantised."""

    scheme: str
    scale: Float32
    """[N], one per output channel"""


def quantize_rows(values: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Round to nearest, symmetric, a scale per row of values [N, K]."""
    largest = np.abs(values).max(-1)
    scale = np.maximum(largest / _LEVELS, np.float32(1e-30)).astype(np.float32)
    rounded = np.rint(values / scale[:, None]).clip(-127, 127)
    return rounded.astype(np.int8), scale


def signal_to_noise(values: Float32, rounded: NDArray[np.int8], scale: Float32) -> float:
    """Decibels of the values over the rounding's error."""
    error = values - rounded.astype(np.float32) * scale[:, None]
    noise = float(np.square(error, dtype=np.float64).sum())
    signal = float(np.square(values, dtype=np.float64).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10(max(signal, 1e-300) / noise))


def read_int8(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Int8]:
    """What `config` says of int8 tensors, with their scales; raises `ModelError`."""
    schemes = config.get(CONFIG_KEY, {})
    if not schemes:
        return {}
    file = read_safetensors(directory / SCALES_FILE)
    found = {}
    for key, scheme in schemes.items():
        if scheme not in SCHEMES or key not in file.tensors:
            raise damaged(
                directory / SCALES_FILE,
                f"tensor `{key}` is `{scheme}` (known: {', '.join(SCHEMES)}) and "
                f"{'has' if key in file.tensors else 'lacks'} a scale",
            )
        found[key] = Int8(scheme, file.view(key).view(np.float32))
    return found


@attrs.frozen(eq=False)
class PlainCheckpoint:
    """A checkpoint whose int8 tensors are given as float32, for backends that know none."""

    stored: Checkpoint

    @property
    def path(self) -> str:
        return self.stored.path

    @property
    def architecture(self) -> str:
        return self.stored.architecture

    @property
    def hparams(self) -> Mapping[str, Any]:
        return self.stored.hparams

    @property
    def rope_style(self) -> RopeStyle:
        return self.stored.rope_style

    @property
    def content_id(self) -> str:
        return f"{self.stored.content_id}-plain"

    def names(self) -> Collection[str]:
        return self.stored.names()

    def tensor(self, name: str) -> QuantTensor:
        tensor = self.stored.tensor(name)
        if tensor.format not in SCHEMES:
            return tensor
        rows = tensor.data.view(np.int8).reshape(tensor.shape).astype(np.float32)
        values = rows * tensor.aux["scale"][:, None]
        return attrs.evolve(tensor, format="F32", data=values.reshape(-1).view(np.uint8), aux={})
