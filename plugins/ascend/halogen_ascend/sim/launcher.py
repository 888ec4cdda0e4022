"""What every group of ops shares: reading arguments, new results, rows over vector cores."""

from __future__ import annotations

import attrs
import torch

from halogen_ascend.sim import vector
from halogen_ascend.sim.buffer import ITEMSIZE, DeviceBuffer
from halogen_ascend.sim.device import SimDevice
from halogen_ascend.sim.tasks import Program
from halogen_ascend.sim.weights import Vector
from halogen_core.spi import PackedWeight, StepMeta, UnsupportedOp

Packed = PackedWeight[DeviceBuffer]
Meta = StepMeta[DeviceBuffer]


@attrs.define(eq=False, slots=False)
class Launcher:
    """A device and the dtype of activations."""

    device: SimDevice
    compute: str

    def rows(self, op: str, rows: int, row: int, work: vector.RowWork, *, hbm: int = 0) -> Program:
        return vector.by_rows(op, rows, row, work, part=self.device.part, hbm_bytes=hbm)

    def read(self, buffer: DeviceBuffer, op: str, argument: str) -> torch.Tensor:
        return self.device.read(buffer, op, argument)

    def vector(self, packed: Packed, op: str) -> torch.Tensor:
        if not isinstance(packed.payload, Vector):
            raise UnsupportedOp(
                f"`{op}` wants a norm, bias or sinks weight, got role `{packed.role}`",
                fix="pack it with its own role",
            )
        return self.device.read(packed.payload.buffer, op, "weight")

    def optional(self, packed: Packed | None, op: str) -> torch.Tensor | None:
        """A norm, a bias or sinks where the layer has them."""
        return None if packed is None else self.vector(packed, op)

    def new(self, *shape: int) -> DeviceBuffer:
        return self.device.empty(tuple(shape), self.compute)


def row_bytes(buffer: DeviceBuffer) -> int:
    return buffer.shape[-1] * ITEMSIZE[buffer.dtype]
