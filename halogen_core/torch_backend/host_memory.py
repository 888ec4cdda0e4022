"""How much memory this machine can really give, and dividing it into pools."""

from __future__ import annotations

import re
from pathlib import Path

from halogen_core.spi.memory import MemoryPlan, MemoryRequest, MemoryTier, PoolPlan
from halogen_core.spi.refusals import pool_refusal

_GIB = 1 << 30


def host_tier(root: str = "/") -> MemoryTier:
    """Host memory from `/proc/meminfo`, bounded by the process's control groups."""
    meminfo = _meminfo(Path(root) / "proc/meminfo")
    total, free = meminfo["MemTotal"], meminfo["MemAvailable"]
    reclaimable = max(0, free - meminfo["MemFree"])
    source = "/proc/meminfo MemTotal, MemAvailable"
    for group in _control_groups(Path(root)):
        limit, used, cache = group
        if limit < total:
            total, source = limit, source + "; cgroup limit"
        if limit - used + cache < free:
            free, reclaimable = max(0, limit - used + cache), cache
    return MemoryTier(
        name="host",
        total=total,
        free=free,
        reclaimable=min(reclaimable, free),
        shared_with_host=True,
        granule=4096,
        source=source,
    )


def divide(tier: MemoryTier, request: MemoryRequest, *, held_static: int) -> MemoryPlan:
    """A plan on one tier; `held_static` bytes of the weights are allocated already.

    Raises `OutOfMemory` with the arithmetic.
    """
    per_block = request.kv_layout.bytes_per_block
    still_static = max(0, request.static_bytes - held_static)
    fixed = still_static + request.temp_bytes + request.graph_bytes + request.host_reserve
    left = tier.free - fixed
    # the trash block belongs to the pool too
    wanted = request.kv_bytes if request.kv_bytes is not None else int(left * request.kv_ratio)
    blocks = max(0, min(wanted, left) // per_block - 1)
    if request.max_blocks is not None:
        blocks = min(blocks, request.max_blocks)
    short = request.kv_bytes is not None and wanted > left
    reasons = _arithmetic(tier, request, still_static, left, blocks)
    if short or blocks < request.min_blocks:
        raise pool_refusal(request, left=left, extra=per_block, reasons=reasons)
    sizes = {
        "static": request.static_bytes,
        "dynamic": (blocks + 1) * per_block,
        "temp": request.temp_bytes,
        "graph": request.graph_bytes,
    }
    pools = tuple(PoolPlan(name=name, tier=tier.name, bytes=size) for name, size in sizes.items())
    return MemoryPlan(pools=pools, num_blocks=blocks, reasons=reasons)


def _arithmetic(
    tier: MemoryTier, request: MemoryRequest, still_static: int, left: int, blocks: int
) -> tuple[str, ...]:
    def gib(value: int) -> str:
        return f"{value / _GIB:.3f} GiB"

    return (
        f"{tier.name}: {gib(tier.free)} free of {gib(tier.total)} ({tier.source})",
        f"weights {gib(request.static_bytes)}, {gib(still_static)} of them still to allocate",
        f"workspace {gib(request.temp_bytes)}, graphs {gib(request.graph_bytes)}, "
        f"reserved for others {gib(request.host_reserve)}",
        f"left {gib(left)}; {blocks} blocks of {request.kv_layout.bytes_per_block} bytes",
    )


def _meminfo(path: Path) -> dict[str, int]:
    text = path.read_text(encoding="ascii")
    found = re.findall(r"^(\w+):\s+(\d+) kB", text, flags=re.MULTILINE)
    return {key: int(value) * 1024 for key, value in found}


def _control_groups(root: Path) -> list[tuple[int, int, int]]:
    """(limit, used, reclaimable file cache) in bytes of every control group that bounds us."""
    found = []
    for files in _group_files(root):
        try:
            limit, used = files[0].read_text().strip(), int(files[1].read_text())
            stat = dict(line.split() for line in files[2].read_text().splitlines())
        except (OSError, ValueError):
            continue
        cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        if limit.isdigit() and int(limit) < 1 << 60:
            found.append((int(limit), used, cache))
    return found


def _group_files(root: Path) -> list[tuple[Path, Path, Path]]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = mount / path.lstrip("/")
            groups = [base, *base.parents]
            inside = [g for g in groups if g.is_relative_to(mount)]
            files += [(g / "memory.max", g / "memory.current", g / "memory.stat") for g in inside]
        elif "memory" in controllers.split(","):
            for base in (mount / "memory" / path.lstrip("/"), mount / "memory"):
                limit, used = base / "memory.limit_in_bytes", base / "memory.usage_in_bytes"
                files.append((limit, used, base / "memory.stat"))
    return files
