"""Host memory told honestly, and its division into pools."""

from __future__ import annotations

from pathlib import Path

from halogen_core.spi import MemoryPlan, MemoryRequest, MemoryTier, PoolPlan, pool_refusal

LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
USAGE = ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory/memory.usage_in_bytes")
MIB = 1 << 20


def host_tier(root: str = "/") -> MemoryTier:
    """Total and available bytes from /proc/meminfo, bounded by the cgroup's limit."""
    info = _meminfo(Path(root) / "proc/meminfo")
    total, free, source = info["MemTotal"], info["MemAvailable"], "/proc/meminfo"
    limit, used = _first(root, LIMITS), _first(root, USAGE)
    if limit is not None and limit < total:
        total = limit
        free = min(free, limit - (used or 0))
        source += "; cgroup memory.max"
    return MemoryTier(
        name="host",
        total=total,
        free=max(0, free),
        reclaimable=info.get("Cached", 0),
        shared_with_host=True,
        granule=4096,
        source=source,
    )


def divide(request: MemoryRequest, tier: MemoryTier, held: int = 0) -> MemoryPlan:
    """Weights and workspace first, then KV blocks from the share of what is left.

    `held` bytes of weights are packed already, so the tier's free bytes do not hold them any more.

    Raises OutOfMemory with the arithmetic when fewer than `min_blocks` fit.
    """
    block = request.kv_layout.bytes_per_block
    fixed = request.temp_bytes + request.graph_bytes + request.host_reserve
    coming = max(0, request.static_bytes - held)
    left = tier.free - coming - fixed
    kv_bytes = request.kv_bytes if request.kv_bytes is not None else int(left * request.kv_ratio)
    # an exact pool is given whole or not at all
    blocks = kv_bytes // block if 0 <= kv_bytes <= left else 0
    if request.max_blocks is not None:
        blocks = min(blocks, request.max_blocks)
    reasons = (
        f"{tier.free // MIB} MiB available ({tier.source})",
        f"- {coming // MIB} MiB of {request.static_bytes // MIB} MiB weights not packed yet "
        f"- {request.temp_bytes // MIB} MiB workspace - {request.graph_bytes // MIB} MiB graphs "
        f"- {request.host_reserve // MIB} MiB reserve = {left // MIB} MiB",
        f"KV {blocks} blocks of {block} bytes = {blocks * block // MIB} MiB",
    )
    if blocks < request.min_blocks:
        raise pool_refusal(request, left=left, reasons=reasons)
    pools = (
        PoolPlan(name="static", tier=tier.name, bytes=request.static_bytes),
        PoolPlan(name="dynamic", tier=tier.name, bytes=blocks * block),
        PoolPlan(name="temp", tier=tier.name, bytes=request.temp_bytes),
    )
    return MemoryPlan(pools=pools, num_blocks=blocks, reasons=reasons)


def _meminfo(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines()
    return {k: int(v.split()[0]) * 1024 for k, _, v in (line.partition(":") for line in lines)}


def _first(root: str, paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            text = (Path(root) / path).read_text().strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None
