"""L2: memory and placement: what is promised is there, what is dropped comes back."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from halogen_conformance.bench import Bench, refuses, same_bits
from halogen_conformance.case import Case, Failure
from halogen_conformance.cases.kv import default_spec
from halogen_conformance.steps import arrange, batch_of, random_blocks, spans
from halogen_core.spi import (
    OPS,
    Activation,
    MemoryRequest,
    OpSignature,
    OutOfMemory,
    SupportLevel,
)

CYCLES = 1000
ROUNDS = 6
LEAK_BYTES = 4 << 20
"""Growth over all cycles of a round that is still noise; a cycle's arrays are 100 KiB and more."""


def cases() -> Iterator[Case]:
    """All of them."""
    checks: dict[str, tuple[Any, str]] = {
        "tiers/honest": (tiers, "more memory than the machine has, or counted twice"),
        "plan/exact": (plan_exact, "an exact pool that is exceeded"),
        "plan/limits": (plan_limits, "max_blocks or host_reserve ignored"),
        "plan/allocatable": (plan_allocatable, "a plan that cannot be allocated as it stands"),
        "plan/impossible": (plan_impossible, "a plan for more than there is"),
        "out-of-memory/recovers": (recovers, "out of memory is untyped, or ruins the backend"),
        "leaks/cycles": (leaks, "arrays, pools or weights that are never given back"),
        "closing/twice": (closing, "close that may not be repeated, or reopening that fails"),
        "placement/complete": (placement_complete, "an op whose place nobody tells"),
        "placement/agrees": (placement_agrees, "`supports` and `placement` tell two stories"),
        "placement/counted": (placement_counted, "an op called native that runs by fallback"),
        "telemetry/numbers": (telemetry, "counters that are not numbers"),
        "advice/cost": (cost, "a cost model that answers nonsense once it has seen steps"),
    }
    for name, (run, why) in checks.items():
        topic = name.partition("/")[0]
        yield Case(id=f"L2/{name}", topic=topic, why=why, run=run, timeout_s=120)


# ---------------------------------------------------------------- tiers and plans


def tiers(bench: Bench) -> None:
    found = bench.backend.memory()
    machine = psutil.virtual_memory().total
    if not found:
        raise Failure("no memory tier at all")
    for tier in found:
        if not 0 <= tier.free <= tier.total or not 0 <= tier.reclaimable <= tier.free:
            raise Failure(
                f"{tier.name}: {tier.free} free, {tier.reclaimable} reclaimable of {tier.total}"
            )
        if tier.granule < 1 or not tier.source:
            raise Failure(f"{tier.name}: granule {tier.granule}, source `{tier.source}`")
        if (tier.shared_with_host or tier.name == "host") and tier.total > machine:
            raise Failure(f"{tier.name}: {tier.total} bytes in all, the machine has {machine}")
        if tier.bandwidth is not None and not 1e8 < tier.bandwidth < 1e14:
            raise Failure(f"{tier.name}: bandwidth {tier.bandwidth} bytes/s is not believable")


def _request(bench: Bench, **more: Any) -> MemoryRequest:
    layout = bench.backend.kv_layout(default_spec(bench))
    return MemoryRequest(
        **{"static_bytes": 1 << 20, "temp_bytes": 1 << 20, "kv_layout": layout, **more}
    )


def plan_exact(bench: Bench) -> None:
    request = _request(bench, kv_bytes=6 << 20)
    plan = bench.backend.plan(request)
    pools = {pool.name: pool for pool in plan.pools}
    need = plan.num_blocks * request.kv_layout.bytes_per_block
    if not 0 < need <= pools["dynamic"].bytes <= 6 << 20:
        raise Failure(f"{plan.num_blocks} blocks, dynamic pool {pools['dynamic'].bytes} of 6 MiB")
    missing = {"static", "dynamic", "temp"} - set(pools)
    if missing or not plan.reasons:
        raise Failure(f"the plan lacks {missing or 'its reasons'}")
    names = {tier.name for tier in bench.backend.memory()}
    if strange := {p.tier for p in plan.pools} - names:
        raise Failure(f"pools on tiers {strange}, there are {names}")


