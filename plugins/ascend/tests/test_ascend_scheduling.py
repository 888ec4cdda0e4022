"""Batching windows, priorities, idle boost and advice, all in simulated time."""

import statistics

import attrs
import pytest
from ascend_steps import Decoder, open_sim, step
from click.testing import CliRunner

from halogen_ascend.explain_batching import explain_batching_command
from halogen_ascend.scheduling.arrivals import Arrival, bursty, poisson
from halogen_ascend.scheduling.serve import serve_continuously, serve_statically
from halogen_ascend.scheduling.window import BatchBudget, BatchWindow, compose
from halogen_ascend.sim.idle import HEARTBEAT_S, IDLE_AFTER_S, RAMP_S, IdleClock
from halogen_core.spi import ConfigError, StepShape

BUDGET = BatchBudget(kv_tokens=100_000, step_tokens=8192, sequences=32)


def loaded_backend(name="910B2"):
    """A backend whose advice knows a 14B model's sums without holding its weights."""
    made = open_sim(name)
    made.advice.weight_bytes, made.advice.macs_per_token = 28_000_000_000, 14_000_000_000
    made.advice.matrices, made.advice.layers = 240, 40
    made.advice.macs_per_pair = 40 * 2 * 40 * 128
    made.advice.kv_bytes_per_token = 40 * 8 * 128 * 2 * 2
    return made


def stepper(backend):
    def seconds(shape, now):
        took = backend.advice.device_seconds(shape)
        backend.observe(shape, took)
        return took

    return seconds


def test_the_worked_example_is_one_batch():
    three = [
        Arrival(at=0.000, input_len=512, output_len=128),
        Arrival(at=0.002, input_len=2048, output_len=64),
        Arrival(at=0.004, input_len=128, output_len=256),
    ]
    budget = BatchBudget(kv_tokens=4096, step_tokens=4096, sequences=8)
    assert compose(three, budget) == three
    assert compose(three, BatchBudget(kv_tokens=3000, step_tokens=4096, sequences=8)) == three[:2]
    out = serve_continuously(three, BatchWindow(min_s=0.005), budget, lambda s, now: 0.01)
    # each arrival within 5 ms of the last extends the wait, which the cap of 10 ms ends
    assert [s.queued for s in sorted(out.served, key=lambda s: s.request.at)] == pytest.approx(
        [0.009, 0.007, 0.005]
    )
    assert out.steps == 256
    with pytest.raises(ConfigError, match="min_batch_window_ms 20 is not within 0 to"):
        BatchWindow(min_s=0.02)


@pytest.mark.parametrize("window_ms", [0, 5, 10])
def test_the_window_adds_at_most_itself_and_nothing_when_busy(window_ms):
    window = BatchWindow(min_s=window_ms / 1e3, max_s=0.010)
    idle = serve_continuously([Arrival(at=1.0, output_len=1)], window, BUDGET, lambda s, n: 0.01)
    assert idle.served[0].queued == pytest.approx(window_ms / 1e3)
    late = [Arrival(at=0.0, output_len=50), Arrival(at=0.2, output_len=1)]
    busy = serve_continuously(late, window, BUDGET, lambda s, n: 0.01)
    assert max(s.queued for s in busy.served) <= max(window_ms / 1e3, 0.011)


def test_high_priority_overtakes_in_the_queue():
    small = BatchBudget(kv_tokens=300, step_tokens=4096, sequences=1)
    waiting = [Arrival(at=i * 1e-3) for i in range(4)] + [Arrival(at=4e-3, priority=1)]
    out = serve_continuously(waiting, BatchWindow(min_s=0.005), small, lambda s, n: 0.001)
    assert [s.request.priority for s in out.served] == [1, 0, 0, 0, 0]
    assert [s.request.at for s in out.served[1:]] == sorted(s.request.at for s in out.served[1:])


@pytest.mark.parametrize("process", [poisson, bursty])
def test_continuous_beats_static_and_the_window_is_not_why(process):
    backend = loaded_backend()
    arrivals = list(process(5, 60, seed=1))
    step_of = stepper(backend)
    runs = {
        w: serve_continuously(arrivals, BatchWindow(min_s=w / 1e3), BUDGET, step_of)
        for w in (0, 10)
    }
    static = serve_statically(arrivals, BatchWindow(min_s=0.010), BUDGET, step_of)
    assert all(len(r.served) == len(arrivals) for r in (*runs.values(), static))
    mean = {k: statistics.mean(s.total for s in r.served) for k, r in runs.items()}
    assert mean[10] < statistics.mean(s.total for s in static.served)
    # 10 ms at 5 requests a second catch a second one in 0.12 % of windows: it cannot fill a batch
    assert runs[10].mean_batch == pytest.approx(runs[0].mean_batch, rel=0.25)
    assert runs[10].utilisation <= 1
    assert runs[10].tokens_per_busy_second > 0.9 * static.tokens_per_busy_second


