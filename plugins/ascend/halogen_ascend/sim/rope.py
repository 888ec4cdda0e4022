"""Rotary tables on the device: one row per position, rows aligned, and the rotation itself."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.device import SimDevice
from halogen_core.spi import RopeSpec, RopeStyle

STEP = 2048


@attrs.define(eq=False)
class RopeTables:
    """cos and sin by position, float32, padded to rows of whole `align` bytes; grows in steps."""

    device: SimDevice
    align: int
    _tables: dict[RopeSpec, DeviceBuffer] = attrs.field(factory=dict)

    def table(self, spec: RopeSpec, positions: int) -> DeviceBuffer:
        """The table of `spec` for at least `positions` positions: [P, row] float32."""
        found = self._tables.get(spec)
        if found is None or found.shape[0] < positions:
            found = self._tables[spec] = self._build(spec, -(-positions // STEP) * STEP)
        return found

    def _build(self, spec: RopeSpec, positions: int) -> DeviceBuffer:
        angles = np.outer(np.arange(positions), np.asarray(spec.inv_freq, dtype=np.float64))
        values = np.concatenate([np.cos(angles), np.sin(angles)], 1) * spec.attention_factor
        row = -(-values.shape[1] * 4 // self.align) * self.align // 4
        padded = np.zeros((positions, row), dtype=np.float32)
        padded[:, : values.shape[1]] = values
        return self.device.copy_in(padded, pool="static")


def rotate(x: torch.Tensor, table: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Rotate the first `dim` elements of x [T, H, D] float32; table [T, row] of its positions."""
    half = len(spec.inv_freq)
    cos, sin = table[:, None, :half], table[:, None, half : 2 * half]
    turned, rest = x[..., : spec.dim], x[..., spec.dim :]
    if spec.style is RopeStyle.NEOX:
        a, b = turned[..., :half], turned[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([pairs.flatten(-2), rest], -1)
