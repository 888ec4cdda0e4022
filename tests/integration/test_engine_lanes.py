"""Prompts that take too long, on a real engine by the real clock (A13, A14)."""

import time

import pytest

from .conftest import request, run

LONG = [(3 * i) % 97 for i in range(240)]
TIMEOUT_S = 0.06
STEP_S = 0.01


@pytest.fixture
def slow_engine(make_engine):
    """An engine whose device needs at least 10 ms for a step, and the shapes of its steps."""

    def make(**changes):
        options = {"max_batch_tokens": 16, "max_context": 256, "prefill_timeout_ms": 60.0}
        engine = make_engine(**(options | changes))
        launch, shapes = engine.runner.launch, []

        def slow(batch, shape):
            time.sleep(STEP_S)
            shapes.append(shape)
            return launch(batch, shape)

        engine.runner.launch = slow
        return engine, shapes

    return make


def until_moved(engine, began):
    """Seconds from `began` until the prompt ran into its time, and the longest step."""
    longest, outputs, before = 0.0, [], began
    while not engine.scheduler.counters()["prefill_timeouts"]:
        outputs += engine.step()
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    return before - began, longest, outputs


def test_a_slow_prompt_moves_over_in_time_and_says_the_same(slow_engine, make_engine):
    alone = run(make_engine(max_context=256), request("long", LONG))[0]["long"]
    short = run(make_engine(max_context=256), request("short", [1, 2], max_tokens=60))[0]["short"]
    engine, shapes = slow_engine()
    began = time.monotonic()
    engine.submit(request("long", LONG))
    engine.submit(request("short", [1, 2], max_tokens=60))
    elapsed, longest, outputs = until_moved(engine, began)
    assert TIMEOUT_S <= elapsed <= TIMEOUT_S + 0.1 + longest
    at = len(shapes)
    while engine.has_work:
        outputs += engine.step()
    tokens = {name: [] for name in ("long", "short")}
    for output in outputs:
        tokens[output.request_id] += output.token_ids
    assert tokens == {"long": alone, "short": short}
    prompts = [s for s in shapes[at:] if s.prefill_tokens]
    assert sum(s.prefill_tokens for s in prompts) > 100, "much of it was left for the long lane"
    assert not any(s.decode_sequences for s in prompts), "a step held both lanes"
    beside = [s.decode_sequences for s in shapes[at : at + 20]]
    assert beside.count(1) >= 9, "the answer did not go on beside the long prompt"


def test_a_slow_prompt_ends_with_the_reason_if_told_so(slow_engine):
    engine, _ = slow_engine(fail_on_prefill_timeout=True)
    began = time.monotonic()
    engine.submit(request("long", LONG))
    engine.submit(request("short", [1, 2], max_tokens=30))
    elapsed, longest, outputs = until_moved(engine, began)
    assert TIMEOUT_S <= elapsed <= TIMEOUT_S + 0.1 + longest
    (last,) = (output for output in outputs if output.request_id == "long")
    assert (last.finish_reason, last.error_code) == ("error", "HRT-4104")
    assert "`prefill_timeout_ms` is 60" in last.error
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(o.token_ids) for o in outputs if o.request_id == "short") == 30
    assert engine.stats().blocks_active == 0


def test_a_short_prompt_is_answered_before_a_long_one_that_came_first(slow_engine):
    engine, shapes = slow_engine(long_prompt_tokens=100)
    engine.submit(request("long", LONG))
    engine.step()
    engine.submit(request("short", [1, 2], max_tokens=1))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step()]
    assert order[0] == "short"
    assert len(shapes) > 20
