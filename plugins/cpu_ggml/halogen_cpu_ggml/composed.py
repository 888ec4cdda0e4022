"""Ops composed of ggml's own: norms, gates, rotary store, gathered attention, experts."""

from __future__ import annotations

import numpy as np

from halogen_core.spi import Activation, AttentionSpec, KVCache, MoESpec, RopeStyle, StepMeta
from halogen_cpu_ggml.binding import F32, I32
from halogen_cpu_ggml.inputs import StepInputs
from halogen_cpu_ggml.kv_rows import RowPool
from halogen_cpu_ggml.recorder import columns, joined
from halogen_cpu_ggml.tape import Node, Tape

GELU_A, GELU_B = 2 * np.sqrt(2 / np.pi), 0.044715
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
ROPE_MODE = {RopeStyle.INTERLEAVED: 0, RopeStyle.NEOX: 2}
DESCENDING = 1


def rms_norm(tape: Tape, x: Node, weight: Node, eps: float) -> Node:
    """Over the last axis."""
    return tape.op("mul", tape.op("rms_norm", x, eps, shape=x.shape), weight, shape=x.shape)


def softcapped(tape: Tape, x: Node, scale: float, softcap: float | None) -> Node:
    """`x * scale`, then `softcap * tanh(x / softcap)`."""
    if softcap is None:
        return tape.op("scale", x, scale, shape=x.shape)
    inner = tape.op("scale", x, scale / softcap, shape=x.shape)
    return tape.op("scale", tape.op("tanh", inner, shape=x.shape), softcap, shape=x.shape)


def gated(tape: Tape, gate: Node, up: Node, kind: Activation) -> Node:
    """`act(gate) * up`, both [T, F]."""
    shape = gate.shape
    if kind is Activation.SILU:
        return tape.op("swiglu_split", gate, up, shape=shape)
    if kind is Activation.SWIGLU_OAI:
        return tape.op("swiglu_oai", gate, up, OAI_ALPHA, OAI_LIMIT, shape=shape)
    # gelu(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)); ggml's own looks it up in float16
    gate = tape.op("cont", gate, shape=shape)
    square = tape.op("mul", gate, gate, shape=shape)
    cube = tape.op("scale", tape.op("mul", square, gate, shape=shape), GELU_B, shape=shape)
    inner = tape.op("scale", tape.op("add", gate, cube, shape=shape), GELU_A, shape=shape)
    gelu = tape.op("mul", gate, tape.op("sigmoid", inner, shape=shape), shape=shape)
    return tape.op("mul", gelu, up, shape=shape)


# ---------------------------------------------------------------- attention


def rope_store(
    tape: Tape,
    qkv: Node,
    kv: KVCache,
    layer: int,
    meta: StepMeta[Node],
    spec: AttentionSpec,
    *,
    norms: tuple[Node | None, Node | None],
) -> Node:
    """Norm and rotate Q and K per head, write K and V to their slots; returns Q [T, Hq D]."""
    pool = kv.payload
    assert isinstance(pool, RowPool)
    hq, hkv, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q, k, v = columns(tape, qkv, (hq * d, hkv * d, hkv * d))
    rotated = [
        _rotate(tape, _heads(tape, x, h, d), meta.positions, spec, norm)
        for x, h, norm in ((q, hq, norms[0]), (k, hkv, norms[1]))
    ]
    k = _flat(tape, rotated[1])
    v = tape.op("cont", v, shape=v.shape)
    if kv.layout.spec.dtype == "q8_0":
        k, v = _spoilt_by_group(tape, k), _spoilt_by_group(tape, v)
    for side, rows in ((0, k), (1, v)):
        store = pool.tensor(tape, layer, side)
        args = (store, rows, meta.slot_mapping)
        tape.op("set_rows", *args, shape=store.shape, dtype=store.dtype, view=store)
    return _flat(tape, rotated[0])


