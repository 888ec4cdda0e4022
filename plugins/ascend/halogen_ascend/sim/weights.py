"""Packed weights: FRACTAL_NZ in the compute dtype, or int8 with a scale per output channel."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.cells import TORCH
from halogen_ascend.sim.device import SimDevice
from halogen_ascend.sim.nz import ROWS, c0, from_nz, to_nz
from halogen_ascend.sim.tasks import split
from halogen_ascend.weights.dequantize import INT8_FORMATS, dequantize, stack_int8
from halogen_core.spi import PackedWeight, QuantTensor, WeightRole

INT8_MAX = 127.0


@attrs.define(eq=False)
class Weight:
    """A [N, K] matrix on the device; `scheme` is `plain`, `W8A8` or `W8A16`."""

    device: SimDevice
    buffer: DeviceBuffer
    n: int
    k: int
    scheme: str = "plain"
    scale: DeviceBuffer | None = None
    meets: str = "f16"
    """Dtype of the activations that W8A16 codes are multiplied with."""
    _shadow: dict[tuple[int, int], torch.Tensor] = attrs.field(factory=dict)

    @property
    def itemsize(self) -> int:
        """Of what the cube multiplies: int8 only when activations are int8 too."""
        stored = 1 if self.scheme != "plain" else {"f32": 4}.get(self.buffer.dtype, 2)
        return 2 if self.scheme == "W8A16" else stored

    @property
    def accumulate(self) -> torch.dtype:
        """int8 products are summed exactly, as the cube's int32 does; float32 has 24 bits only."""
        return torch.float64 if self.scheme == "W8A8" else torch.float32

    @property
    def column_unit(self) -> int:
        return c0(1) if self.scheme != "plain" else 16

    def tile_bytes(self, n0: int, n1: int) -> int:
        """HBM bytes of columns n0 to n1, padding included."""
        size = {"f32": 4, "i8": 1}.get(self.buffer.dtype, 2)
        unit = c0(size)
        return -(-(n1 - n0) // unit) * unit * (-(-self.k // ROWS) * ROWS) * size

    def decoded(self) -> Weight:
        """Itself, with every tile's host copy made: a first use is then no slower than others."""
        for n0, n1 in split(self.n, self.device.part.cube_cores, self.column_unit):
            self.tile(n0, n1)
        return self

    def tile(self, n0: int, n1: int) -> torch.Tensor:
        """Columns n0 to n1 as [K, n1 - n0] float32; the host keeps a decoded copy, HBM does not."""
        if (found := self._shadow.get((n0, n1))) is None:
            data = self.device.read(self.buffer, "matmul", "weight")
            found = self._shadow[n0, n1] = self._decode(data, n0, n1).contiguous()
        return found

    def _decode(self, data: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        if self.buffer.layout == "nd":
            return data[n0:n1].float().T
        width = data.shape[-1]
        tiles = data[n0 // width : -(-n1 // width)].float()
        return from_nz(tiles, self.k, tiles.shape[0] * width)[:, n0 % width :][:, : n1 - n0]

    def activations(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the cube multiplies: rows in the compute dtype, or int8 and a scale per row."""
        if self.scheme != "W8A8":
            dtype = self.buffer.dtype if self.buffer.dtype != "i8" else self.meets
            return rows.to(TORCH[dtype]).float(), None
        scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / INT8_MAX
        return (rows / scales).round().clamp(-INT8_MAX, INT8_MAX), scales

    def rescale(
        self, tile: torch.Tensor, n0: int, n1: int, row_scales: torch.Tensor | None
    ) -> torch.Tensor:
        """Undo the quantisation of a product tile."""
        if self.scale is None:
            return tile
        tile = tile.float() * self.device.read(self.scale, "matmul", "scale")[n0:n1]
        return tile if row_scales is None else tile * row_scales

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` as float32, for an embedding."""
        return self.device.read(self.buffer, "embed", "table")[ids].float()

    def matrix(self) -> torch.Tensor:
        """All of it as [N, K] float32."""
        whole = self._decode(self.device.read(self.buffer, "unpack", "weight"), 0, self.n).T
        if self.scale is not None:
            whole = whole * self.device.read(self.scale, "unpack", "scale")[:, None]
        return whole.contiguous()


@attrs.frozen(eq=False)
class Experts:
    """[E, N, K] as one weight per expert."""

    each: tuple[Weight, ...]


@attrs.frozen(eq=False)
class Vector:
    """A norm, a bias or sinks, float32."""

    buffer: DeviceBuffer


def pack(
    device: SimDevice, parts: Sequence[QuantTensor], role: WeightRole, compute: str
) -> PackedWeight[DeviceBuffer]:
    """Lay parts out, stacked along the output axis. Raises `ConfigError` for what cannot be."""
    used = device.hbm.pools["static"].used
    payload, shape, layout = _pack(device, list(parts), role, compute)
    return PackedWeight(
        payload=payload,
        shape=shape,
        nbytes=device.hbm.pools["static"].used - used,
        format_id=f"ascend-sim/{layout}",
        role=role,
        parts=tuple(p.shape[0] for p in parts) if len(parts) > 1 else (),
    )


def unpack(weight: PackedWeight[DeviceBuffer]) -> np.ndarray:
    """The float32 values."""
    payload: Weight | Experts | Vector = weight.payload
    if isinstance(payload, Experts):
        return np.asarray(torch.stack([w.matrix() for w in payload.each]).numpy())
    if isinstance(payload, Vector):
        data = payload.buffer.device.read(payload.buffer, "unpack", "weight")
        return np.asarray(data.clone().numpy())
    return np.asarray(payload.matrix().numpy())


def _pack(
    device: SimDevice, parts: list[QuantTensor], role: WeightRole, compute: str
) -> tuple[Weight | Experts | Vector, tuple[int, ...], str]:
    if role in (WeightRole.NORM, WeightRole.BIAS, WeightRole.SINKS):
        values = torch.cat([dequantize(p).reshape(p.shape) for p in parts])
        return Vector(_store(device, values, "f32")), tuple(values.shape), "nd-f32"
    if role is WeightRole.EXPERTS:
        values = torch.cat([dequantize(p) for p in parts], dim=1)
        each = tuple(_plain(device, matrix, compute) for matrix in values)
        return Experts(each), tuple(values.shape), f"nz-{compute}"
    if INT8_FORMATS.intersection(p.format for p in parts):
        return _int8(device, parts, compute)
    values = torch.cat([dequantize(p) for p in parts])
    if role is WeightRole.EMBEDDING:
        buffer = _store(device, values, compute)
        return Weight(device, buffer, *values.shape), tuple(values.shape), f"nd-{compute}"
    return _plain(device, values, compute), tuple(values.shape), f"nz-{compute}"


def _plain(device: SimDevice, values: torch.Tensor, compute: str) -> Weight:
    n, k = values.shape
    tiles = to_nz(values.T.to(TORCH[compute]))
    return Weight(device, _store(device, tiles, compute, layout="nz"), n, k).decoded()


def _int8(
    device: SimDevice, parts: list[QuantTensor], compute: str
) -> tuple[Weight, tuple[int, ...], str]:
    scheme, values, scales = stack_int8(parts)
    n, k = values.shape
    if (scheme, compute) == ("W8A16", "f32"):
        # the operator takes activations of 16 bits only
        plain = values.float() * scales[:, None]
        return _plain(device, plain, compute), (n, k), f"nz-{compute}"
    buffer = _store(device, to_nz(values.T), "i8", layout="nz")
    scale = _store(device, scales, "f32")
    weight = Weight(device, buffer, n, k, scheme, scale, compute).decoded()
    return weight, (n, k), f"nz-{scheme}"


def _store(
    device: SimDevice, values: torch.Tensor, dtype: str, *, layout: str = "nd"
) -> DeviceBuffer:
    buffer = device.empty(tuple(values.shape), dtype, pool="static", layout=layout)
    device.write(buffer, "pack").copy_(values)
    buffer.allocation.ticket = ("", 0)
    return buffer
