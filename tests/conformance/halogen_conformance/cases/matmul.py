"""L1: linear, mlp, moe, logits; packing and unpacking of weights (L2 asks for the bytes)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case
from halogen_conformance.cases.making import op_cases
from halogen_conformance.cases.scaled import scaled_questions
from halogen_conformance.oracle import formats
from halogen_conformance.oracle import operations as exact
from halogen_conformance.oracle.scaled import PLAIN, Layout
from halogen_core.spi import (
    FORMATS,
    Activation,
    MoESpec,
    OpSignature,
    QuantTensor,
    WeightRole,
)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from linear_cases()
    yield from mlp_cases()
    yield from moe_cases()
    yield from logits_cases()


def _formatted(op: str, form: str) -> OpSignature:
    return OpSignature(op=op, weight_format=form)


def _draw_weight(
    bench: Bench, shape: tuple[int, ...], form: str, layout: Layout = PLAIN
) -> QuantTensor:
    bench.require_format(form)
    return formats.random_tensor(bench.rng, shape, form, layout=layout)


# ---------------------------------------------------------------- linear


def linear_cases() -> Iterator[Case]:
    why = "a tile's edge is lost, K and N exchanged, the weight transposed"
    for tokens, k, n in ((0, 64, 64), (1, 64, 96), (1, 896, 128), (17, 256, 100), (130, 64, 33)):
        run = partial(linear, tokens=tokens, widths=(n,), k=k)
        yield from op_cases("linear", f"F32-T{tokens}-K{k}-N{n}", why, run)
    run = partial(linear, tokens=2, widths=(8,), k=8192)
    yield from op_cases("linear", "F32-K8192", "error of a long sum", run)
    run = partial(linear, tokens=1, widths=(1,), k=64)
    yield from op_cases("linear", "F32-N1", "one output", run)
    run = partial(linear, tokens=5, widths=(96,), k=64, bias=True)
    yield from op_cases("linear", "bias", "the bias is lost, or added per tile", run)
    run = partial(linear, tokens=5, widths=(64, 16, 16), k=64, bias=True)
    yield from op_cases("linear", "three-parts", "fused parts in another order", run)
    run = partial(linear, tokens=4, widths=(40,), k=64, spoil=True)
    yield from op_cases("linear", "nan", "NaN is swallowed, or leaks into other rows", run)
    run = partial(linear, tokens=4, widths=(40,), k=96, std=300.0)
    yield from op_cases("linear", "large", "16-bit sums overflow or lose the small terms", run)
    for form in FORMATS:
        for tokens, k in ((1, 256), (19, 512)):
            run = partial(linear, tokens=tokens, widths=(48,), k=k, form=form)
            yield from op_cases(
                "linear",
                f"{form}-T{tokens}-K{k}",
                "scales, minima or nibbles read in the wrong order; T = 1 takes another path",
                run,
                column=form,
                signature=_formatted("linear", form),
            )
    run = partial(linear, tokens=5, widths=(64,), k=1024, form="Q8_0", loud=True)
    yield from op_cases(
        "linear",
        "Q8_0-loud-block",
        "activations rounded with one scale for a whole row, or with another block's",
        run,
        column="Q8_0",
        signature=_formatted("linear", "Q8_0"),
    )
    run = partial(linear, tokens=3, widths=(32, 32), k=256, form="Q4_K", form2="Q6_K")
    yield from op_cases(
        "linear",
        "Q4_K-with-Q6_K",
        "parts of one weight in different formats, as Q4_K_M files have",
        run,
        column="Q4_K",
        signature=_formatted("linear", "Q4_K"),
    )
    for q in scaled_questions():
        options = {"tokens": q.tokens, "widths": q.widths, "k": q.k, "form": q.form}
        run = partial(linear, **options, layout=q.layout, loudness=q.loudness)
        sign = _formatted("linear", q.form)
        yield from op_cases(
            "linear", f"{q.form}-{q.name}", q.why, run, column=q.form, signature=sign
        )
    yield from op_cases(
        "linear",
        "unknown-format",
        "an unknown format is refused by `supports` and by `pack`",
        unknown_format,
        signature=_formatted("linear", "Q3_Z"),
        required=False,
        dtypes=("f32",),
    )


def linear(
    bench: Bench,
    *,
    tokens: int,
    widths: tuple[int, ...],
    k: int,
    form: str = "F32",
    form2: str = "",
    bias: bool = False,
    spoil: bool = False,
    loud: bool = False,
    std: float = 1.0,
    layout: Layout = PLAIN,
    loudness: tuple[float, ...] = (),
) -> None:
    kinds = [form, form2] if form2 else [form] * len(widths)
    parts = [
        _draw_weight(bench, (n, k), kind, layout) for n, kind in zip(widths, kinds, strict=True)
    ]
    weight = np.concatenate([formats.values_of(p) for p in parts])
    x = bench.draw(tokens, k, std=std)
    if spoil:
        x[1, k // 3] = np.nan
    if loud:
        x[:, k // 2 : k // 2 + 32] *= 16
    x[: len(loudness)] *= np.array(loudness).reshape(-1, 1)
    packed, a = bench.weight(*parts), bench.arithmetic_for(form)
    offset = bench.draw(sum(widths)) if bias else None
    packed_bias = None if offset is None else bench.weight(offset, role=WeightRole.BIAS)
    given = bench.activation(x)
    bench.measure(
        lambda: bench.backend.ops.linear(given, packed, bias=packed_bias),
        exact.linear(x, weight, offset),
        exact.linear(x, a.weight(weight), offset, a),
        length=k,
        rounded=bool(a.rounding),
        keeps=[given],
    )


def unknown_format(bench: Bench) -> None:
    tensor = QuantTensor(format="Q3_Z", shape=(4, 32), data=np.zeros(64, np.uint8), name="w")
    bench.backend.pack([tensor], WeightRole.LINEAR)


# ---------------------------------------------------------------- mlp


def mlp_cases() -> Iterator[Case]:
    why = "gate and up exchanged, an activation lost between the products"
    for kind in Activation:
        for tokens in (0, 1, 17):
            run = partial(mlp, tokens=tokens, kind=kind)
            yield from op_cases("mlp", f"{kind}-T{tokens}", why, run)
    for form in formats.ALL:
        run = partial(mlp, tokens=3, kind=Activation.SILU, form=form, hidden=256, inner=256)
        yield from op_cases(
            "mlp", f"{form}-T3", why, run, column=form, signature=_formatted("mlp", form)
        )


def mlp(
    bench: Bench,
    *,
    tokens: int,
    kind: Activation,
    form: str = "F32",
    hidden: int = 64,
    inner: int = 96,
) -> None:
    gate = _draw_weight(bench, (inner, hidden), form)
    up = _draw_weight(bench, (inner, hidden), form)
    down = _draw_weight(bench, (hidden, inner), form)
    x, a, ops = bench.draw(tokens, hidden), bench.arithmetic_for(form), bench.backend.ops
    gate_up = np.concatenate([formats.values_of(gate), formats.values_of(up)])
    down_values = formats.values_of(down)
    packed, packed_down, given = bench.weight(gate, up), bench.weight(down), bench.activation(x)
    truth = exact.mlp(x, gate_up, down_values, kind)
    reference = exact.mlp(x, a.weight(gate_up), a.weight(down_values), kind, a)
    got = bench.measure(
        lambda: ops.mlp(given, packed, packed_down, kind),
        truth,
        reference,
        length=hidden + inner,
        rounded=bool(a.rounding),
        keeps=[given],
    )
    composed = bench.download(
        ops.linear(ops.gated_act(ops.linear(given, packed), kind), packed_down)
    )
    bench.compare(
        got,
        composed,
        composed + (reference - truth),
        what="fused against composed",
        length=hidden + inner,
        rounded=bool(a.rounding),
    )


# ---------------------------------------------------------------- moe


def moe_cases() -> Iterator[Case]:
    why = "the wrong experts, weights not normalised, an expert's rows mixed up"
    for experts, top_k, tokens in ((8, 2, 1), (8, 2, 17), (8, 2, 0), (32, 4, 9), (128, 8, 5)):
        spec = MoESpec(num_experts=experts, top_k=top_k)
        run = partial(moe, spec=spec, tokens=tokens)
        name = f"E{experts}-k{top_k}-T{tokens}"
        yield from op_cases("moe", name, why, run, signature=OpSignature(op="moe", moe=spec))
    variants = {
        "sigmoid": MoESpec(num_experts=8, top_k=2, gating="sigmoid"),
        "raw-weights": MoESpec(num_experts=8, top_k=2, normalize_top_k=False),
        "scaled": MoESpec(num_experts=8, top_k=2, weight_scale=2.5),
        "k1": MoESpec(num_experts=4, top_k=1),
        "all-experts": MoESpec(num_experts=4, top_k=4),
        "gelu": MoESpec(num_experts=8, top_k=2, activation=Activation.GELU_TANH),
        "swiglu-oai": MoESpec(num_experts=8, top_k=2, activation=Activation.SWIGLU_OAI),
    }
    for name, spec in variants.items():
        run = partial(moe, spec=spec, tokens=6)
        yield from op_cases("moe", name, why, run, signature=OpSignature(op="moe", moe=spec))
    spec = MoESpec(num_experts=8, top_k=3)
    run = partial(moe, spec=spec, tokens=4, ties=True)
    yield from op_cases("moe", "ties", "equal scores go to the lower expert", run)
    for form in ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "INT4", "W8A8", "MXFP4", "F8_E4M3"):
        run = partial(moe, spec=spec, tokens=3, form=form, hidden=256, inner=256)
        sign = OpSignature(op="moe", moe=spec, weight_format=form)
        yield from op_cases("moe", f"{form}-T3", why, run, column=form, signature=sign)
    wrong = MoESpec(num_experts=4, top_k=5)
    yield from op_cases(
        "moe",
        "k-above-experts",
        "more experts per token than there are is refused",
        partial(moe, spec=wrong, tokens=2),
        signature=OpSignature(op="moe", moe=wrong),
        required=False,
        dtypes=("f32",),
    )


def moe(
    bench: Bench,
    *,
    spec: MoESpec,
    tokens: int,
    form: str = "F32",
    hidden: int = 32,
    inner: int = 48,
    ties: bool = False,
) -> None:
    count, a = spec.num_experts, bench.arithmetic_for(form)
    router = bench.draw(count, hidden)
    if ties:
        router[:] = router[:1]
    gate = _draw_weight(bench, (count, inner, hidden), form)
    up = _draw_weight(bench, (count, inner, hidden), form)
    down = _draw_weight(bench, (count, hidden, inner), form)
    x = _clear_choice(bench, router, spec, tokens, hidden) if not ties else bench.draw(4, hidden)
    gate_up = np.concatenate([formats.values_of(gate), formats.values_of(up)], axis=1)
    down_values = formats.values_of(down)
    packed = [
        bench.weight(router),
        bench.weight(gate, up, role=WeightRole.EXPERTS),
        bench.weight(down, role=WeightRole.EXPERTS),
    ]
    given = bench.activation(x)
    bench.measure(
        lambda: bench.backend.ops.moe(given, *packed, spec),
        exact.moe(x, router, gate_up, down_values, spec),
        exact.moe(x, router, a.weight(gate_up), a.weight(down_values), spec, a),
        length=hidden + inner,
        rounded=bool(a.rounding),
        keeps=[given],
    )


def _clear_choice(
    bench: Bench, router: np.ndarray, spec: MoESpec, tokens: int, hidden: int
) -> np.ndarray:
    """Rows whose k-th and next expert are apart by more than the compute dtype's rounding."""
    rows: list[np.ndarray] = []
    while len(rows) < tokens:
        x = bench.draw(1, hidden)
        scores = np.sort((x @ router.T)[0])[::-1]
        if spec.top_k >= len(scores) or scores[spec.top_k - 1] - scores[spec.top_k] > 0.15:
            rows.append(x)
    return np.concatenate(rows) if rows else np.zeros((0, hidden))


