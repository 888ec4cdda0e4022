# ruff: noqa: E501, ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0915, PLR0917
# Triton's language: constants in capitals, pointers without types.
"""Prefill attention for Hopper, in Gluon: one warp fetches, two groups of four warps compute.

FlashAttention-3 (Shah et al., 2024) over a paged cache: K and V come by TMA in boxes of 64 keys, so
blocks of 64 serve tiles of 128 keys; while one group takes exponentials the other one's products run,
and within a group the scores of the next tile are under way with the values of the last one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(128)
"""Query rows of a program: 64 for each group."""
KEYS = gl.constexpr(128)
"""Keys of a tile."""
BOX = gl.constexpr(64)
"""A box of TMA: so many keys by so many elements of them."""
D = gl.constexpr(128)

# names that differ between Triton 3.6 and 3.9
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_tile = gl.shared_memory_descriptor
_reinterpret = getattr(_tile, "reinterpret", None) or _tile._reinterpret


def boxes(data):
    """A descriptor of a layer's K and V [N, 2, Hkv, B, 128] as rows of 128, read in boxes of 64 by 64."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = data.view(-1, 128)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [64, 64], layout)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _fetch_tile(kv, low, high, full, boxes, stage):
    """K or V of a tile: two panels of 64 columns, each two boxes of keys from pool rows low and high."""
    mbarrier.expect(full, KEYS * D * 2)
    for panel in gl.static_range(2):
        _fetch(kv, [low, panel * BOX], full, boxes.index(stage * 4 + panel * 2))
        _fetch(kv, [high, panel * BOX], full, boxes.index(stage * 4 + panel * 2 + 1))