def test_what_a_window_gives_is_what_probability_says():
    one_step = lambda shape, now: 1e-4  # noqa: E731 - so short that nothing overlaps
    alone = [Arrival(at=a.at, output_len=1) for a in poisson(5, 2000, seed=3)]
    out = serve_continuously(alone, BatchWindow(min_s=0.010), BUDGET, one_step)
    assert 1.0 < out.mean_batch < 1.10  # the notes' 89 % utilisation needs another cause


def test_the_boost_keeps_the_clock_up_and_only_when_idle():
    slow, fast = IdleClock(), IdleClock(boost=True)
    assert [c.share(HEARTBEAT_S * 0.9) for c in (slow, fast)] == [1.0, 1.0]
    assert fast.heartbeats == 0
    for clock in (slow, fast):
        clock.worked(HEARTBEAT_S)
    later = HEARTBEAT_S + 3 * IDLE_AFTER_S
    assert [c.share(later) for c in (slow, fast)] == [0.5, 1.0]
    assert (slow.heartbeats, fast.heartbeats) == (0, 3 * IDLE_AFTER_S / HEARTBEAT_S)
    slow.worked(later + RAMP_S)
    assert slow.share(later + RAMP_S) == 1.0, "the clock is back after its ramp"


def test_the_first_request_after_a_pause_is_slower_without_the_boost():
    def first_step(boost):
        backend = open_sim()
        decoder, clock = Decoder(backend), IdleClock(boost=boost)
        backend.device.clock_share = clock.share(60.0)
        before = backend.device.now
        decoder.logits(step([([1] * 100, 0, [0])]))
        return backend.device.now - before

    assert first_step(False) > 1.02 * first_step(True)


def test_advice_follows_the_model_and_learns_the_observers_clock():
    backend = loaded_backend()
    decode = StepShape(prefill_tokens=0, decode_sequences=8, kv_tokens=8 * 4096)
    more = StepShape(prefill_tokens=4096, decode_sequences=8, kv_tokens=8 * 4096)
    a, b = backend.cost(decode), backend.cost(more)
    assert a.p50 < b.p50
    assert a.p50 <= a.p95
    floor = (28e9 + decode.kv_tokens * backend.advice.kv_bytes_per_token) / 1.6e12
    assert a.p50 >= floor, "never under the roofline"
    for _ in range(50):
        backend.observe(decode, 3.0)
    assert backend.cost(decode).p50 == pytest.approx(3.0, rel=0.05)
    early, late = (
        attrs.evolve(more, prefill_pairs=4096 * context) for context in (2048, 128 * 1024)
    )
    assert backend.cost(more).p50 <= backend.cost(early).p50 < 0.9 * backend.cost(late).p50
    assert backend.limits().token_buckets == backend.options.graph_buckets


def test_advice_is_near_what_the_device_then_takes():
    """Predicted against simulated step time of a real little model, both from idle."""
    backend = open_sim("910B2")
    decoder = Decoder(backend)
    before = backend.device.now
    decoder.logits(step([([1] * 64, 0, [0])]))
    took = backend.device.now - before
    shape = StepShape(prefill_tokens=64, decode_sequences=0, kv_tokens=64)
    assert 0.4 < backend.advice.device_seconds(shape) / took < 2.5


def test_batching_is_explained():
    done = CliRunner().invoke(
        explain_batching_command, ["--rate", "5", "--seconds", "20"], catch_exceptions=False
    )
    assert done.exit_code == 0
    rows = [line.split() for line in done.output.splitlines()]
    assert [r[0] for r in rows if r and r[0] in ("static", "continuous")] == [
        "static",
        "continuous",
        "continuous",
    ]
    boosted = CliRunner().invoke(
        explain_batching_command, ["--rate", "0.05", "--seconds", "200", "--idle-frequency-boost"]
    )
    assert int(boosted.output.splitlines()[-1].split()[0]) > 10, "empty launches are told"
