"""L1: qkv_rope_store and attention, over paged pools in which every unowned slot is NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case
from halogen_conformance.cases.making import op_cases
from halogen_conformance.oracle import operations as exact
from halogen_conformance.oracle.numbers import (
    EPSILON,
    EXACT,
    Arithmetic,
    Values,
    farther,
    kv_error,
    kv_values,
)
from halogen_conformance.steps import Span, arrange, batch_of, fill, spans
from halogen_core.spi import (
    AttentionSpec,
    KVSpec,
    OpSignature,
    RopeSpec,
    RopeStyle,
    WeightRole,
)

KV_DTYPES = ("f32", "f16", "bf16", "q8_0", "f8_e5m2")
BLOCK_SIZES = (8, 16, 32, 64, 128)
MIXED = spans((5, 5), (33, 1), (17, 16), (1, 1), (40, 7))


def attention_spec(heads: int = 4, kv_heads: int = 2, dim: int = 64, **more: Any) -> AttentionSpec:
    """A layer; its scale is not the usual one, so that ignoring it shows."""
    options = {"scale": 1.3 / dim**0.5, **more}
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **options)


def rope_spec(dim: int, style: RopeStyle = RopeStyle.NEOX, theta: float = 1e4) -> RopeSpec:
    """Plain rotary frequencies over `dim` elements."""
    return RopeSpec(
        dim=dim,
        inv_freq=tuple(float(f) for f in theta ** (-np.arange(0, dim, 2) / dim)),
        style=style,
    )


def cases() -> Iterator[Case]:
    """All of them."""
    yield from store_cases()
    yield from attention_cases()
    yield from hard_cases()


def _signature(op: str, spec: AttentionSpec, kv: str, block_size: int) -> OpSignature:
    return OpSignature(op=op, attention=spec, kv_dtype=kv, block_size=block_size)


# ---------------------------------------------------------------- qkv_rope_store


def store_cases() -> Iterator[Case]:
    def make(name: str, why: str, kv: str = "f32", block_size: int = 16, **options: Any) -> Any:
        spec = options.pop("spec", None) or attention_spec(rope=rope_spec(64))
        run = partial(store, spec=spec, kv_dtype=kv, block_size=block_size, **options)
        sign = _signature("qkv_rope_store", spec, kv, block_size)
        return op_cases("qkv_rope_store", name, why, run, signature=sign, column=kv)

    slot = "a slot computed from the wrong block or offset; a neighbour overwritten"
    for block_size in BLOCK_SIZES:
        yield from make(f"B{block_size}", slot, block_size=block_size)
    for kv in KV_DTYPES:
        yield from make(f"kv-{kv}", "K or V stored in another rounding or layout", kv)
    for dim in (64, 80, 96, 128, 192, 256):
        for style in RopeStyle:
            spec = attention_spec(dim=dim, rope=rope_spec(dim, style))
            yield from make(f"D{dim}-{style}", "elements paired the other way", spec=spec)
    for heads, kv_heads in ((4, 4), (8, 2), (8, 1)):
        spec = attention_spec(heads, kv_heads, rope=rope_spec(64))
        yield from make(f"H{heads}-{kv_heads}", "Q, K and V split at the wrong head", spec=spec)
    spec = attention_spec(rope=rope_spec(32))
    yield from make("partial", "elements beyond the rotary dim must pass through", spec=spec)
    spec = attention_spec(rope=attrs.evolve(rope_spec(64), attention_factor=1.37))
    yield from make("yarn-factor", "cos and sin times the attention factor", spec=spec)
    yield from make("no-rope", "a layer without positions", spec=attention_spec())
    spec = attention_spec(rope=rope_spec(64), norm_eps=1e-4)
    yield from make(
        "qk-norm", "norm after rotation, over all heads, or lost", spec=spec, norms=True
    )
    yield from make(
        "far", "angles at large positions", block_size=64, which=spans((9000, 3)), layers=1
    )
    yield from make("T0", "an empty step writes nothing", which=spans((5, 0)))
    yield from make("one", "a single token", which=spans((17, 1)))


def store(
    bench: Bench,
    *,
    spec: AttentionSpec,
    kv_dtype: str,
    block_size: int,
    which: Sequence[Span] = MIXED,
    norms: bool = False,
    layers: int = 2,
) -> None:
    layer = layers - 1
    pool_spec = KVSpec(
        num_layers=layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
        block_size=block_size,
    )
    plan = arrange(bench.rng, which, block_size)
    filled = fill(bench, plan, pool_spec)
    batch = batch_of(plan)
    meta = bench.step(batch)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = bench.draw(batch.num_tokens, width)
    weights = [bench.draw(spec.head_dim) * 0.2 + 1 for _ in range(2)] if norms else [None, None]
    packed = [None if w is None else bench.norm_weight(w) for w in weights]
    got = bench.download(
        bench.backend.ops.qkv_rope_store(
            bench.activation(qkv), filled.kv, layer, meta, spec, q_norm=packed[0], k_norm=packed[1]
        )
    )
    truth = exact.qkv_rope(qkv, batch.positions, spec, *weights)
    own = exact.qkv_rope(qkv, batch.positions, spec, *weights, bench.arithmetic)
    slack = 4 * float(batch.positions.max(initial=0)) * EPSILON["f32"]
    rows = (len(qkv), -1) if len(qkv) else (0, spec.num_heads * spec.head_dim)
    bench.compare(
        got, truth[0].reshape(rows), own[0].reshape(rows), what="queries", length=1, slack=slack
    )
    _check_written(bench, filled, batch.slot_mapping, layer, truth[1:], own[1:], slack)
    filled.unchanged_except(bench, batch.slot_mapping, "slots of nobody and of older tokens")


def _check_written(
    bench: Bench,
    filled: Any,
    slots: Values,
    layer: int,
    truth: Sequence[Values],
    own: Sequence[Values],
    slack: float,
) -> None:
    """What the layer's new slots hold, and that other layers' slots are as they were."""
    spec, size = filled.blocks.spec, filled.plan.block_size
    data = bench.backend.kv_export(filled.kv, list(range(filled.kv.num_blocks))).data
    at = np.asarray(slots, np.int64)
    written = kv_values(data[at // size, layer, :, at % size], spec.dtype)
    for kind, name in enumerate(("keys", "values")):
        values = truth[kind]
        stored = written[:, kind] if len(at) else np.zeros_like(values)
        extra = kv_error(values, spec.dtype)
        scale = np.sqrt(np.mean(values**2, axis=-1, keepdims=True)) if len(at) else 1.0
        storage = float((extra / scale).max(initial=0.0))
        bench.compare(stored, values, own[kind], what=name, slack=slack + storage)
    if layer and len(at):
        others = filled.blocks.data[at // size, :layer, :, at % size]
        after = data[at // size, :layer, :, at % size]
        if not np.array_equal(others, after):
            from halogen_conformance.case import Failure

            raise Failure("another layer's slots were written")


# ---------------------------------------------------------------- attention


def _make(
    name: str, why: str, kv: str = "f32", block_size: int = 16, **options: Any
) -> Iterator[Case]:
    spec = options.pop("spec", None) or attention_spec()
    required = options.pop("required", True)
    run = partial(attend, spec=spec, kv_dtype=kv, block_size=block_size, **options)
    sign = _signature("attention", spec, kv, block_size)
    return op_cases("attention", name, why, run, signature=sign, column=kv, required=required)


def attention_cases() -> Iterator[Case]:
    """Shapes, storage and blocks."""
    for heads, kv_heads in ((4, 4), (4, 1), (8, 1), (6, 2)):
        spec = attention_spec(heads, kv_heads)
        yield from _make(f"H{heads}-{kv_heads}", "query heads on the wrong KV head", spec=spec)
    for dim in (64, 80, 96, 128, 192, 256):
        spec = attention_spec(dim=dim)
        yield from _make(f"D{dim}", "scale or tile wrong for one head dim", spec=spec)
    for kv in KV_DTYPES:
        yield from _make(f"kv-{kv}", "storage decoded wrongly", kv)
    for block_size in BLOCK_SIZES:
        edges = spans(
            (block_size - 1, 1), (block_size, 1), (block_size + 1, 1), (2 * block_size + 1, 3)
        )
        yield from _make(
            f"B{block_size}-edges",
            "the first token of a page, or the last, is lost",
            block_size=block_size,
            which=edges,
        )
    shapes = {
        "T0": (spans(), "an empty step"),
        "idle": (spans((9, 0), (20, 2)), "a sequence without queries in the step"),
        "decode": (spans(*((n, 1) for n in (1, 2, 15, 16, 17, 31, 40, 64))), "decode of many"),
        "prefill": (spans((48, 48), (3, 3)), "a query sees what comes after it"),
        "chunk": (spans((70, 20)), "positions of a later chunk are shifted"),
        "many": (spans(*((7 + i, 1) for i in range(33))), "more sequences than a tile"),
    }
    for name, (which, why) in shapes.items():
        yield from _make(name, why, which=which)


def hard_cases() -> Iterator[Case]:
    """Windows, softcap, sinks, huge logits, long contexts, refusals."""
    long = spans((2048, 1), (2047, 2))
    small = attention_spec(2, 1)
    yield from _make(
        "context2048", "a block table ignored past some length", spec=small, which=long
    )
    for window in (1, 15, 16, 17, 64):
        yield from _make(
            f"window{window}",
            "one key too many or too few at the window's edge",
            spec=attention_spec(window=window),
            which=spans((50, 1), (40, 40), (12, 3), (33, 17)),
        )
    spec = attention_spec(softcap=20.0)
    yield from _make("softcap", "softcap lost or after the mask", spec=spec, q_std=8.0)
    yield from _make("sinks", "the sink is lost, or gets a value", sinks=True)
    spec = attention_spec(window=9, softcap=15.0)
    yield from _make("everything", "sinks, window and softcap together", spec=spec, sinks=True)
    yield from _make("huge", "exp overflows without the row's maximum", q_std=300.0)
    yield from _make("tiny", "uniform weights", q_std=1e-4)
    yield from _make("nan", "a NaN query must not reach other rows", spoil=True)
    uneven = attention_spec(3, 2)
    yield from _make(
        "heads-uneven", "heads that do not divide are refused", spec=uneven, required=False
    )


def attend(
    bench: Bench,
    *,
    spec: AttentionSpec,
    kv_dtype: str,
    block_size: int,
    which: Sequence[Span] = MIXED,
    sinks: bool = False,
    q_std: float = 1.0,
    spoil: bool = False,
) -> None:
    pool_spec = KVSpec(
        num_layers=2,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=kv_dtype,
        block_size=block_size,
    )
    plan = arrange(bench.rng, which, block_size)
    filled = fill(bench, plan, pool_spec)
    batch = batch_of(plan)
    meta = bench.step(batch)
    q = bench.draw(batch.num_tokens, spec.num_heads * spec.head_dim, std=q_std)
    if spoil:
        q[2, 5] = np.nan
    extra = bench.draw(spec.num_heads, std=2.0) if sinks else None
    packed = None if extra is None else bench.weight(extra, role=WeightRole.SINKS)
    history = [filled.values(s, 1) for s in range(len(plan.spans))]
    keys, values = [k for k, _ in history], [v for _, v in history]
    given, starts = bench.activation(q), [int(i) for i in batch.query_start_loc]
    if spec.num_heads % spec.num_kv_heads:
        bench.backend.ops.attention(given, filled.kv, 1, meta, spec, sinks=packed)
        return

    def oracle(a: Arithmetic) -> Values:
        return exact.attention(q, keys, values, spec, extra, a, starts=starts)

    # near ties of huge logits fall as the rounding goes: that of logits or that of keys
    fused = attrs.evolve(bench.arithmetic, fused=True)
    bench.measure(
        lambda: bench.backend.ops.attention(given, filled.kv, 1, meta, spec, sinks=packed),
        truth := oracle(EXACT),
        farther(truth, oracle(bench.arithmetic), oracle(fused)),
        length=spec.head_dim + max((s.length for s in which), default=0),
        keeps=[given],
        # a logit is known to its own rounding, which the softmax passes on
        slack=16 * EPSILON["f32"] * q_std,
    )
    filled.unchanged_except(bench, np.zeros(0, np.int64), "the cache after attention")
