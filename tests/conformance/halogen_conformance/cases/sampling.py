"""L1: sample. Draws are aimed at the middle of a token's share, so rounding cannot move them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import numpy as np

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case, Failure
from halogen_conformance.cases.making import op_cases
from halogen_conformance.oracle import sampling as exact
from halogen_conformance.oracle.numbers import Values
from halogen_conformance.oracle.operations import log_softmax
from halogen_conformance.oracle.sampling import Policy
from halogen_conformance.steps import arrange, batch_of, sampling_batch, spans

VOCAB = 203
Rows = Callable[[Values, np.random.Generator], Sequence[Policy]]


def cases() -> Iterator[Case]:
    """All of them."""
    drawn = Policy(temperature=0.8)
    history = tuple((token, token % 3) for token in range(0, 60, 2))
    policies: dict[str, tuple[Policy, str]] = {
        "greedy": (Policy(), "the largest logit"),
        "temperature": (drawn, "temperature lost, the uniform number ignored"),
        "hot": (Policy(temperature=3.0), "temperature inverted"),
        "top-k": (attrs.evolve(drawn, top_k=5), "k off by one"),
        "top-p": (attrs.evolve(drawn, top_p=0.6), "the token that crosses p is lost"),
        "min-p": (attrs.evolve(drawn, min_p=0.2), "relative to the largest, not absolute"),
        "all-cuts": (
            attrs.evolve(drawn, top_k=20, top_p=0.9, min_p=0.05),
            "cuts in another order, or not renormalised between",
        ),
        "repetition": (
            Policy(repetition_penalty=1.7, history=history),
            "negative logits divided instead of multiplied",
        ),
        "presence": (
            Policy(presence_penalty=1.5, history=history),
            "prompt tokens (count 0) must not be penalised",
        ),
        "frequency": (Policy(frequency_penalty=0.9, history=history), "count ignored"),
        "bias": (Policy(bias=((3, 9.0), (7, -9.0))), "bias lost or doubled"),
        "bias-drawn": (attrs.evolve(drawn, bias=((3, 4.0), (150, 3.0))), "bias after temperature"),
        "mask": (Policy(allowed=(5, 64, 202)), "bits in another order; the last word's tail"),
        "mask-drawn": (attrs.evolve(drawn, allowed=tuple(range(31, 66))), "word boundaries"),
        "forced": (Policy(forced=11), "a forced token is reported, not sampled"),
        "everything": (
            attrs.evolve(
                drawn,
                top_k=30,
                top_p=0.95,
                repetition_penalty=1.3,
                frequency_penalty=0.2,
                history=history,
                bias=((100, 2.0),),
                allowed=tuple(range(0, 203, 3)),
            ),
            "order of penalties, bias, mask, temperature, cuts",
        ),
    }
    for name, (policy, why) in policies.items():
        yield from op_cases("sample", name, why, partial(sample, policy=policy), dtypes=("f32",))
    more = {
        "mixed-rows": (mixed_rows, "one row's policy applied to another"),
        "ties": (ties, "the lowest id wins a tie"),
        "edges": (edges, "uniform 0 takes the first allowed token, almost 1 the last"),
        "logprobs": (logprobs, "of the model's own distribution, before temperature"),
        "top-logprobs": (top_logprobs, "most likely first, ids and values belonging together"),
        "none": (no_rows, "a step that samples nothing"),
        "vocab151936": (large_vocab, "a float32 running sum drifts over a large vocabulary"),
        "alone-or-not": (alone_or_not, "a row's token depends on who shares the step"),
        "uniforms-matter": (uniforms_matter, "the seed is ignored"),
    }
    for name, (run, why) in more.items():
        yield from op_cases("sample", name, why, run, dtypes=("f32",))


def run_sample(
    bench: Bench, logits: Values, policies: Sequence[Policy], num_logprobs: int = -1
) -> tuple[Values, Values | None, Values | None, Values | None]:
    """Tokens, logprobs, top ids and top logprobs of a call, on the host."""
    rows = len(policies)
    plan = arrange(bench.rng, spans(*[(1, 1)] * rows), 16)
    sampling = sampling_batch(policies, logits.shape[-1], num_logprobs)
    meta = bench.step(batch_of(plan, sampling=sampling))
    given = bench.backend.upload(logits.astype(np.float32))
    sampled = bench.backend.ops.sample(given, meta)
    if not np.array_equal(bench.download(given), logits.astype(np.float32)):
        raise Failure("sampling changed the logits it was given")
    tokens = bench.download(sampled.token_ids)
    if tokens.shape != (rows,) or tokens.dtype != np.int32:
        raise Failure(f"token ids are {tokens.dtype}{tokens.shape}, expected int32({rows},)")

    def host(array: object) -> Values | None:
        return None if array is None else bench.download(array)

    return (
        tokens,
        host(sampled.logprobs),
        host(sampled.top_ids),
        host(sampled.top_logprobs),
    )


def _logits(bench: Bench, rows: int, vocab: int = VOCAB, std: float = 2.0) -> Values:
    return bench.rng.standard_normal((rows, vocab)).astype(np.float32).astype(np.float64) * std


def _aimed(bench: Bench, row: Values, policy: Policy) -> Policy:
    """The policy aimed at one of its likelier tokens, a different one each time."""
    if policy.temperature == 0 or policy.forced >= 0:
        return policy
    p = exact.distribution(row, policy)
    candidates = np.flatnonzero(p > 2e-4)
    return exact.aim_at(row, policy, int(bench.rng.choice(candidates)))


def _expect(got: Values, logits: Values, policies: Sequence[Policy]) -> None:
    want = [exact.pick(row, policy) for row, policy in zip(logits, policies, strict=True)]
    for row, (token, right) in enumerate(zip(got.tolist(), want, strict=True)):
        if token != right:
            raise Failure(f"row {row} of {len(want)} picked token {token}, the oracle {right}")


def sample(bench: Bench, *, policy: Policy) -> None:
    logits = _logits(bench, 16)
    # penalised tokens compete for the top, else a lost penalty would not show
    logits[:, [token for token, _ in policy.history]] += 2.5
    if policy.repetition_penalty != 1:
        logits[::2] -= 9.0
    policies = [_aimed(bench, row, policy) for row in logits]
    _expect(run_sample(bench, logits, policies)[0], logits, policies)


def mixed_rows(bench: Bench) -> None:
    logits = _logits(bench, 6)
    kinds = [
        Policy(),
        Policy(temperature=1.0, top_k=4),
        Policy(forced=0),
        Policy(temperature=0.5, history=((1, 2), (8, 1)), presence_penalty=2.0),
        Policy(temperature=2.0, top_p=0.3),
        Policy(bias=((9, 20.0),)),
    ]
    policies = [_aimed(bench, row, p) for row, p in zip(logits, kinds, strict=True)]
    _expect(run_sample(bench, logits, policies)[0], logits, policies)


def ties(bench: Bench) -> None:
    logits = np.zeros((2, VOCAB))
    logits[0, [40, 41, 170]] = 3.0
    policies = [Policy(), Policy()]
    _expect(run_sample(bench, logits, policies)[0], logits, policies)


def edges(bench: Bench) -> None:
    logits = _logits(bench, 2)
    almost = float(np.nextafter(np.float32(1), np.float32(0)))
    policies = [
        Policy(temperature=1.0, top_k=3, uniform=0.0),
        Policy(temperature=1.0, top_k=3, uniform=almost),
    ]
    _expect(run_sample(bench, logits, policies)[0], logits, policies)


def logprobs(bench: Bench) -> None:
    logits = _logits(bench, 3)
    kinds = [Policy(), Policy(temperature=0.3), Policy(forced=7)]
    policies = [_aimed(bench, row, p) for row, p in zip(logits, kinds, strict=True)]
    tokens, chosen, top_ids, _ = run_sample(bench, logits, policies, num_logprobs=0)
    _expect(tokens, logits, policies)
    if chosen is None or (top_ids is not None and top_ids.size):
        raise Failure("num_logprobs 0 asks for the chosen token's logprob and no others")
    truth = log_softmax(logits)[np.arange(3), tokens][:, None]
    bench.compare(chosen[:, None], truth, truth, what="logprobs", dtype="f32")


def top_logprobs(bench: Bench) -> None:
    logits, count = _logits(bench, 3), 5
    tokens, _, ids, values = run_sample(bench, logits, [Policy()] * 3, num_logprobs=count)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    if ids is None or values is None or not np.array_equal(ids, order):
        raise Failure(f"most likely ids are {ids}, expected {order}")
    truth = np.take_along_axis(log_softmax(logits), order, -1)
    bench.compare(values, truth, truth, what="top logprobs", dtype="f32")
    _expect(tokens, logits, [Policy()] * 3)


def no_rows(bench: Bench) -> None:
    plan = arrange(bench.rng, spans((4, 4)), 16)
    empty = sampling_batch([], VOCAB)
    meta = bench.step(batch_of(plan, logit_rows=np.zeros(0, np.int32), sampling=empty))
    sampled = bench.backend.ops.sample(bench.backend.upload(np.zeros((0, VOCAB), np.float32)), meta)
    if bench.download(sampled.token_ids).shape != (0,):
        raise Failure("no rows must give no tokens")


def large_vocab(bench: Bench) -> None:
    logits = _logits(bench, 2, 151_936, std=1.0)
    policies = []
    for row in logits:
        p = exact.distribution(row, Policy(temperature=1.0))
        late = 150_000 + int(np.argmax(p[150_000:]))
        policies.append(exact.aim_at(row, Policy(temperature=1.0), late))
    _expect(run_sample(bench, logits, policies)[0], logits, policies)


def alone_or_not(bench: Bench) -> None:
    logits = _logits(bench, 5)
    policies = [_aimed(bench, row, Policy(temperature=1.0, top_p=0.9)) for row in logits]
    together = run_sample(bench, logits, policies)[0]
    for row in range(5):
        alone = run_sample(bench, logits[row : row + 1], policies[row : row + 1])[0]
        if alone[0] != together[row]:
            raise Failure(f"row {row} picks {alone[0]} alone and {together[row]} in company")


def uniforms_matter(bench: Bench) -> None:
    logits = np.repeat(_logits(bench, 1, std=0.2), 24, axis=0)
    policies = [Policy(temperature=1.0, uniform=(i + 0.5) / 24) for i in range(24)]
    tokens = run_sample(bench, logits, policies)[0]
    if len(set(tokens.tolist())) < 12:
        raise Failure(f"24 evenly spread draws gave only tokens {sorted(set(tokens.tolist()))}")
    if (np.diff(tokens) < 0).any():
        raise Failure("tokens must grow with the uniform number (inverse CDF in id order)")
