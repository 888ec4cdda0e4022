"""The host tier where host and device are one memory: its bytes are blocks of the pool itself.

Moving an evicted block to the host there would copy it into the bytes beside it. As a block of the
pool it stays where it is, is found by the same tree and serves running sequences as well, so
nothing is copied and only the books know that it is cached.
"""

from __future__ import annotations

from typing import Any

import attrs

from halogen_core.errors import ConfigError, OutOfMemory
from halogen_core.spi import Backend, MemoryPlan, MemoryRequest


@attrs.frozen(kw_only=True)
class PoolDivision:
    """The device's plan, and what of the host tier has to be a tier of copies."""

    plan: MemoryPlan
    host_bytes: int


def divide(backend: Backend[Any], request: MemoryRequest, host_bytes: int) -> PoolDivision:
    """Plan the pool and a host tier of `host_bytes`.

    On one memory the tier becomes blocks of the pool. What the device may not map though the host
    has it (beyond GTT) stays a tier of copies. Raises `OutOfMemory` with the arithmetic when the
    tier is more than both, `ConfigError` when it holds no block.
    """
    plan = backend.plan(request)
    each = request.kv_layout.bytes_per_block
    if 0 < host_bytes < each:
        raise ConfigError(
            f"`host_pool_size` is {host_bytes} bytes; one KV block takes {each}",
            code="HRT-3304",
            fix="raise --host-pool-size, or leave it out",
        )
    if not host_bytes or not backend.capabilities().unified_memory:
        return PoolDivision(plan=plan, host_bytes=host_bytes)
    wanted = plan.num_blocks + host_bytes // each
    whole = backend.plan(
        attrs.evolve(
            request, kv_bytes=None, kv_ratio=1.0, min_blocks=plan.num_blocks, max_blocks=wanted
        )
    )
    rest = (wanted - whole.num_blocks) * each
    folded = whole.num_blocks - plan.num_blocks
    _check_rest(backend, rest, folded, each)
    reasons = [f"host tier: one memory, so {folded} of its blocks are the pool's own, uncopied"]
    if rest:
        reasons.append(
            f"host tier: {rest // each} blocks lie where the device cannot reach, and are copied"
        )
    told = attrs.evolve(whole, reasons=(*whole.reasons, *reasons))
    return PoolDivision(plan=told, host_bytes=rest)


def _check_rest(backend: Backend[Any], rest: int, folded: int, each: int) -> None:
    tiers = {tier.name: tier for tier in backend.memory()}
    device, host = tiers.get("device"), tiers.get("host")
    beyond = max(0, host.free - device.free) if device and host else 0
    if rest > beyond:
        most = folded * each + beyond
        raise OutOfMemory(
            f"the host tier of {_gib(rest + folded * each)} is the same memory as the KV pool: "
            f"{_gib(folded * each)} fit beside the pool and {_gib(beyond)} are the host's alone "
            f"({backend.memory()[0].source})",
            code="HRT-3305",
            fix=f"set --host-pool-size to at most {most >> 20}MiB, or leave it out",
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3f} GiB"