def plan_limits(bench: Bench) -> None:
    plan = bench.backend.plan(_request(bench, kv_bytes=6 << 20, max_blocks=5))
    if plan.num_blocks != 5:
        raise Failure(f"max_blocks is 5, the plan has {plan.num_blocks}")
    before = {tier.name: tier.free for tier in bench.backend.memory()}
    reserve = max(before.values()) // 2
    plan = bench.backend.plan(_request(bench, host_reserve=reserve))
    used: dict[str, int] = {}
    for pool in plan.pools:
        used[pool.tier] = used.get(pool.tier, 0) + pool.bytes
    for tier in bench.backend.memory():
        kept = reserve if tier.shared_with_host else 0
        if used.get(tier.name, 0) + kept > max(tier.free, before[tier.name]) * 1.02:
            raise Failure(
                f"{tier.name}: {used[tier.name]} planned and {kept} reserved of {tier.free}"
            )


def plan_allocatable(bench: Bench) -> None:
    request = _request(bench, kv_bytes=48 << 20)
    plan = bench.backend.plan(request)
    kv = bench.backend.kv_alloc(request.kv_layout, plan.num_blocks)
    last = [0, plan.num_blocks - 1]
    blocks = random_blocks(bench.rng, request.kv_layout.spec, 2)
    bench.backend.kv_import(kv, last, blocks)
    same_bits(bench.backend.kv_export(kv, last).data, blocks.data, "first and last planned block")
    if kv.num_blocks != plan.num_blocks:
        raise Failure(f"planned {plan.num_blocks} blocks, allocated {kv.num_blocks}")


def plan_impossible(bench: Bench) -> None:
    largest = max(tier.total for tier in bench.backend.memory())
    for more in (
        {"static_bytes": 2 * largest},
        {"kv_bytes": 2 * largest},
        {"min_blocks": 1 << 50},
        {"host_reserve": 4 * largest},
    ):
        message = refuses(
            lambda more=more: bench.backend.plan(_request(bench, **more)), OutOfMemory
        )
        if not any(c.isdigit() for c in message):
            raise Failure(f"out of memory without numbers: {message}")


def recovers(bench: Bench) -> None:
    backend = bench.backend
    layout = backend.kv_layout(default_spec(bench))
    blocks = (1 << 52) // layout.bytes_per_block
    refuses(lambda: backend.kv_alloc(layout, blocks), OutOfMemory)
    kv = backend.kv_alloc(layout, 4)
    data = random_blocks(bench.rng, layout.spec, 4)
    backend.kv_import(kv, range(4), data)
    same_bits(backend.kv_export(kv, range(4)).data, data.data, "a pool after out of memory")


# ---------------------------------------------------------------- life


