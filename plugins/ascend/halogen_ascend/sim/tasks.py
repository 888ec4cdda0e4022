"""Micro-tasks: an op cut into pieces of one core each, and the order that holds them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import attrs


def _nothing() -> None:
    return None


@attrs.frozen(kw_only=True, eq=False)
class MicroTask:
    """Work of one core. `run` computes it; the figures say what it costs.

    `unit` is `cube` (matrix) or `vector`. `bank` is the group of HBM banks that `hbm_bytes` come
    from, None when striped. `after` are indices of tasks of the same program.
    """

    unit: str
    label: str
    macs: int = 0
    itemsize: int = 2
    vector_bytes: int = 0
    hbm_bytes: int = 0
    l2_bytes: int = 0
    bank: int | None = None
    after: tuple[int, ...] = ()
    run: Callable[[], None] = _nothing


@attrs.define(eq=False)
class Program:
    """One launch: a directed acyclic graph of micro-tasks, in an order that respects it."""

    op: str
    tasks: list[MicroTask] = attrs.field(factory=list)

    def add(self, task: MicroTask) -> int:
        """Append a task; its predecessors must be there already, so a cycle cannot be written."""
        if any(not 0 <= i < len(self.tasks) for i in task.after):
            raise ValueError(f"task `{task.label}` waits for {task.after}, not before it")
        self.tasks.append(task)
        return len(self.tasks) - 1

    def extend(self, tasks: Iterable[MicroTask]) -> list[int]:
        """Append independent tasks; their indices."""
        return [self.add(task) for task in tasks]

    def sinks(self) -> tuple[int, ...]:
        """Tasks that nothing waits for."""
        waited = {i for task in self.tasks for i in task.after}
        return tuple(i for i in range(len(self.tasks)) if i not in waited)

    def then(self, other: Program) -> Program:
        """Fuse: `other` after all of this one, in one launch; intermediates stay in L2."""
        return self._append(other, self.sinks())

    def beside(self, other: Program) -> Program:
        """Fuse: `other` in the same launch, independent of this one."""
        return self._append(other, ())

    def _append(self, other: Program, barrier: tuple[int, ...]) -> Program:
        shift = len(self.tasks)
        for task in other.tasks:
            after = tuple(i + shift for i in task.after) or barrier
            self.add(attrs.evolve(task, after=after))
        return self


def split(extent: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut [0, extent) into at most `parts` ranges of whole `unit`s, as even as they can be."""
    units = -(-extent // unit)
    parts = max(1, min(parts, units))
    edges = [units * i // parts * unit for i in range(parts + 1)]
    edges[-1] = extent
    return [(a, b) for a, b in pairwise(edges) if b > a]