def _spoilt_by_group(tape: Tape, rows: Node) -> Node:
    """Rows [T, n] of which a group of 32 with a NaN or an infinity is NaN as a whole.

    The scale of a q8_0 group is its largest magnitude, and ggml's maximum leaves NaNs out.
    """
    t, n = rows.shape
    groups = tape.view(rows, (32, n // 32, t), (32 * 4, n * 4))
    poison = tape.op("scale", groups, 0.0, shape=groups.shape)
    poison = tape.op("sum_rows", poison, shape=(t, n // 32, 1))
    return tape.view(tape.op("add", groups, poison, shape=groups.shape), (n, t), (n * 4,))


def _heads(tape: Tape, x: Node, heads: int, d: int) -> Node:
    """[T, H D], maybe a strided view, as [T, H, D]."""
    stride = x.base.shape[-1] if x.base is not None else x.shape[1]
    return tape.view(x, (d, heads, x.shape[0]), (d * 4, stride * 4))


def _flat(tape: Tape, x: Node) -> Node:
    t, h, d = x.shape
    whole = x if x.base is None else tape.op("cont", x, shape=x.shape)
    return tape.view(whole, (h * d, t), (h * d * 4,))


def _rotate(tape: Tape, x: Node, positions: Node, spec: AttentionSpec, norm: Node | None) -> Node:
    if norm is not None:
        x = rms_norm(tape, x, norm, spec.norm_eps)
    if spec.rope is None:
        return x
    rope = spec.rope
    key = ("rope factors", rope)
    if key not in tape.memo:
        with np.errstate(divide="ignore"):
            tape.memo[key] = tape.constant((1.0 / np.array(rope.inv_freq)).astype(np.float32))
    mode = ROPE_MODE[rope.style]
    # base 1 leaves each pair's frequency to the factors, which divide the angle
    rest = (rope.dim, mode, 0, 1.0, 1.0, 0.0, rope.attention_factor, 0.0, 0.0)
    return tape.op("rope_ext", x, positions, tape.memo[key], *rest, shape=x.shape)


def attention(
    tape: Tape,
    q: Node,
    kv: KVCache,
    layer: int,
    inputs: StepInputs,
    spec: AttentionSpec,
    *,
    sinks: Node | None,
) -> Node:
    """Every sequence's KV gathered side by side, dense attention under a mask: correct, slow."""
    pool = kv.payload
    assert isinstance(pool, RowPool)
    t, c = q.shape[0], inputs.capacity.kv
    hq, hkv, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    block = kv.layout.spec.block_size
    k, v = (pool.gather(tape, layer, side, inputs.gather_node(block)) for side in (0, 1))
    k = tape.view(k, (d, c, hkv), (hkv * d * 4, d * 4))
    v = tape.view(v, (d, c, hkv), (hkv * d * 4, d * 4))
    v = tape.op("permute", v, 1, 0, 2, 3, shape=(hkv, d, c), view=v)
    v = tape.op("cont", v, shape=(hkv, d, c))
    query = tape.view(joined(tape, q), (d, t, hq), (hq * d * 4, d * 4))
    scores = tape.op("mul_mat", k, query, shape=(hq, t, c))
    scale = spec.scale
    if spec.softcap is not None:
        scores, scale = softcapped(tape, scores, spec.scale, spec.softcap), 1.0
    mask = inputs.mask_node(block, spec.window)
    weights = tape.op("soft_max_ext", scores, mask, scale, 0.0, shape=scores.shape)
    if sinks is not None:
        tape.lib.fn["soft_max_add_sinks"](weights.tensor, tape.use(sinks).tensor)
    out = tape.op("mul_mat", v, weights, shape=(hq, t, d))
    out = tape.op("permute", out, 0, 2, 1, 3, shape=(t, hq, d), view=out)
    out = tape.op("cont", out, shape=(t, hq, d))
    return tape.view(out, (hq * d, t), (hq * d * 4,))


# ---------------------------------------------------------------- mixture of experts


def moe(tape: Tape, x: Node, router: Node, gate_up: list[Node], down: Node, spec: MoESpec) -> Node:
    """Route, gather the experts' products, weight and sum; `gate_up` is one stack or two."""
    t, h = x.shape
    k, f = spec.top_k, down.shape[2]
    ids, share = _route(tape, x, router, spec)
    rows = tape.view(x, (h, 1, t), (h * 4, h * 4))
    products = []
    for experts in gate_up:
        n = experts.shape[1]
        product = tape.op("mul_mat_id", experts, rows, ids, shape=(t, k, n))
        products.append(tape.view(product, (n, k * t), (n * 4,)))
    gate, up = products if len(products) == 2 else columns(tape, products[0], (f, f))
    hidden = gated(tape, gate, up, spec.activation)
    hidden = tape.view(hidden, (f, k, t), (f * 4, k * f * 4))
    out = tape.op("mul_mat_id", down, hidden, ids, shape=(t, k, h))
    out = tape.op("mul", out, share, shape=(t, k, h))
    total = tape.view(out, (h, t), (k * h * 4,))
    for i in range(1, k):
        more = tape.view(out, (h, t), (k * h * 4,), i * h * 4)
        total = tape.op("add", total, more, shape=(t, h))
    return total if k > 1 else tape.op("cont", total, shape=(t, h))


def _route(tape: Tape, x: Node, router: Node, spec: MoESpec) -> tuple[Node, Node]:
    """Chosen experts [T, k] int32 and their weights [T, k, 1]."""
    t, e, k = x.shape[0], spec.num_experts, spec.top_k
    scores = tape.op("mul_mat", router, x, shape=(t, e))
    if spec.gating == "softmax":
        chances = tape.op("soft_max_ext", scores, None, 1.0, 0.0, shape=(t, e))
    else:
        chances = tape.op("sigmoid", scores, shape=(t, e))
    order = tape.op("argsort", chances, DESCENDING, shape=(t, e), dtype=I32)
    ids = tape.op(
        "view_4d", order, k, t, 1, 1, e * 4, e * 4 * t, e * 4 * t, 0,
        shape=(t, k), dtype=I32, view=order,
    )  # fmt: skip
    each = tape.view(chances, (1, e, t), (4, e * 4))
    share = tape.op("get_rows", each, ids, shape=(t, k, 1))
    if spec.normalize_top_k:
        flat = tape.view(share, (k, t), (k * 4,))
        total = tape.op("sum_rows", flat, shape=(t, 1))
        flat = tape.op("div", flat, total, shape=(t, k))
        share = tape.view(flat, (1, k, t), (4, k * 4))
    if spec.weight_scale != 1.0:
        share = tape.op("scale", share, spec.weight_scale, shape=(t, k, 1))
    return ids, share


__all__ = ["F32", "attention", "gated", "moe", "rms_norm", "rope_store", "softcapped"]
