"""How large the KV pool is: four names, one meaning, contradictions refused.

An exact size (`pool_size`, or `kv_cache_pool_gb` in GiB) is taken as it is. A share
(`kv_cache_ratio`, or its alias `gpu_memory_utilization`) is of what is left after weights,
workspace and reserve, never of the whole memory (X5, D4). Default: a share of 0.85 of what the
platform and the cgroup really leave (B9).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from halogen_core.errors import ConfigError, OutOfMemory
from halogen_core.spi import MemoryTier

CONFLICT_CODE = "HRT-3303"
DEFAULT_RATIO = 0.85
GIB = 1 << 30


@attrs.frozen(kw_only=True)
class PoolWish:
    """What was asked for; None: not said."""

    pool_size: int | None = None
    """Bytes."""
    kv_cache_pool_gb: float | None = None
    kv_cache_ratio: float | None = None
    gpu_memory_utilization: float | None = None

    def resolved(self) -> PoolSize:
        """One exact size or one share; raises `ConfigError` naming both where two are given."""
        given = {n: v for n, v in attrs.asdict(self).items() if v is not None}
        if len(given) > 1:
            names = list(given)
            raise ConfigError(
                f"`{names[0]}` is {given[names[0]]} and `{names[1]}` is {given[names[1]]}; both"
                " set the size of the KV pool",
                code=CONFLICT_CODE,
                fix="keep one of them",
            )
        if self.pool_size is not None:
            return PoolSize(bytes=self.pool_size)
        if self.kv_cache_pool_gb is not None:
            return PoolSize(bytes=int(self.kv_cache_pool_gb * GIB))
        ratio = next(iter(given.values()), DEFAULT_RATIO)
        if not 0 < ratio <= 1:
            raise ConfigError(
                f"`{next(iter(given))}` is {ratio}; it is a share, above 0 and at most 1",
                code=CONFLICT_CODE,
            )
        return PoolSize(ratio=ratio)


@attrs.frozen(kw_only=True)
class PoolSize:
    """Exactly one of the two is set."""

    bytes: int | None = None
    ratio: float = DEFAULT_RATIO


def usable_bytes(tier: MemoryTier, cgroup_limit: int | None = None, cgroup_used: int = 0) -> int:
    """What can really be had: memory that is the host's is bounded by the cgroup too."""
    if cgroup_limit is None or not (tier.shared_with_host or tier.name == "host"):
        return tier.free
    return max(0, min(tier.free, cgroup_limit - cgroup_used))


@attrs.frozen(kw_only=True)
class PoolPlan:
    """How many blocks, and the arithmetic a line each."""

    num_blocks: int
    reasons: Sequence[str] = ()


def plan_pool(
    size: PoolSize,
    *,
    usable: int,
    taken: int,
    bytes_per_block: int,
    min_blocks: int = 1,
) -> PoolPlan:
    """Blocks of a pool in `usable` bytes of which weights, workspace and reserve take `taken`.

    Raises `OutOfMemory` with the sums if it exceeds what is left or is under `min_blocks` (one
    sequence of the longest context).
    """
    left = usable - taken
    wanted = size.bytes if size.bytes is not None else int(max(0, left) * size.ratio)
    sums = f"{_gib(usable)} usable - {_gib(taken)} for weights, workspace and reserve"
    if wanted > left:
        raise OutOfMemory(
            f"the KV pool is to have {_gib(wanted)}; {sums} leaves {_gib(left)}",
            code="HRT-3305",
            fix="lower --pool-size, or use a smaller or more strongly quantised model",
        )
    blocks = wanted // bytes_per_block
    if blocks < min_blocks:
        raise OutOfMemory(
            f"the KV pool of {_gib(wanted)} has {blocks} blocks of {bytes_per_block} bytes; one"
            f" sequence of the longest context needs {min_blocks} ({sums})",
            code="HRT-3305",
            fix="lower --max-context, use a smaller KV type or give the pool more memory",
        )
    how = "exact" if size.bytes is not None else f"{size.ratio:g} of {_gib(left)}"
    return PoolPlan(
        num_blocks=blocks,
        reasons=(
            f"{sums} = {_gib(left)} left",
            f"KV pool: {_gib(wanted)} ({how}) = {blocks} blocks of {bytes_per_block} bytes",
        ),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
