"""L5: are speeds what they seem? The suite owns the clock; it grades honesty, not speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case, Failure
from halogen_conformance.cases.placing import place, sequences, step
from halogen_conformance.oracle.numbers import Values
from halogen_core.spi import OPS, StepShape, SupportLevel

ROUNDS = 7
WIDE = 1024
"""Rows and columns of the weights that are timed (4 MiB of float32 each)."""
WEIGHTS = 10
"""Together beyond the caches of most machines."""
REPEATED_AT_MOST = 4.0
"""How much faster repeated inputs may be than fresh ones."""
COPIED = (512, 1024, 2048)
"""Sides of the arrays that are copied: on a host, fresh memory for large results costs more than
the copy itself."""
READ_OVER_COPY = 2.5
"""Reading may beat copying by so much; above it a speed is impossible."""
WAIT_SHARE = 0.5
"""Of an op's own time, that a first download may wait longer than a second one."""


def cases() -> Iterator[Case]:
    """All of them."""
    checks: dict[str, tuple[Callable[[Bench], None], str]] = {
        "honesty/fresh-equals-repeated": (repeated, "outputs cached by input: fast in a benchmark"),
        "honesty/synchronize-waits": (waits, "`synchronize` returns before the work is done"),
        "honesty/roofline": (roofline, "a speed above what memory can give: nothing was computed"),
        "honesty/cost-model": (cost_error, "a cost model that misleads the scheduler"),
        "honesty/fallback-share": (fallback_share, "speeds told without what ran by fallback"),
    }
    for name, (run, why) in checks.items():
        yield Case(id=f"L5/{name}", topic="honesty", why=why, run=run, timeout_s=180, required=True)


def seconds(bench: Bench, call: Callable[[], Any]) -> tuple[float, Any]:
    """Time of a call that is fenced on both sides, and its result."""
    bench.backend.synchronize()
    began = time.perf_counter()
    out = call()
    bench.backend.synchronize()
    return time.perf_counter() - began, out


def _linear_set(bench: Bench) -> tuple[list[Values], list[Any], list[Values], list[Any]]:
    inputs = [bench.draw(16, WIDE) for _ in range(ROUNDS)]
    weights = [bench.draw(WIDE, WIDE, std=0.05) for _ in range(WEIGHTS)]
    return (
        inputs,
        [bench.activation(x) for x in inputs],
        weights,
        [bench.weight(w) for w in weights],
    )


def repeated(bench: Bench) -> None:
    """Fresh and repeated inputs in turn; all outputs are checked after the clock stopped."""
    inputs, given, weights, packed = _linear_set(bench)
    ops = bench.backend.ops
    seconds(bench, lambda: ops.linear(given[0], packed[0]))
    fresh, again, outputs = [], [], []
    for i in range(1, ROUNDS):
        took, out = seconds(bench, partial(ops.linear, given[i], packed[i % WEIGHTS]))
        fresh.append(took)
        outputs.append((i, i % WEIGHTS, out))
        took, out = seconds(bench, partial(ops.linear, given[i], packed[i % WEIGHTS]))
        again.append(took)
        outputs.append((i, i % WEIGHTS, out))
    for i, w, out in outputs:
        truth = inputs[i] @ weights[w].T
        own = bench.arithmetic.store(truth)
        bench.compare(bench.download(out), truth, own, what=f"output {i}", length=WIDE, op="linear")
    # the fastest of each: others are slow for what else the machine does
    ratio = min(fresh) / min(again)
    bench.facts["fresh_over_repeated"] = ratio
    if ratio > REPEATED_AT_MOST:
        raise Failure(
            f"repeated inputs are {ratio:.1f} times faster than fresh ones: outputs are cached"
        )


def waits(bench: Bench) -> None:
    """A first download after `synchronize` must not wait for the work itself."""
    _, given, _, packed = _linear_set(bench)
    ops, backend = bench.backend.ops, bench.backend
    excess, whole = [], []
    for i in range(ROUNDS):
        began = time.perf_counter()
        out = ops.linear(given[i], packed[i % WEIGHTS])
        backend.synchronize()
        fenced = time.perf_counter()
        backend.download(out)
        first = time.perf_counter()
        backend.download(out)
        second = time.perf_counter()
        excess.append((first - fenced) - (second - first))
        whole.append(first - began)
    share = statistics.median(excess) / statistics.median(whole)
    bench.facts["waited_after_synchronize"] = share
    if share > WAIT_SHARE:
        raise Failure(f"{share:.0%} of the time passes after `synchronize` said that all is done")