# ---------------------------------------------------------------- logits


def logits_cases() -> Iterator[Case]:
    why = "logits rounded below float32, scale or softcap lost or in the wrong order"
    for name, options in {
        "R1": {"rows": 1},
        "R0": {"rows": 0},
        "R7": {"rows": 7},
        "scaled": {"rows": 2, "scale": 0.0625},
        "softcap": {"rows": 2, "softcap": 30.0, "std": 30.0},
        "scaled-softcap": {"rows": 2, "scale": 0.5, "softcap": 30.0, "std": 30.0},
    }.items():
        run = partial(logits, **options)
        yield from op_cases("logits", name, why, run)
    run = partial(logits, rows=2, vocab=151_936, hidden=32)
    yield from op_cases("logits", "vocab151936", "an index overflows, a tile's edge is lost", run)
    for form in ("F16", "Q8_0", "Q4_K", "Q6_K", "INT4", "W8A8", "F8_E4M3"):
        run = partial(logits, rows=3, hidden=256, form=form)
        yield from op_cases(
            "logits", f"{form}-R3", why, run, column=form, signature=_formatted("logits", form)
        )


def logits(
    bench: Bench,
    *,
    rows: int,
    vocab: int = 257,
    hidden: int = 64,
    form: str = "F32",
    scale: float = 1.0,
    softcap: float | None = None,
    std: float = 1.0,
) -> None:
    weight = _draw_weight(bench, (vocab, hidden), form)
    values, a = formats.values_of(weight), bench.arithmetic_for(form)
    x = bench.draw(rows, hidden, std=std)
    packed, given = bench.weight(weight), bench.activation(x)
    bench.measure(
        lambda: bench.backend.ops.logits(given, packed, scale=scale, softcap=softcap),
        exact.logits(x, values, scale, softcap),
        exact.logits(x, a.weight(values), scale, softcap, a),
        length=hidden,
        rounded=bool(a.rounding),
        dtype="f32",
        keeps=[given],
    )
