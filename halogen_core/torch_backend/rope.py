"""Rotary position embedding (Su et al., RoFormer, 2021) in both pairings."""

from __future__ import annotations

import torch
from torch import Tensor

from halogen_core.spi.operations import RopeSpec, RopeStyle


def rope_tables(positions: Tensor, spec: RopeSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin for positions [T], ready to multiply: each [T, 1, dim].

    Both are laid out as the elements of a head are, the sine with the sign of the rotation, so
    that rotating is `x * cos + swap(x) * sin`. Angles are float64: at position 100,000 a float32
    angle is off by 0.004.
    """
    frequencies = torch.tensor(spec.inv_freq, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64).unsqueeze(1) * frequencies
    cos, sin = angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor
    if spec.style is RopeStyle.NEOX:
        cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    else:
        cos = torch.stack((cos, cos), 2).flatten(1)
        sin = torch.stack((-sin, sin), 2).flatten(1)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(heads: Tensor, tables: tuple[Tensor, Tensor], spec: RopeSpec) -> Tensor:
    """Heads [T, heads, D] with the first `spec.dim` elements rotated, as a new tensor."""
    cos, sin = tables
    turning = heads if spec.dim == heads.shape[2] else heads[..., : spec.dim]
    if spec.style is RopeStyle.NEOX:
        swapped = turning.roll(spec.dim // 2, dims=-1)
    else:
        swapped = turning.view(*turning.shape[:-1], -1, 2).flip(-1).flatten(-2)
    turned = torch.addcmul(turning * cos, swapped, sin)
    if spec.dim == heads.shape[2]:
        return turned
    return torch.cat((turned, heads[..., spec.dim :]), dim=-1)
