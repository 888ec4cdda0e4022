"""A step launched before the last one's tokens are known: the same answers, and less waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halogen_core.engine.protocol import SamplingParams
from halogen_core.errors import Transient

from .conftest import request, run
from .test_engine_equality import RELAXED, WORK, requests_of


@RELAXED
@given(
    work=WORK,
    budget=st.sampled_from([8, 16, 64]),
    blocks=st.one_of(st.none(), st.integers(8, 14)),
    ends=st.lists(st.integers(0, 96), max_size=12),
    aborted=st.dictionaries(st.integers(0, 6), st.integers(1, 14), max_size=2),
)
def test_ahead_equals_step_by_step(make_engine, work, budget, blocks, ends, aborted):
    requests = requests_of(work)
    starts = {f"r{i}": at for i, (*_, at) in enumerate(work)}
    leaves = {f"r{i}": at for i, at in aborted.items() if i < len(work)}
    found = []
    for ahead in (False, True):
        engine = make_engine(
            num_blocks=blocks, ahead=ahead, max_batch_tokens=budget, end_token_ids=ends
        )
        tokens, last = run(engine, *requests, submit_at=starts, abort_at=leaves)
        found.append({n: (t, last[n].finish_reason) for n, t in tokens.items() if n not in leaves})
        assert not engine.has_work
        assert engine.stats().blocks_active == 0
    assert found[0] == found[1]


def test_the_next_step_is_queued_before_the_last_is_waited_for(make_engine):
    engine = make_engine(ahead=True)
    run(engine, request("a", [1, 2, 3], max_tokens=6))
    order = engine.runner.backend.order
    assert order == ["queue", *["queue", "wait"] * 5, "wait"], "one is always on its way"
    slow = make_engine(ahead=True, run_ahead=False)
    run(slow, request("a", [1, 2, 3], max_tokens=6))
    assert slow.runner.backend.order == ["queue", "wait"] * 6


def test_who_needs_the_token_waits_for_it(make_engine):
    sampling = SamplingParams(repetition_penalty=1.2)
    engine = make_engine(ahead=True)
    run(engine, request("a", [1, 2, 3], max_tokens=4, sampling=sampling))
    assert engine.runner.backend.order == ["queue", "wait"] * 4


def test_a_length_known_before_costs_no_row(make_engine):
    engine = make_engine(ahead=True)
    run(engine, request("a", [1, 2, 3], max_tokens=5), request("b", [4, 5], max_tokens=9))
    stats = engine.stats()
    assert stats.step == 9
    assert stats.counters["generation_tokens"] == 14


@pytest.mark.parametrize("at", [1, 4])
def test_cached_text_is_what_was_said(make_engine, at):
    """Blocks that fill while tokens are unknown are found by their real tokens."""
    engine = make_engine(ahead=True)
    prompt = list(range(at, at + 13))
    said = run(engine, request("a", prompt, max_tokens=20))[0]["a"]
    again, last = run(engine, request("b", prompt + said[:19], max_tokens=3))
    assert last["b"].cached_tokens >= 24
    cold = run(make_engine(), request("c", prompt + said[:19], max_tokens=3))[0]["c"]
    assert again["b"] == cold


def test_a_failed_launch_loses_no_token(make_engine):
    engine = make_engine(ahead=True)
    launch, calls = engine.runner.launch, []

    def flaky(batch, shape):
        calls.append(shape)
        if len(calls) == 3:
            raise Transient("busy")
        return launch(batch, shape)

    engine.submit(request("a", [1, 2, 3], max_tokens=6))
    engine.runner.launch = flaky
    tokens, failures = [], 0
    while engine.has_work:
        try:
            tokens += [t for output in engine.step() for t in output.token_ids]
        except Transient:
            failures += 1
    assert failures == 1
    assert tokens == run(make_engine(), request("a", [1, 2, 3], max_tokens=6))[0]["a"]
