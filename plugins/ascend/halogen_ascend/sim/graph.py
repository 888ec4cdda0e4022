"""Captured decode steps: one launch per replay, host arguments given anew, padding inert.

Like an ACL graph of decode steps only: the batch is padded to a bucket, padding rows read and
write the trash block. Host lists (lengths, tables, sampling) are baked at capture on the real
device, so each replay updates them; a replay without is an error, never a stale answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import numpy as np

from halogen_ascend.buckets import Buckets
from halogen_ascend.padding import STEP_ARRAYS, TrashBlock, pad
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.device import Recorded, SimDevice
from halogen_ascend.sim.queues import CopyQueue, SlotRing, host_like
from halogen_core.spi import Sampled, StepBatch, StepMeta

STAGES = 2
"""Sets of host memory that steps are copied from: one is filled while the other is read."""


@attrs.define(eq=False)
class StepInputs:
    """The device side of a step's host arrays."""

    device: SimDevice
    buffers: dict[str, DeviceBuffer]
    _staged: list[dict[str, np.ndarray]] = attrs.field(factory=list, init=False)
    """Host memory that copies read from, a slot of the ring each."""
    _copies: CopyQueue = attrs.field(init=False)
    _ring: SlotRing = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._copies, self._ring = CopyQueue(self.device), SlotRing(STAGES)

    @classmethod
    def upload(cls, device: SimDevice, batch: StepBatch) -> StepInputs:
        """New buffers with the batch's contents."""
        return cls(device, {name: device.copy_in(getattr(batch, name)) for name in STEP_ARRAYS})

    def refill(self, batch: StepBatch) -> None:
        """The same buffers with another batch of the same shape, by the copy queue."""
        if not self._staged:
            arrays = {name: getattr(batch, name) for name in self.buffers}
            self._staged = [
                {name: host_like(array) for name, array in arrays.items()} for _ in range(STAGES)
            ]
        slot = self._ring.take(self._copies)
        for name, buffer in self.buffers.items():
            staged = self._staged[slot][name]
            staged[...] = getattr(batch, name)
            event = self._copies.upload(buffer, staged)
        self._ring.put(slot, event)
        self._copies.wait(event)

    def meta(self, batch: StepBatch) -> StepMeta[DeviceBuffer]:
        return StepMeta(host=batch, sampling=None, **self.buffers)


@attrs.define(eq=False)
class SimReplay:
    """A captured step."""

    device: SimDevice
    buckets: Buckets
    size: int
    inputs: StepInputs
    tasks: list[Recorded]
    made: Sampled[DeviceBuffer]
    trash: TrashBlock

    def __call__(self, batch: StepBatch) -> Sampled[DeviceBuffer]:
        padded = pad(batch, self.size, self.trash)
        self.inputs.refill(padded)
        self.device.replay(self.tasks, padded)
        self.buckets.replays += 1
        return _first_rows(self.made, batch.num_sequences)


def capture(
    device: SimDevice,
    buckets: Buckets,
    step: Callable[[StepMeta[DeviceBuffer]], Sampled[DeviceBuffer]],
    batch: StepBatch,
    trash: TrashBlock,
) -> SimReplay | None:
    """Record `step` on the padded batch; None for a batch that no bucket serves.

    Recording runs the step once, on the batch's own tokens, so nothing foreign is written.
    """
    if buckets.key(batch) is None or (size := buckets.size(batch.num_sequences)) is None:
        return None
    padded = pad(batch, size, trash)
    with device.capture() as tasks:
        inputs = StepInputs.upload(device, padded)
        made = step(inputs.meta(padded))
    return SimReplay(device, buckets, size, inputs, tasks, made, trash)


def _first_rows(made: Sampled[DeviceBuffer], count: int) -> Sampled[DeviceBuffer]:
    fields: Iterable[str] = ("token_ids", "logprobs", "top_ids", "top_logprobs")
    rows = {name: getattr(made, name) for name in fields}
    return Sampled(**{n: b if b is None else b.rows(0, count) for n, b in rows.items()})
