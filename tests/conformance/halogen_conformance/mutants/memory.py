"""Mutants of arrays, weights and memory."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from halogen_conformance.mutants.registry import mutant
from halogen_core.spi import OutOfMemory


@mutant("L2/leaks/cycles")
def pools_never_freed(backend):
    """Every KV pool is kept alive"""
    right, kept = backend.kv_alloc, []

    def kv_alloc(layout, num_blocks):
        kept.append(right(layout, num_blocks))
        return kept[-1]

    backend.kv_alloc = kv_alloc


@mutant("L2/leaks/cycles")
def steps_remembered(backend):
    """A small record of every step is kept: objects grow, bytes hardly do"""
    right, kept = backend.upload_step, []

    def upload_step(batch):
        kept.append({"tokens": [batch.num_tokens]})
        return right(batch)

    backend.upload_step = upload_step


@mutant("L2/arrays/copies")
def upload_shares_memory(backend):
    """An uploaded array is a view of the caller's"""
    backend.upload = lambda host: torch.from_numpy(np.ascontiguousarray(host))


@mutant("L2/arrays/copies")
def download_shares_memory(backend):
    """A downloaded array is a view of the device's"""
    backend.download = lambda array: array.numpy()


@mutant("L2/arrays/round-trip")
def int64_narrowed(backend):
    """int64 arrays become int32 on the device"""
    right = backend.upload

    def upload(host):
        return right(host.astype(np.int32) if host.dtype == np.int64 else host)

    backend.upload = upload


@mutant("L2/arrays/round-trip")
def strides_ignored(backend):
    """Host views are copied as if they were contiguous"""
    right = backend.upload

    def upload(host):
        if host.flags.c_contiguous or not host.size:
            return right(host)
        flat = host.base if host.base is not None else host
        return right(flat.reshape(-1)[: host.size].reshape(host.shape))

    backend.upload = upload


@mutant("L2/weights/Q4_K-linear")
def unpack_gives_rounded_values(backend):
    """Packing passes through 8 bits"""
    right = backend.unpack

    def unpack(weight):
        values = right(weight)
        step = np.abs(values).max() / 127
        return (np.round(values / step) * step).astype(np.float32)

    backend.unpack = unpack


@mutant("L2/weights/Q8_0-experts")
def experts_flattened(backend):
    """Experts are packed as one matrix"""
    right = backend.pack

    def pack(parts, role):
        packed = right(parts, role)
        if len(packed.shape) == 3:
            flat = (packed.shape[0] * packed.shape[1], packed.shape[2])
            return attrs.evolve(packed, shape=flat, payload=packed.payload.reshape(flat))
        return packed

    backend.pack = pack


@mutant("L2/weights/damaged")
def damaged_weights_padded(backend):
    """A tensor with too few bytes is padded with zeros"""
    right = backend.pack

    def pack(parts, role):
        whole = [_padded(part) for part in parts]
        return right(whole, role)

    backend.pack = pack


def _padded(part):
    from halogen_core.spi import FORMATS

    want = FORMATS[part.format].nbytes(int(np.prod(part.shape)))
    data = np.zeros(want, np.uint8)
    data[: len(part.data)] = part.data[:want]
    return attrs.evolve(part, data=data)


def _with_tiers(backend, change):
    right = backend.memory
    backend.memory = lambda: tuple(change(tier) for tier in right())


@mutant("L2/tiers/honest")
def more_memory_than_there_is(backend):
    """The memory report adds device and host memory, which are the same"""
    _with_tiers(
        backend, lambda tier: attrs.evolve(tier, total=2 * tier.total + (1 << 40), free=tier.free)
    )


@mutant("L2/tiers/honest")
def free_above_total(backend):
    """More is free than there is in all"""
    _with_tiers(backend, lambda tier: attrs.evolve(tier, free=tier.total + 1))


@mutant("L2/plan/exact")
def plan_exceeds_the_pool(backend):
    """An exact pool is exceeded by a quarter"""
    right = backend.plan

    def plan(request):
        made = right(request)
        return attrs.evolve(made, num_blocks=made.num_blocks * 5 // 4)

    backend.plan = plan


@mutant("L2/plan/limits")
def reserve_ignored(backend):
    """host_reserve is not left to others"""
    right = backend.plan
    backend.plan = lambda request: right(attrs.evolve(request, host_reserve=0, kv_ratio=1.0))


@mutant("L2/plan/impossible")
def plan_always_succeeds(backend):
    """A plan for more than there is comes back with one block"""
    right = backend.plan

    def plan(request):
        try:
            return right(request)
        except OutOfMemory:
            small = attrs.evolve(
                request, static_bytes=0, kv_bytes=1 << 20, min_blocks=1, host_reserve=0
            )
            return right(small)

    backend.plan = plan


@mutant("L2/out-of-memory/recovers")
def out_of_memory_untyped(backend):
    """Running out of memory raises whatever the allocator raises (met while building)"""
    right = backend.kv_alloc

    def kv_alloc(layout, num_blocks):
        try:
            return right(layout, num_blocks)
        except OutOfMemory as exc:
            raise RuntimeError("can't allocate memory") from exc

    backend.kv_alloc = kv_alloc


@mutant("L2/out-of-memory/recovers")
def ruined_by_out_of_memory(backend):
    """After running out of memory once, no allocation succeeds"""
    right, ruined = backend.kv_alloc, []

    def kv_alloc(layout, num_blocks):
        if ruined:
            raise OutOfMemory("the arena is broken")
        try:
            return right(layout, num_blocks)
        except Exception as exc:
            ruined.append(exc)
            raise OutOfMemory("no memory") from exc

    backend.kv_alloc = kv_alloc


@mutant("L2/arrays/step")
def step_positions_from_zero(backend):
    """A step's positions start at zero for every sequence"""
    right = backend.upload_step

    def upload_step(batch):
        meta = right(batch)
        return attrs.evolve(meta, positions=meta.positions * 0)

    backend.upload_step = upload_step


@mutant("L2/arrays/threads")
def bound_to_its_thread(backend):
    """Ops fail outside the thread that opened the backend"""
    import threading

    owner, right = threading.get_ident(), backend.ops.linear

    def linear(x, weight, *, bias=None):
        if threading.get_ident() != owner:
            raise RuntimeError("invalid device context")
        return right(x, weight, bias=bias)

    backend.ops.linear = linear


@mutant("L2/advice/cost")
def cost_model_upside_down(backend):
    """More tokens are predicted to take less time"""
    from halogen_core.spi import Cost

    backend.cost = lambda shape: Cost(
        p50=1.0 / (1 + shape.prefill_tokens), p95=2.0 / (1 + shape.prefill_tokens)
    )
