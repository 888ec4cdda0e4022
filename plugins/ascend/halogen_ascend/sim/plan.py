"""What fits where: tiers told honestly, pools planned with the arithmetic shown."""

from __future__ import annotations

from halogen_ascend.sim.device import PCIE_BYTES, SimDevice
from halogen_ascend.sim.memory import gib
from halogen_core.spi import MemoryPlan, MemoryRequest, MemoryTier, PoolPlan, pool_refusal


def tiers(device: SimDevice) -> tuple[MemoryTier, ...]:
    """The simulated HBM. Host memory holds it, but that is not the part's."""
    part, hbm = device.part, device.hbm
    return (
        MemoryTier(
            name="device",
            total=part.hbm_bytes,
            free=part.usable_bytes - hbm.used,
            bandwidth=part.hbm_bandwidth,
            granule=part.alignment,
            source=f"simulated profile {part.name}; {part.hbm_reserved} bytes reserved by firmware",
        ),
    )


def plan(device: SimDevice, request: MemoryRequest) -> MemoryPlan:
    """Divide what is free now; static bytes that are packed already are not counted twice.

    Raises `OutOfMemory` with the sums when fewer than `min_blocks` fit.
    """
    hbm, per_block = device.hbm, request.kv_layout.bytes_per_block
    packed = hbm.pools["static"].used
    static = max(request.static_bytes, packed)
    capacity = hbm.available("dynamic") + packed
    # a co-tenant's share of the card, when one is asked for
    fixed = static + request.temp_bytes + request.graph_bytes + request.host_reserve
    left = capacity - fixed
    budget = request.kv_bytes if request.kv_bytes is not None else int(left * request.kv_ratio)
    # the pool rounds each layer's buffers up and keeps one block for padding
    slack = 2 * request.kv_layout.spec.num_layers * device.part.alignment + per_block
    blocks = max(0, (min(budget, left) - slack) // per_block)
    if request.max_blocks is not None:
        blocks = min(blocks, request.max_blocks)
    reasons = (
        f"usable {gib(capacity)} = {gib(device.part.hbm_bytes)} HBM of {device.part.name} less "
        f"{gib(device.part.hbm_reserved)} reserved and what other pools hold",
        f"less static {gib(static)} (weights), temp {gib(request.temp_bytes)}, graph "
        f"{gib(request.graph_bytes)}, reserve {gib(request.host_reserve)} leaves {gib(left)}",
        f"KV {gib(budget)} in blocks of {per_block} bytes, padding block and rounding {slack} "
        f"bytes off: {blocks} blocks",
        f"bandwidth {device.part.hbm_bandwidth / 1e12:.2f} TB/s, host link assumed "
        f"{PCIE_BYTES / 1e9:.0f} GB/s",
    )
    if blocks < request.min_blocks or (left < budget and request.kv_bytes is not None):
        raise pool_refusal(request, left=left, extra=slack, reasons=reasons[:3])
    dynamic = blocks * per_block + slack
    sizes = {
        "static": static,
        "dynamic": dynamic,
        "temp": request.temp_bytes,
        "graph": request.graph_bytes,
    }
    pools = tuple(PoolPlan(name=n, tier="device", bytes=b) for n, b in sizes.items())
    return MemoryPlan(pools=pools, num_blocks=blocks, reasons=reasons)
