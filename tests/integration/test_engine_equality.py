"""Batched = alone, chunked = whole, cached = cold, preempted = undisturbed: the same tokens."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halogen_core.engine.protocol import SamplingParams

from .conftest import request, run

VOCAB = 97
PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
WORK = st.lists(
    st.tuples(PROMPT, SAMPLING, st.integers(1, 16), st.integers(0, 6)), min_size=2, max_size=7
)
RELAXED = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def requests_of(work):
    return [
        request(f"r{i}", prompt, sampling=sampling, max_tokens=n)
        for i, (prompt, sampling, n, _) in enumerate(work)
    ]


def alone(make_engine, requests):
    """Every request on an engine that sees nothing else and caches nothing."""
    engine = make_engine(max_batch_tokens=512, prefix_cache=False)
    return {r.request_id: run(engine, r)[0][r.request_id] for r in requests}


@RELAXED
@given(work=WORK, budget=st.sampled_from([8, 16, 64]))
def test_batched_chunked_and_late_equals_alone(make_engine, work, budget):
    requests = requests_of(work)
    engine = make_engine(max_batch_tokens=budget)
    starts = {f"r{i}": at for i, (*_, at) in enumerate(work)}
    tokens, last = run(engine, *requests, submit_at=starts)
    assert tokens == alone(make_engine, requests)
    assert {o.finish_reason for o in last.values()} == {"length"}


@RELAXED
@given(work=WORK, blocks=st.integers(8, 14))
def test_preempted_equals_undisturbed(make_engine, work, blocks):
    requests = requests_of(work)
    engine = make_engine(num_blocks=blocks, max_batch_tokens=16)
    tokens, _ = run(engine, *requests)
    assert tokens == alone(make_engine, requests)


def test_preemption_does_happen(make_engine):
    requests = [request(f"r{i}", range(i, i + 24), max_tokens=24) for i in range(4)]
    engine = make_engine(num_blocks=12)
    tokens, _ = run(engine, *requests)
    assert engine.scheduler.counters()["preemptions"] > 0
    assert tokens == alone(make_engine, requests)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 33])
def test_cached_equals_cold(make_engine, length):
    engine = make_engine()
    prompt = list(range(length))
    cold, first = run(engine, request("cold", prompt))
    warm, second = run(engine, request("warm", prompt))
    longer, third = run(engine, request("longer", [*prompt, 5, 6]))
    assert warm["warm"] == cold["cold"]
    assert longer == alone(make_engine, [request("longer", [*prompt, 5, 6])])
    assert first["cold"].cached_tokens == 0
    assert second["warm"].cached_tokens >= (length - 1) // 8 * 8
    assert third["longer"].cached_tokens >= length // 8 * 8


def test_salts_do_not_share(make_engine):
    engine = make_engine()
    prompt = list(range(33))
    run(engine, request("a", prompt, cache_salt="alice"))
    _, last = run(engine, request("b", prompt, cache_salt="bob"))
    assert last["b"].cached_tokens == 0
    _, last = run(engine, request("c", prompt, cache_salt="alice"))
    assert last["c"].cached_tokens > 0


def test_a_seed_repeats_and_no_seed_varies(make_engine):
    engine = make_engine()

    def answer(seed, name):
        hot = SamplingParams(temperature=2.0, seed=seed)
        return run(engine, request(name, [1, 2, 3], sampling=hot))[0][name]

    assert answer(7, "a") == answer(7, "b")
    assert answer(7, "c") != answer(8, "d")
    assert len({tuple(answer(None, f"n{i}")) for i in range(5)}) > 1