@gluon.jit
def _row_of(table, n0, last, head, HKV: gl.constexpr, PAGE: gl.constexpr):
    """Pool row of K of key n0; of some other key past the end."""
    block = gl.load(table + gl.minimum(n0 // PAGE, last))
    return (block * (2 * HKV) + head) * PAGE + n0 % PAGE


@gluon.jit
def _fetcher(
    kv, table, n, last, head, k_boxes, v_boxes, k_full, v_full, k_free, v_free,
    HKV: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of K and V, each as soon as both groups have left its place."""
    for i in range(n):
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        low = _row_of(table, i * KEYS, last, head, HKV, PAGE)
        high = _row_of(table, i * KEYS + BOX, last, head, HKV, PAGE)
        mbarrier.wait(k_free.index(stage), phase)
        _fetch_tile(kv, low, high, k_full.index(stage), k_boxes, stage)
        mbarrier.wait(v_free.index(stage), phase)
        _fetch_tile(kv, low + HKV * PAGE, high + HKV * PAGE, v_full.index(stage), v_boxes, stage)


@gluon.jit
def _softmax(s, m_i, l_i, unit):
    """Weights [64, KEYS] of scores, and the new maxima (log2 units), sums and factors of the old."""
    m_new = gl.maximum(m_i, gl.max(s, 1) * unit)
    p = gl.exp2(s * unit - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _step(
    i, q_s, k_s, v_s, k_full, v_full, k_free, v_free, acc, p, m_i, l_i, before, unit,
    G: gl.constexpr, LOW: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Scores and weights of tile i, values of tile i - 1."""
    stage, old = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    zero = gl.zeros([64, KEYS], gl.float32, L)
    keys = k_s.index(stage).permute((1, 0))
    s = warpgroup_mma(q_s, keys, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(old), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_s.index(old), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    _barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    if MASKED:
        s = _seen(s, i, before, G, LOW, L)
    weights, m_i, l_i, alpha = _softmax(s, m_i, l_i, unit)
    p = gl.convert_layout(weights.to(q_s.dtype), gl.DotOperandLayout(0, L, 2))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _barrier()
    mbarrier.arrive(v_free.index(old), count=1)
    return acc * alpha[:, None], p, m_i, l_i


@gluon.jit
def _seen(s, i, before, G: gl.constexpr, LOW: gl.constexpr, L: gl.constexpr):
    """Scores of tile i without those of keys that come after their query."""
    positions = before + (LOW + gl.arange(0, 64, layout=gl.SliceLayout(1, L))) // G
    keys = i * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, L))
    return gl.where(keys[None, :] <= positions[:, None], s, float("-inf"))


@gluon.jit
def _group(
    q, out, q_s, k_s, v_s, k_full, v_full, k_free, v_free, n, before, rows, inside, q_stride, unit,
    HQ: gl.constexpr, G: gl.constexpr, LOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Query rows LOW to LOW + 63: row r is token r // G of those from q on, head r % G.

    `rows` of the program's are valid; `inside`: keys of the last tile that are in the sequence.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if n > 0:
        r = LOW + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
        at = (r // G).to(gl.int64) * q_stride + r % G * D
        q_s.store(gl.load(q + at[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0))
        fence_async_shared()
        _barrier()
        acc = gl.zeros([64, D], gl.float32, L)
        m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, L))
        l_i = gl.zeros([64], gl.float32, gl.SliceLayout(1, L))
        mbarrier.wait(k_full.index(0), 0)
        zero = gl.zeros([64, KEYS], gl.float32, L)
        s = warpgroup_mma(q_s, k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        _barrier()
        mbarrier.arrive(k_free.index(0), count=1)
        weights, m_i, l_i, _ = _softmax(_seen(s, 0, before, G, LOW, L), m_i, l_i, unit)
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, L, 2))
        seen = gl.maximum(gl.minimum((before + 1) // KEYS, n), 1)
        for i in range(1, seen):
            acc, p, m_i, l_i = _step(
                i, q_s, k_s, v_s, k_full, v_full, k_free, v_free, acc, p, m_i, l_i, before, unit, G,
                LOW, STAGES, False, L,
            )  # fmt: skip
        for i in range(seen, n):
            acc, p, m_i, l_i = _step(
                i, q_s, k_s, v_s, k_full, v_full, k_free, v_free, acc, p, m_i, l_i, before, unit, G,
                LOW, STAGES, True, L,
            )  # fmt: skip
        values = v_s.index((n - 1) % STAGES)
        mbarrier.wait(v_full.index((n - 1) % STAGES), ((n - 1) // STAGES) & 1)
        if inside < KEYS:
            # slots past the end may hold anything, and 0 times a NaN is a NaN; the groups write alike
            v = values.load(WIDE)
            _barrier()
            own = gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE)) < inside
            values.store(gl.where(own[:, None], v, 0.0))
            fence_async_shared()
            _barrier()
        acc = warpgroup_mma(p, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        r = LOW + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
        at = (r // G * HQ + r % G) * D
        result = (acc / l_i[:, None]).to(dtype)
        gl.store(out + at[:, None] + d[None, :], result, mask=(r < rows)[:, None])


@gluon.jit(do_not_specialize=["S", "table_stride"])
def prefill(
    q, kv, tables, seq_lens, starts, out, qk_scale, S, table_stride, q_stride,
    HQ: gl.constexpr, HKV: gl.constexpr, PAGE: gl.constexpr, S_PAD: gl.constexpr,
    MAX_DECODE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sequences with more than MAX_DECODE queries; grid and rows as in `attention_kernels.prefill`.

    `kv` describes the pool of a layer as [N * 2 * Hkv * B, 128] with boxes of 64 by 64.
    """
    G: gl.constexpr = HQ // HKV
    BQ: gl.constexpr = ROWS // G
    dtype: gl.constexpr = q.dtype.element_ty
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    index = gl.num_programs(0) - 1 - gl.program_id(0)
    head = gl.program_id(1)
    s = gl.arange(0, S_PAD, layout=LINE)
    start = gl.load(starts + s, mask=s < S, other=0)
    queries = gl.load(starts + s + 1, mask=s < S, other=0) - start
    blocks = gl.where((s < S) & (queries > MAX_DECODE), (queries + BQ - 1) // BQ, 0)
    cum = gl.associative_scan(blocks, 0, _add)
    seq = gl.minimum(gl.sum((cum <= index).to(gl.int32), 0), S - 1)
    token = (index - gl.max(gl.where(cum <= index, cum, 0), 0)) * BQ
    length = gl.load(seq_lens + seq)
    first_row = gl.load(starts + seq)
    n_q = gl.load(starts + seq + 1) - first_row
    before = length - n_q + token
    # programs past the last block have no tiles, hence nothing to do
    n = gl.where(index < gl.max(cum, 0), gl.cdiv(gl.minimum(before + BQ, length), KEYS), 0)
    rows = gl.minimum(n_q - token, BQ) * G
    inside = length - (n - 1) * KEYS
    own_q = q + (first_row + token).to(gl.int64) * q_stride + head * (G * D)
    own_out = out + ((first_row + token).to(gl.int64) * HQ + head * G) * D
    table = tables + seq.to(gl.int64) * table_stride

    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * 4, BOX, BOX], SHARED)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * 4, BOX, BOX], SHARED)
    k_s = _reinterpret(k_boxes, dtype, [STAGES, KEYS, D], SHARED)
    v_s = _reinterpret(v_boxes, dtype, [STAGES, KEYS, D], SHARED)
    q_s = gl.allocate_shared_memory(dtype, [2, 64, D], SHARED)
    # K and V are there, and both groups are done with them, for each stage
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    _barrier()
    unit = qk_scale * LOG2E
    gl.warp_specialize(
        [
            (_group, (own_q, own_out, q_s.index(0), k_s, v_s, k_full, v_full, k_free, v_free, n,
                before, rows, inside, q_stride, unit, HQ, G, 0, STAGES)),
            (_group, (own_q, own_out, q_s.index(1), k_s, v_s, k_full, v_full, k_free, v_free, n,
                before, rows, inside, q_stride, unit, HQ, G, 64, STAGES)),
            (_fetcher, (kv, table, n, (length - 1) // PAGE, head, k_boxes, v_boxes, k_full, v_full,
                k_free, v_free, HKV, PAGE, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
