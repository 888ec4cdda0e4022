"""L1: embed, rms_norm, add_rms_norm, add, gated_act, select_rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import attrs
import numpy as np

from halogen_conformance.bench import Bench, same_bits
from halogen_conformance.case import Case, Failure
from halogen_conformance.cases.making import op_cases
from halogen_conformance.oracle import formats
from halogen_conformance.oracle import operations as exact
from halogen_conformance.oracle.numbers import Values, round_to
from halogen_conformance.steps import arrange, batch_of, spans
from halogen_core.spi import FORMATS, Activation, OpSignature, QuantTensor, WeightRole

TOKENS = (0, 1, 17, 130)
DIFFERENT_ROWS = 4099
"""Of a large table: to quantise millions of values takes seconds. A prime, so that ids which are off
by a power of two meet another row."""


def cases() -> Iterator[Case]:
    """All of them."""
    yield from embed_cases()
    yield from norm_cases()
    yield from add_cases()
    yield from act_cases()
    yield from select_cases()


# ---------------------------------------------------------------- embed


def embed_cases() -> Iterator[Case]:
    why = "wrong row, lost scale, a quantised row read in the wrong layout"
    for tokens in TOKENS:
        run = partial(embed, tokens=tokens, vocab=300, hidden=64, form="F32")
        yield from op_cases("embed", f"F32-T{tokens}-H64", why, run)
    for form in FORMATS:
        run = partial(embed, tokens=9, vocab=40, hidden=256, form=form)
        yield from op_cases(
            "embed",
            f"{form}-T9-H256",
            why,
            run,
            column=form,
            signature=OpSignature(op="embed", weight_format=form),
        )
    run = partial(embed, tokens=5, vocab=151_936, hidden=32, form="Q8_0")
    yield from op_cases("embed", "vocab151936", "ids beyond 16 bits", run, column="Q8_0")
    run = partial(embed, tokens=5, vocab=40, hidden=896, form="F32", scale=896**0.5)
    yield from op_cases("embed", "scaled", "embedding scale of Gemma", run)


def embed(
    bench: Bench, *, tokens: int, vocab: int, hidden: int, form: str, scale: float = 1.0
) -> None:
    few = formats.random_tensor(bench.rng, (min(vocab, DIFFERENT_ROWS), hidden), form, std=1.0)
    ids = bench.rng.integers(0, vocab, tokens).astype(np.int32)
    if tokens > 2:
        ids[:3] = 0, vocab - 1, vocab - 1
    packed = bench.weight(_repeated(few, vocab), role=WeightRole.EMBEDDING)
    device_ids, values = bench.backend.upload(ids), formats.values_of(few)
    rows = ids % len(values)
    bench.measure(
        lambda: bench.backend.ops.embed(device_ids, packed, scale=scale),
        exact.embed(rows, values, scale),
        exact.embed(rows, values, scale, bench.arithmetic),
        keeps=[device_ids],
    )


def _repeated(few: QuantTensor, vocab: int) -> QuantTensor:
    """A table of `vocab` rows made of `few` over and over."""
    rows, width = few.shape
    data = np.resize(few.data.reshape(rows, -1), (vocab, few.data.size // rows))
    return attrs.evolve(few, shape=(vocab, width), data=data.reshape(-1))


# ---------------------------------------------------------------- rms_norm, add_rms_norm


def norm_cases() -> Iterator[Case]:
    why = "sum over the wrong axis or padding, division before the root, rows mixed up"
    for op in ("rms_norm", "add_rms_norm"):
        for tokens in TOKENS:
            for hidden in (64, 896, 1000):
                run = partial(norm, op=op, tokens=tokens, hidden=hidden)
                yield from op_cases(op, f"T{tokens}-H{hidden}", why, run)
        run = partial(norm, op=op, tokens=3, hidden=8192)
        yield from op_cases(op, "T3-H8192", "partial sums over a wide row", run)
        run = partial(norm, op=op, tokens=3, hidden=64, std=1e-3, eps=1e-5)
        yield from op_cases(op, "tiny", "eps missing or outside the root shows on small rows", run)
        run = partial(norm, op=op, tokens=3, hidden=64, std=2e3)
        yield from op_cases(op, "large", "squares overflow a 16-bit sum", run)
        run = partial(norm, op=op, tokens=4, hidden=96, spoil=np.nan)
        yield from op_cases(op, "nan", "NaN is swallowed, or leaks into other rows", run)
        run = partial(norm, op=op, tokens=4, hidden=96, std=0.0)
        yield from op_cases(op, "zeros", "a row of zeros stays zero, eps keeps it finite", run)


def norm(
    bench: Bench,
    *,
    op: str,
    tokens: int,
    hidden: int,
    std: float = 1.0,
    eps: float = 1e-6,
    spoil: float | None = None,
) -> None:
    x, weight = bench.draw(tokens, hidden, std=std), bench.draw(hidden) + 1
    if spoil is not None:
        x[1, hidden // 2] = spoil
    packed, ops = bench.norm_weight(weight), bench.backend.ops
    a = bench.arithmetic
    if op == "rms_norm":
        given = bench.activation(x)
        bench.measure(
            lambda: ops.rms_norm(given, packed, eps=eps),
            exact.rms_norm(x, weight, eps),
            exact.rms_norm(x, weight, eps, a),
            length=hidden,
            keeps=[given],
        )
        return
    residual = bench.draw(tokens, hidden, std=std)
    total, rounded = exact.add(x, residual), exact.add(x, residual, a)
    for part, truth, reference in (
        (0, exact.rms_norm(total, weight, eps), exact.rms_norm(rounded, weight, eps, a)),
        (1, total, rounded),
    ):
        bench.measure(
            lambda part=part: ops.add_rms_norm(
                bench.activation(x), bench.activation(residual), packed, eps=eps
            )[part],
            truth,
            reference,
            what=("normed", "sum")[part],
            length=hidden,
        )
    _fused_equals_composed(bench, x, residual, weight, eps)


def _fused_equals_composed(
    bench: Bench, x: Values, residual: Values, weight: Values, eps: float
) -> None:
    ops, packed = bench.backend.ops, bench.norm_weight(weight)
    fused = ops.add_rms_norm(bench.activation(x), bench.activation(residual), packed, eps=eps)
    total = ops.add(bench.activation(x), bench.activation(residual))
    composed = (ops.rms_norm(total, packed, eps=eps), total)
    for got, other, what in zip(fused, composed, ("normed", "sum"), strict=True):
        truth = bench.download(other)
        own = round_to(truth * (1 + 2**-24), bench.dtype)
        bench.compare(
            bench.download(got), truth, own, what=f"fused {what} against composed", length=64
        )


# ---------------------------------------------------------------- add, select_rows


def add_cases() -> Iterator[Case]:
    for tokens in TOKENS:
        run = partial(add, tokens=tokens, hidden=100)
        yield from op_cases("add", f"T{tokens}-H100", "the residual is lost or added twice", run)
    run = partial(add, tokens=3, hidden=64, special=True)
    yield from op_cases("add", "specials", "infinity, NaN, signed zeros, denormals", run)


def add(bench: Bench, *, tokens: int, hidden: int, special: bool = False) -> None:
    x, y = bench.draw(tokens, hidden), bench.draw(tokens, hidden)
    if special:
        x[0, :5] = np.inf, -np.inf, np.nan, 0.0, 6e-8
        y[0, :5] = 1.0, 1.0, 1.0, -0.0, -6e-8
        x, y = round_to(x, bench.dtype), round_to(y, bench.dtype)
    bench.measure(
        lambda: bench.backend.ops.add(bench.activation(x), bench.activation(y)),
        exact.add(x, y),
        exact.add(x, y, bench.arithmetic),
    )


def select_cases() -> Iterator[Case]:
    for name, rows in (("none", ()), ("last", (18,)), ("some", (0, 3, 4, 18)), ("all", range(19))):
        run = partial(select_rows, rows=tuple(rows))
        yield from op_cases("select_rows", name, "logits of the wrong row", run)


def select_rows(bench: Bench, *, rows: tuple[int, ...]) -> None:
    plan = arrange(bench.rng, spans((19, 19)), 16)
    meta = bench.step(batch_of(plan, logit_rows=np.array(rows, np.int32)))
    x = bench.draw(19, 48)
    given = bench.activation(x)
    got = bench.download(bench.backend.ops.select_rows(given, meta))
    same_bits(got.astype(np.float64), x[list(rows)], "selected rows")
    if not np.array_equal(bench.download(given), x.astype(np.float32)):
        raise Failure("selecting rows changed its input")


# ---------------------------------------------------------------- gated_act


def act_cases() -> Iterator[Case]:
    for kind in Activation:
        sign = OpSignature(op="gated_act", activation=kind)
        for tokens in TOKENS:
            run = partial(gated_act, kind=kind, tokens=tokens, width=100)
            yield from op_cases(
                "gated_act",
                f"{kind}-T{tokens}-F100",
                "gate and up swapped, the wrong curve",
                run,
                signature=sign,
            )
        run = partial(gated_act, kind=kind, tokens=3, width=64, std=30.0)
        yield from op_cases(
            "gated_act",
            f"{kind}-large",
            "exp overflows, the clamp of swiglu_oai is missing or one-sided",
            run,
            signature=sign,
        )
        run = partial(gated_act, kind=kind, tokens=3, width=64, spoil=True)
        yield from op_cases(
            "gated_act", f"{kind}-nan", "NaN is swallowed or spreads", run, signature=sign
        )


def gated_act(
    bench: Bench,
    *,
    kind: Activation,
    tokens: int,
    width: int,
    std: float = 1.0,
    spoil: bool = False,
) -> None:
    x = bench.draw(tokens, 2 * width, std=std)
    if spoil:
        x[1, 3] = np.nan
        x[2, width + 5] = np.nan
    given = bench.activation(x)
    bench.measure(
        lambda: bench.backend.ops.gated_act(given, kind),
        exact.gated_act(x, kind),
        exact.gated_act(x, kind, bench.arithmetic),
        keeps=[given],
    )
