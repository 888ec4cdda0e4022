"""What ran when on which core: running sums always, every task while somebody watches."""

from __future__ import annotations

import attrs

from halogen_ascend.sim.cost import Placed, Schedule
from halogen_ascend.sim.tasks import Program


@attrs.frozen(kw_only=True)
class OpSpan:
    """One op in simulated seconds; `labels[i]` belongs to task i."""

    op: str
    start: float
    schedule: Schedule
    labels: tuple[str, ...]

    @property
    def end(self) -> float:
        return self.start + self.schedule.makespan

    def label(self, placed: Placed) -> str:
        """What a placed task was."""
        return self.labels[placed.task]


@attrs.define
class Timeline:
    """Sums since the device was opened, and the spans while `watching`."""

    watching: bool = False
    spans: list[OpSpan] = attrs.field(factory=list)
    launches: int = 0
    tasks: int = 0
    busy_s: float = 0.0
    core_s: float = 0.0
    """Seconds times cores of the kinds used: what could have been busy."""
    hbm_bytes: int = 0
    l2_bytes: int = 0
    crossed_bytes: int = 0

    def record(self, program: Program, schedule: Schedule, start: float, *, launched: bool) -> None:
        """Add one program's sums."""
        self.launches += launched
        self.tasks += len(program.tasks)
        self.busy_s += schedule.busy
        self.core_s += schedule.makespan * schedule.cores
        self.hbm_bytes += schedule.hbm_bytes
        self.l2_bytes += schedule.l2_bytes
        self.crossed_bytes += schedule.crossed_bytes
        if self.watching:
            labels = tuple(task.label for task in program.tasks)
            self.spans.append(OpSpan(op=program.op, start=start, schedule=schedule, labels=labels))
