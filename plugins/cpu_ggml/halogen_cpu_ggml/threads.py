"""How many threads, on which CPUs: the affinity mask bounded by the cgroup's quota; one pool."""

from __future__ import annotations

import ctypes as C
import math
import os
from pathlib import Path

import attrs

from halogen_cpu_ggml.binding import MAX_CPUS, Library, ThreadpoolParams
from halogen_cpu_ggml.native import Crew

CGROUP_V2 = "sys/fs/cgroup/cpu.max"
CGROUP_V1 = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us")


def cgroup_cpus(root: str = "/") -> float | None:
    """CPUs that the cgroup's quota allows; None: no quota."""
    v2 = _read(Path(root) / CGROUP_V2)
    if v2:
        quota, _, period = v2.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota, period = (_read(Path(root) / p) for p in CGROUP_V1)
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def usable_threads(root: str = "/") -> int:
    """Threads worth starting: CPUs in the affinity mask, at most the quota rounded up."""
    cpus = len(os.sched_getaffinity(0))
    quota = cgroup_cpus(root)
    return max(1, min(cpus, MAX_CPUS, math.ceil(quota) if quota else cpus))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@attrs.define(eq=False)
class Team:
    """Our threads, and ggml's where graphs hold heavy ops of its own."""

    lib: Library
    threads: int
    pinned: bool
    crew: Crew | None = None
    """The threads of our kernels, if those run."""
    pool: int | None = None

    @property
    def cpus(self) -> list[int]:
        """Where threads are pinned to, one each; empty: nowhere."""
        return sorted(os.sched_getaffinity(0))[: self.threads] if self.pinned else []

    def ggml_pool(self) -> int | None:
        """Ggml's threads, started when a graph first needs them; they sleep between graphs."""
        if self.pool is None and self.threads > 1:
            params = ThreadpoolParams()
            self.lib.fn["threadpool_params_init"](C.byref(params), self.threads)
            params.poll = 0
            params.strict_cpu = self.pinned
            for cpu in self.cpus:
                params.cpumask[cpu] = True
            self.pool = self.lib.fn["threadpool_new"](C.byref(params))
        return self.pool

    def stop(self) -> None:
        """End the workers."""
        if self.crew:
            self.crew.stop()
        if self.pool:
            self.lib.fn["threadpool_free"](self.pool)
            self.pool = None