def roofline(bench: Bench) -> None:
    """Weights read per second against what a copy on the same device moves."""
    inputs, given, _, packed = _linear_set(bench)
    ops = bench.backend.ops
    copy_rate = max(_copy_rate(bench, side) for side in COPIED)
    one = [bench.activation(x[:1]) for x in inputs]
    times = []
    for i in range(ROUNDS * 2):
        times.append(seconds(bench, partial(ops.linear, one[i % ROUNDS], packed[i % WEIGHTS]))[0])
    read_rate = packed[0].nbytes / min(times)
    bench.facts |= {"copy_bytes_per_s": copy_rate, "weights_read_bytes_per_s": read_rate}
    if read_rate > READ_OVER_COPY * copy_rate:
        raise Failure(
            f"weights are read at {read_rate / 1e9:.1f} GB/s, a copy moves {copy_rate / 1e9:.1f}: "
            "impossible, so they were not read"
        )
    del given


def _copy_rate(bench: Bench, side: int) -> float:
    """Bytes per second that an addition of [side, side] moves, at its best."""
    values = bench.draw(side, side)
    moved = 3 * values.size * {"f32": 4, "f16": 2, "bf16": 2}[bench.dtype]
    times = []
    for _ in range(ROUNDS):
        x, y = bench.activation(values), bench.activation(values)
        times.append(seconds(bench, partial(bench.backend.ops.add, x, y))[0])
    return moved / min(times)


def cost_error(bench: Bench) -> None:
    """Mean error of predictions over steps of a tiny model, after it has seen some."""
    placed = place(bench, "llama", blocks=48)
    (sequence,) = sequences(placed, bench.rng.integers(0, 97, 120).astype(np.int64))
    errors: list[float] = []
    at = 0
    for index, count in enumerate([1, 8, 1, 16, 1, 4, 1, 24, 1, 2, 1, 32, 1, 8, 1, 4]):
        batch = step(placed, [(sequence, at, at + count)])
        shape = StepShape(
            prefill_tokens=count if count > 1 else 0,
            decode_sequences=int(count == 1),
            kv_tokens=at + count,
        )
        answer = bench.backend.cost(shape)
        took, _ = seconds(bench, partial(placed.logits, batch))
        bench.backend.observe(shape, took)
        if answer is not None and index >= 8:
            if not 0 < answer.p50 <= answer.p95:
                raise Failure(f"cost of {shape} is {answer}")
            errors.append(abs(answer.p50 - took) / took)
        at += count
    bench.facts["cost_error"] = statistics.mean(errors) if errors else "no predictions"
    if errors and statistics.median(errors) > 10:
        raise Failure(f"predictions are off by {statistics.median(errors):.0f} times the step")


def fallback_share(bench: Bench) -> None:
    """Share of a model step's time that is spent in ops which fell back."""
    placed = place(bench, "llama")
    levels = {p.op: p.level for p in bench.backend.placement()}
    spent = dict.fromkeys(OPS, 0.0)
    clocked = _Clocked(bench, spent)
    (sequence,) = sequences(placed, bench.rng.integers(0, 97, 24).astype(np.int64))
    meta = bench.backend.upload_step(step(placed, [(sequence, 0, 24)]))
    placed.decoder.step(clocked, meta, placed.kv)  # type: ignore[arg-type]
    total = sum(spent.values())
    fallen = sum(t for op, t in spent.items() if levels[op] is not SupportLevel.NATIVE)
    bench.facts["fallback_share_of_step"] = fallen / total
    if total <= 0:
        raise Failure("a model's step took no time at all")


class _Clocked:
    """Ops with a clock around each; nested calls of fused ops count once."""

    def __init__(self, bench: Bench, spent: dict[str, float]) -> None:
        self._bench, self._spent = bench, spent

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bench.backend.ops, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            took, out = seconds(self._bench, lambda: call(*arguments, **more))
            self._spent[name] += took
            return out

        return timed