def leaks(bench: Bench) -> None:
    """1,000 cycles of everything that is made and dropped; memory and objects must not grow.

    A pool that fills or an allocator that keeps pages grows in some rounds, a leak in all.
    """
    _cycles(bench, CYCLES // 10)
    for _ in range(ROUNDS):
        grown, lost, more = _cycles(bench, CYCLES)
        if grown <= LEAK_BYTES and lost <= LEAK_BYTES and more <= CYCLES // 2:
            break
    else:
        raise Failure(
            f"{CYCLES} cycles cost {grown >> 10} KiB of the host, {lost >> 10} KiB of the device "
            f"and {more} objects; in {ROUNDS} such rounds each cost more than is allowed"
        )
    bench.facts |= {
        "host_bytes_per_cycle": grown / CYCLES,
        "device_bytes_per_cycle": lost / CYCLES,
        "objects_per_cycle": more / CYCLES,
    }


def _cycles(bench: Bench, count: int) -> tuple[int, int, int]:
    """(bytes of the host, bytes of the device, objects) that so many cycles cost."""
    process = psutil.Process()

    def device() -> int:
        return sum(tier.free for tier in bench.backend.memory() if not tier.shared_with_host)

    gc.collect()
    began, objects, free = process.memory_info().rss, len(gc.get_objects()), device()
    for _ in range(count):
        _cycle(bench)
    gc.collect()
    grown = process.memory_info().rss - began
    return grown, free - device(), len(gc.get_objects()) - objects


def _cycle(bench: Bench) -> None:
    backend, spec = bench.backend, default_spec(bench)
    kv = backend.kv_alloc(backend.kv_layout(spec), 2)
    one = np.ones((16, 64), np.float32)
    weight = bench.weight(np.ones((64, 64)))
    plan = arrange(bench.rng, spans((5, 2)), spec.block_size, spare=0)
    backend.upload_step(batch_of(plan))
    backend.download(backend.ops.linear(backend.upload(one), weight))
    backend.kv_copy(kv, [(0, 1)])


def closing(bench: Bench) -> None:
    assert bench.reopen is not None
    for _ in range(2):
        backend = bench.reopen()
        backend.download(backend.upload(np.ones(4, np.float32)))
        backend.close()
        backend.close()
    x = bench.draw(2, 32)
    weight = bench.draw(8, 32)
    got = bench.download(bench.backend.ops.linear(bench.activation(x), bench.weight(weight)))
    bench.compare(got, x @ weight.T, x @ weight.T, what="after others were closed", op="linear")


def placement_complete(bench: Bench) -> None:
    told = [p.op for p in bench.backend.placement()]
    if sorted(told) != sorted(OPS):
        raise Failure(f"placement tells of {told}, the ops are {list(OPS)}")
    for place in bench.backend.placement():
        if place.level is not SupportLevel.NATIVE and not place.reasons:
            raise Failure(f"`{place.op}` is {place.level} without a reason")


def placement_agrees(bench: Bench) -> None:
    for place in bench.backend.placement():
        support = bench.backend.supports(OpSignature(op=place.op, dtype=bench.dtype))
        if place.level is SupportLevel.NATIVE and support.level is SupportLevel.FALLBACK:
            raise Failure(f"`{place.op}` is native in the placement, fallback in `supports`")
        if place.level is SupportLevel.FALLBACK and support.level is SupportLevel.NATIVE:
            raise Failure(f"`{place.op}` is fallback in the placement, native in `supports`")
    unknown = bench.backend.supports(OpSignature(op="teleport", dtype=bench.dtype))
    if unknown.level is not SupportLevel.NO or not unknown.reasons:
        raise Failure(f"an op that does not exist is {unknown.level}")


def placement_counted(bench: Bench) -> None:
    """Counters named after an op and `fallback` must not move for a native one."""
    native = {p.op for p in bench.backend.placement() if p.level is SupportLevel.NATIVE}
    before = dict(bench.backend.counters().counters)
    x, w = bench.draw(3, 32), bench.draw(32, 32)
    ops = bench.backend.ops
    ops.linear(bench.activation(x), bench.weight(w))
    ops.rms_norm(bench.activation(x), bench.norm_weight(w[0]), eps=1e-6)
    ops.gated_act(bench.activation(x), Activation.SILU)
    after = bench.backend.counters().counters
    moved = {name for name, value in after.items() if value > before.get(name, 0)}
    fallen = {_op_of(name) for name in moved if "fallback" in name}
    if lies := sorted(native & fallen):
        raise Failure(f"called native, yet counted as fallback: {', '.join(lies)}")


def _op_of(counter: str) -> str:
    """The op that a counter is named after; `add_rms_norm` also ends in `rms_norm`."""
    return max((op for op in OPS if counter.endswith(op)), key=len, default="")


def telemetry(bench: Bench) -> None:
    counted = bench.backend.counters()
    for name, value in {**counted.counters, **counted.gauges}.items():
        if not name or not math.isfinite(value):
            raise Failure(f"`{name}` is {value}")


def cost(bench: Bench) -> None:
    from halogen_core.spi import StepShape

    def shape(prefill: int, decode: int, kv: int) -> StepShape:
        return StepShape(prefill_tokens=prefill, decode_sequences=decode, kv_tokens=kv)

    for i in range(40):
        tokens = 8 * (1 + i % 8)
        bench.backend.observe(shape(tokens, i % 5, 50 * (i % 7)), 1e-3 + 1e-5 * tokens)
    answer = bench.backend.cost(shape(32, 2, 100))
    if answer is None:
        return
    if not 0 < answer.p50 <= answer.p95 < 10:
        raise Failure(f"after steps of 1 to 2 ms the cost is {answer}")
    more = bench.backend.cost(shape(512, 2, 100))
    if more is not None and more.p50 < answer.p50:
        raise Failure("a longer prompt is predicted to be faster")
