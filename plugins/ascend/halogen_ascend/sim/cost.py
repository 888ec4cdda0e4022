"""How long a micro-task takes, and a program on the cores. Simulated seconds, never measured ones.

Per task: fixed + max(arithmetic, HBM at min(core's DMA, bandwidth / active cores) + L2). The three
constants were fitted to seven public GEMMs (`profiles.toml`). Placement looks at counts only, never
at durations, as a persistent kernel's static grid does: so a longer task can never shorten a
program (list scheduling by duration has such anomalies, Graham 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import attrs

from halogen_ascend.sim.profiles import Profile
from halogen_ascend.sim.tasks import MicroTask, Program

CROSS_BANK = 1.15
"""Assumed factor on HBM time when a core reads the far half of the banks."""


@attrs.frozen(kw_only=True)
class Placed:
    """A task on a core, in seconds from the program's start."""

    task: int
    unit: str
    core: int
    start: float
    end: float
    crossed: bool = False
    """Read HBM banks of the other half."""


@attrs.frozen(kw_only=True)
class Schedule:
    """Where and when each task of a program runs."""

    placed: tuple[Placed, ...]
    """In order of start."""
    makespan: float
    busy: float
    """Core-seconds spent in tasks."""
    hbm_bytes: int
    l2_bytes: int
    crossed_bytes: int
    cores: int
    """Cores of the kinds that the program uses."""

    @property
    def utilisation(self) -> float:
        could = self.makespan * self.cores
        return self.busy / could if could else 0.0


@attrs.frozen(kw_only=True)
class Conditions:
    """What the device is like just now."""

    clock_share: float = 1.0
    slowdown: Callable[[int], float] | None = None
    groups: int = 8


def task_seconds(task: MicroTask, part: Profile, active: int, clock_share: float = 1.0) -> float:
    """Time of one task while `active` cores share the HBM."""
    clock = part.clock * clock_share
    compute = task.macs / (part.macs_per_second(task.itemsize) * clock_share)
    compute += task.vector_bytes / (part.vector_bytes_per_cycle * clock)
    hbm = task.hbm_bytes / min(part.dma, part.hbm_bandwidth / active)
    l2 = task.l2_bytes / (part.l2_read_per_cycle * clock)
    return part.task + max(compute, hbm + l2)


def place(program: Program, part: Profile, conditions: Conditions | None = None) -> Schedule:
    """Put every task on the core with the fewest so far, near its bank if there is a choice."""
    now = conditions or Conditions()
    counts = {
        unit: min(sum(t.unit == unit for t in program.tasks), _cores(part, unit))
        for unit in ("cube", "vector")
    }
    queues = {unit: _Queues(_cores(part, unit)) for unit in counts}
    ends: list[float] = []
    placed: list[Placed] = []
    crossed_bytes = 0
    for index, task in enumerate(program.tasks):
        side = None if task.bank is None else 2 * task.bank // now.groups % 2
        core = queues[task.unit].pick(side)
        seconds = task_seconds(task, part, counts[task.unit], now.clock_share)
        crossed = side is not None and side != queues[task.unit].side(core)
        if crossed:
            crossed_bytes += task.hbm_bytes
            far = attrs.evolve(task, hbm_bytes=int(task.hbm_bytes * CROSS_BANK))
            seconds = task_seconds(far, part, counts[task.unit], now.clock_share)
        if now.slowdown:
            seconds *= now.slowdown(core)
        start = max([queues[task.unit].free[core], *(ends[i] for i in task.after)])
        queues[task.unit].free[core] = start + seconds
        ends.append(start + seconds)
        placed.append(
            Placed(
                task=index, unit=task.unit, core=core, start=start, end=ends[-1], crossed=crossed
            )
        )
    return _summary(program, part, placed, crossed_bytes, counts)


def pause(seconds: float) -> Schedule:
    """A schedule in which no core does anything."""
    return Schedule(
        placed=(), makespan=seconds, busy=0.0, hbm_bytes=0, l2_bytes=0, crossed_bytes=0, cores=0
    )


def roofline(program: Program, part: Profile) -> float:
    """Seconds that no schedule can beat: all bytes at full bandwidth, all arithmetic at peak."""
    memory = sum(t.hbm_bytes for t in program.tasks) / part.hbm_bandwidth
    compute = sum(
        t.macs / (part.macs_per_second(t.itemsize) * part.cube_cores) for t in program.tasks
    )
    return max(memory, compute)


def _summary(
    program: Program, part: Profile, placed: list[Placed], crossed: int, counts: dict[str, int]
) -> Schedule:
    longest = max((p.end for p in placed), default=0.0)
    return Schedule(
        placed=tuple(sorted(placed, key=lambda p: (p.start, p.task))),
        makespan=max(longest, roofline(program, part)),
        busy=sum(p.end - p.start for p in placed),
        hbm_bytes=sum(t.hbm_bytes for t in program.tasks),
        l2_bytes=sum(t.l2_bytes for t in program.tasks),
        crossed_bytes=crossed,
        cores=sum(_cores(part, unit) for unit, n in counts.items() if n),
    )


def _cores(part: Profile, unit: str) -> int:
    return part.cube_cores if unit == "cube" else part.vector_cores


class _Queues:
    """Cores of one kind, fewest tasks first, each half of the die a heap of its own."""

    def __init__(self, cores: int) -> None:
        self.free = [0.0] * cores
        self._cores = cores
        self._heaps: list[list[tuple[int, int]]] = [[], []]
        for core in range(cores):
            self._heaps[self.side(core)].append((0, core))

    def side(self, core: int) -> int:
        """Which half of the die, 0 or 1."""
        return 2 * core // self._cores

    def pick(self, side: int | None) -> int:
        """The next core; a bank's own half wins a tie of counts."""
        heads = [(h[0][0], s != side, h[0][1], s) for s, h in enumerate(self._heaps) if h]
        count, _, core, chosen = min(heads)
        heapq.heapreplace(self._heaps[chosen], (count + 1, core))
        return core
