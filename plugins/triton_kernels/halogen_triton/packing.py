"""From stored tensors to one weight on the device: checked, joined, laid out as an arch wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi import QuantTensor, UnsupportedOp, WeightRole, check_weight
from halogen_triton.int8 import Int8
from halogen_triton.launch import Tuning
from halogen_triton.linear import Stacked, Weight
from halogen_triton.planes import (
    GROUPED,
    PLANE_FORMATS,
    Planes,
    concatenate,
    dequantise,
    repack,
    repack_groups,
)
from halogen_triton.tiles import Tiles, tileable, tiled, untiled

PACKED_FORMATS = (*PLANE_FORMATS, "W8A8")
"""Formats that stay packed on the device; 8-bit floats become dense in the compute dtype."""
Part = Tensor | Planes | Int8
GROUP = 32
"""Kernels read 4-bit codes in blocks of so many, with one scale each."""


def check(part: QuantTensor) -> None:
    """Raises `ModelError` where a tensor is damaged, `UnsupportedOp` for groups no kernel reads."""
    check_weight(part)
    if part.format == "INT4" and (size := part.shape[-1] // part.aux["scale"].shape[-1]) % GROUP:
        raise UnsupportedOp(
            f"weight `{part.name}` of format `INT4` has groups of {size} columns; the kernels read "
            f"groups of a multiple of {GROUP}",
            fix="take a checkpoint with groups of 32, 64 or 128, or another backend",
        )


def packed_part(part: QuantTensor, device: torch.device, role: WeightRole) -> Planes | Int8:
    """One checked tensor of a `PACKED_FORMATS` format on the device."""
    raw = _on(part.data, device)
    if part.format not in (*GROUPED, "W8A8"):
        return repack(part.format, raw, part.shape)
    aux = {key: _on(value, device) for key, value in part.aux.items()}
    if part.format == "W8A8" and role is WeightRole.LINEAR:
        return Int8(raw.view(torch.int8).view(part.shape), aux["scale"].float())
    # where no kernel rounds activations they stay exact: more than was asked for
    return repack_groups("W8A16" if part.format == "W8A8" else part.format, raw, part.shape, aux)


def join(parts: Sequence[Part]) -> Tensor | Planes | Int8 | Stacked:
    """One weight of several parts, stacked by outputs: runs of one kind become one."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and _alike(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined = tuple(_concatenate(run) for run in runs)
    return joined[0] if len(joined) == 1 else Stacked(joined)


def arranged(weight: Weight, tuning: Tuning, dtype: torch.dtype) -> Weight:
    """The weight as the kernels of `tuning` want it: 4-bit planes as tiles where it has rules."""
    if "tile_gemv" not in tuning.rules or dtype not in (torch.bfloat16, torch.float16):
        return weight
    if isinstance(weight, Stacked):
        return Stacked(tuple(_tiled(part) for part in weight.parts))
    return _tiled(weight)


def values(weight: Weight) -> Tensor:
    """float32 values of a weight."""
    if isinstance(weight, Stacked):
        return torch.cat([values(part) for part in weight.parts], -2)
    if isinstance(weight, Int8):
        return weight.codes.float() * weight.scales[:, None]
    if isinstance(weight, Tiles):
        weight = untiled(weight)
    return dequantise(weight) if isinstance(weight, Planes) else weight.float()


def _tiled(part: Tensor | Planes | Tiles | Int8) -> Tensor | Planes | Tiles | Int8:
    return tiled(part) if isinstance(part, Planes) and tileable(part) else part


def _on(array: NDArray[Any], device: torch.device) -> Tensor:
    if device.type == "meta":  # shapes only: the file is not read
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return torch.empty(array.shape, dtype=kind, device=device)
    return torch.from_numpy(np.array(array)).to(device)


def _alike(one: Part, other: Part) -> bool:
    if isinstance(one, Planes) and isinstance(other, Planes):
        return one.like(other)
    return type(one) is type(other)


def _concatenate(run: list[Part]) -> Tensor | Planes | Int8:
    if len(run) == 1:
        return run[0]
    if isinstance(run[0], Planes):
        return concatenate([part for part in run if isinstance(part, Planes)])
    if isinstance(run[0], Int8):
        own = [part for part in run if isinstance(part, Int8)]
        return Int8(torch.cat([p.codes for p in own]), torch.cat([p.scales for p in own]))
    return torch.cat([part for part in run if isinstance(part, Tensor)], -2)
