"""The simulated device: memory with contents, queues, a clock of its own, and strictness.

Data of a buffer lives in the device's cells under its address; kernels get at it through `read`
and `write` only, which check life, poison and queue. Work is computed when submitted, but a host
read is refused until the queue is known to be done, as on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from halogen_ascend.errors import (
    CaptureError,
    MissingSynchronize,
    PlacementError,
    PoisonRead,
    UseAfterFree,
)
from halogen_ascend.heat import Reading
from halogen_ascend.sim.buffer import ITEMSIZE, DeviceBuffer
from halogen_ascend.sim.cells import NUMPY, TORCH, map_cells
from halogen_ascend.sim.cost import Conditions, Schedule, pause, place
from halogen_ascend.sim.faults import FaultPlan
from halogen_ascend.sim.health import Health
from halogen_ascend.sim.memory import Allocation, Hbm
from halogen_ascend.sim.profiles import Profile
from halogen_ascend.sim.tasks import Program
from halogen_ascend.sim.timeline import Timeline
from halogen_core.spi import OutOfDeviceMemory, StepBatch

PCIE_BYTES = 25e9
"""Assumed host link, bytes per second."""

Build = Callable[[StepBatch | None], Program]


@attrs.frozen(kw_only=True)
class Recorded:
    """One captured launch; `needs_host`: its host arguments must be given anew at each replay."""

    op: str
    build: Build
    needs_host: bool


@attrs.define(eq=False)
class SimDevice:
    """One opened part."""

    part: Profile
    hbm: Hbm
    faults: FaultPlan = attrs.field(factory=FaultPlan)
    health: Health = attrs.field(factory=Health)
    threads: int = 1
    """Host threads that compute a task."""
    dry: bool = False
    """Plan and time every task, compute none: for timelines of models too big to compute."""
    launch_s: float = 5e-6
    timeline: Timeline = attrs.field(factory=Timeline)
    now: float = 0.0
    """Simulated seconds since the device was opened."""
    clock_share: float = 1.0
    """Set by the idle governor; thermal faults multiply it."""
    submitted: dict[str, int] = attrs.field(factory=dict)
    finished: dict[str, int] = attrs.field(factory=dict)
    _recording: list[Recorded] | None = None
    _pool: str = "temp"

    @property
    def name(self) -> str:
        return f"sim:{self.part.name}"

    # -- memory
    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        *,
        pool: str | None = None,
        granules: int = 1,
        bank: int | None = None,
        layout: str = "nd",
    ) -> DeviceBuffer:
        """Unwritten memory; reading it before it is written is an error."""
        size = ITEMSIZE[dtype] * int(np.prod(shape, dtype=np.int64))
        pool = pool or self._pool
        if self.faults.next_allocation():
            raise OutOfDeviceMemory(pool, asked=size, free=0, fix="injected fault; lift it")
        allocation = self.hbm.allocate(size, pool, granules=granules, bank=bank)
        self.hbm.cells[allocation.address] = map_cells(allocation.nbytes)
        return DeviceBuffer(self, allocation, shape, dtype, layout=layout)

    def free(self, buffer: DeviceBuffer) -> None:
        """Give memory back now; any later use of the buffer or a view of it raises."""
        buffer.allocation.free()

    def read(self, buffer: Any, op: str, argument: str) -> torch.Tensor:
        """The contents, for a kernel; checks placement, life, poison and queue."""
        self._check(buffer, op, argument)
        written = buffer.allocation.written
        if written is not None and len(written) == 1 and buffer.nbytes:
            raise PoisonRead(
                f"`{op}` reads argument `{argument}` {buffer!r}, which nothing has written",
                fix="write it first; device memory is not zeroed",
            )
        self._check_queue(buffer.allocation, op, argument, "compute")
        return self._view(buffer)

    def write(self, buffer: Any, op: str, argument: str = "out") -> torch.Tensor:
        """The contents, for a kernel to fill wholly; parts of a pool are marked by the kernel."""
        self._check(buffer, op, argument)
        allocation = buffer.allocation
        if allocation.written is not None and len(allocation.written) == 1:
            allocation.written = None
        allocation.ticket = ("compute", self.submitted.get("compute", 0))
        return self._view(buffer)

    def _check(self, buffer: Any, op: str, argument: str) -> None:
        if not isinstance(buffer, DeviceBuffer):
            raise PlacementError(
                f"`{op}` wants argument `{argument}` on the device, got a host "
                f"{type(buffer).__name__}",
                fix="`backend.upload` it first; nothing is copied behind your back",
            )
        if buffer.device is not self:
            raise PlacementError(
                f"`{op}` on {self.name} got argument `{argument}` of {buffer.device.name}",
                fix="download and upload it; devices do not see each other's memory",
            )
        if not buffer.allocation.live:
            raise UseAfterFree(
                f"`{op}` uses argument `{argument}` at {buffer.allocation.address:#x} after it "
                "was freed",
                fix="keep the buffer alive until the op is done",
            )

    def _check_queue(self, allocation: Allocation, op: str, argument: str, queue: str) -> None:
        writer, ticket = allocation.ticket
        if writer not in ("", queue) and ticket > self.finished.get(writer, 0):
            raise MissingSynchronize(
                f"`{op}` on queue `{queue}` uses argument `{argument}`, which submission {ticket} "
                f"of queue `{writer}` may still be writing",
                fix="wait for its event, or synchronize",
            )

    def _view(self, buffer: DeviceBuffer) -> torch.Tensor:
        cells = self.hbm.cells[buffer.allocation.address]
        return (
            cells[buffer.offset : buffer.offset + buffer.nbytes]
            .view(TORCH[buffer.dtype])
            .view(buffer.shape)
        )

    # -- the bus
    def copy_in(self, host: np.ndarray, *, pool: str | None = None) -> DeviceBuffer:
        """A device copy of a host array, done when this returns."""
        self.health.check()
        dtype = NUMPY.get(host.dtype.name)
        if dtype is None:
            raise PlacementError(
                f"upload of {host.dtype} arrays is not possible; allowed: {', '.join(NUMPY)}"
            )
        buffer = self.empty(host.shape, dtype, pool=pool)
        self.fill(buffer, host)
        return buffer

    def fill(self, buffer: DeviceBuffer, host: np.ndarray) -> None:
        """Write a whole buffer from the host."""
        self._check(buffer, "copy_in", "destination")
        self._view(buffer).copy_(torch.from_numpy(np.array(host)))
        buffer.allocation.written = None
        self.now += host.nbytes / PCIE_BYTES

    def copy_out(self, buffer: DeviceBuffer) -> torch.Tensor:
        """A host copy; refused while the queue that writes it may still run, or in a capture."""
        if self._recording is not None:
            raise CaptureError(
                "`copy_out` inside a captured step (error 107027): the host cannot read a result "
                "that replays will compute later",
                fix="return the buffer from the step and download it outside",
            )
        data = self.read(buffer, "copy_out", "source")
        if buffer.allocation.written is not None and not buffer.allocation.written.all():
            raise PoisonRead("`copy_out` reads a pool with unwritten parts")
        self._check_queue(buffer.allocation, "copy_out", "source", "host")
        self.now += buffer.nbytes / PCIE_BYTES
        return data.clone()

    def synchronize(self) -> None:
        """Wait for all queues; asynchronous errors surface here with the op that caused them."""
        if self._recording is not None:
            raise CaptureError(
                "`synchronize` inside a captured step (error 107027)",
                fix="synchronize after the step",
            )
        self.finished.update(self.submitted)
        self.health.tell()
        self.health.check()

    # -- work
    def submit(self, op: str, build: Build, host: StepBatch | None = None) -> None:
        """Launch what `build(host)` returns; inside a capture also record it."""
        if self._recording is not None:
            self._recording.append(Recorded(op=op, build=build, needs_host=host is not None))
        self._launch(op, build, host, self.launch_s)

    def replay(self, tasks: list[Recorded], host: StepBatch | None) -> None:
        """Run a captured step with new host arguments: one launch for all of it.

        Raises `CaptureError` when a task with host arguments gets none, rather than reuse old ones.
        """
        lacking = [f"{i} `{t.op}`" for i, t in enumerate(tasks) if t.needs_host]
        if host is None and lacking:
            raise CaptureError(
                f"replay without host arguments for tasks {', '.join(lacking)}: their lengths "
                "were baked in at capture",
                fix="give the batch, so that each task is updated before it runs",
            )
        self.now += self.launch_s
        self.timeline.launches += 1
        for task in tasks:
            self._launch(task.op, task.build, host, None)

    def wait(self, op: str, seconds: float) -> None:
        """Time in which no core works, as in a transfer between parts; drawn as such."""
        self.timeline.record(Program(op), pause(seconds), self.now, launched=False)
        self.now += seconds

    @contextmanager
    def capture(self) -> Iterator[list[Recorded]]:
        """Record submissions; new buffers come from the graph pool and live with the capture."""
        if self._recording is not None:
            raise CaptureError("a capture is already going on", fix="finish it first")
        self._recording, self._pool = [], "graph"
        try:
            yield self._recording
        finally:
            self._recording, self._pool = None, "temp"

    def _launch(
        self, op: str, build: Build, host: StepBatch | None, launch_s: float | None
    ) -> None:
        self.health.check()
        if self.health.broken:
            return  # what follows is dropped until somebody synchronizes
        number = self.submitted["compute"] = self.submitted.get("compute", 0) + 1
        if fault := self.faults.next_launch():
            self.health.fail(fault, f"`{op}` (submission {number}) on {self.name}")
            return
        program = build(host)
        schedule = place(program, self.part, self._conditions())
        if not self.dry:
            self._compute(program, schedule)
        start = self.now + (launch_s or 0.0)
        self.timeline.record(program, schedule, start, launched=launch_s is not None)
        self.now = start + schedule.makespan

    def _compute(self, program: Program, schedule: Schedule) -> None:
        """Run the tasks in order of start; host threads would only fight over work this small."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            for placed in schedule.placed:
                program.tasks[placed.task].run()
        finally:
            torch.set_num_threads(before)

    def sense(self) -> Reading:
        """What the part's sensors tell; after a long pause its clock is low without any heat."""
        return Reading(
            celsius=self.faults.celsius(),
            clock_share=self.clock_share * self.faults.clock_share(),
            busy=self.clock_share == 1.0,
        )

    def _conditions(self) -> Conditions:
        return Conditions(
            clock_share=self.clock_share * self.faults.clock_share(),
            slowdown=self.faults.slowdown,
            groups=self.hbm.groups,
        )
