"""Heat while running: sensors are only read, limits and predictions follow them, and come back."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from ascend_steps import open_sim
from test_ascend_engine import engine_of

from halogen_ascend.captured import Captured
from halogen_ascend.heat import Heat, Reading
from halogen_ascend.npu.backend import RIDGE, NpuBackend
from halogen_ascend.npu.heat_poll import PATIENCE, HeatPoll, sense
from halogen_ascend.npu_smi import reading
from halogen_ascend.options import sim_options
from halogen_ascend.sim.backend import SimBackend
from halogen_ascend.sim.faults import Fault
from halogen_ascend.sim.profiles import profiles
from halogen_core.engine.protocol import GenerateRequest
from halogen_core.scheduler.limits import REFRESH_S
from halogen_core.spi import BackendOptions, ConfigError, DoctorContext, StepShape

FIXTURES = Path(__file__).parent / "fixtures"
NOMINAL, THROTTLED = (
    (FIXTURES / f"npu_smi_common_{name}.txt").read_text() for name in ("nominal", "throttled")
)


# -- judging readings


def test_heat_begins_and_ends_at_different_readings(caplog):
    heat, seen = Heat(name="ascend:0"), []
    ramp = [60, 84, 86, 83, 81, 80, 84, 86, 79]
    with caplog.at_level(logging.INFO, "halogen_ascend"):
        for celsius in ramp:
            heat.take(Reading(celsius=celsius))
            seen.append(heat.throttled)
    assert seen == [False, False, True, True, True, False, False, True, False]
    assert heat.events == 2
    assert len(caplog.records) == 4, "each beginning and each end is said once"
    assert "86 C" in caplog.records[0].message


def test_the_clock_has_its_own_hysteresis_and_tells_what_is_left():
    heat = Heat(name="ascend:0")
    for share, throttled, left in (
        (0.91, False, 1.0),
        (0.44, True, 0.44),
        (0.92, True, 0.92),
        (0.95, False, 1.0),
    ):
        heat.take(Reading(celsius=50, clock_share=share))
        assert (heat.throttled, heat.clock_share) == (throttled, left)
    heat.take(Reading(celsius=50, clock_share=0.4, busy=False))
    assert not heat.throttled, "an idle part lowers its clock by itself"
    assert heat.gauges() == {
        "device_throttled": 0.0,
        "device_celsius": 50,
        "device_clock_ratio": 0.4,
    }


# -- reading sensors


def test_both_figures_are_read_from_the_vendors_tool():
    cool, hot = reading(NOMINAL), reading(THROTTLED)
    # the captured parts are idle: their clock says nothing about heat
    assert (cool.celsius, cool.clock_share, cool.busy) == (47, 1.0, False)
    assert hot.clock_share == pytest.approx(800 / 1800)
    working = reading(
        THROTTLED.replace("Aicore Usage Rate(%)           : 0", "Aicore Usage Rate(%) : 97")
    )
    assert (working.celsius, working.busy) == (91, True)
    assert reading("nonsense") == Reading()


def test_a_ramp_in_sysfs_is_followed_and_nothing_is_written(tmp_path):
    zone = tmp_path / "sys/class/thermal/thermal_zone0/temp"
    zone.parent.mkdir(parents=True)
    source, heat, states = (
        Captured(DoctorContext(root=str(tmp_path), live=False)),
        Heat(name="x"),
        [],
    )
    for celsius in (60, 80, 86, 90, 82, 79):
        zone.write_text(f"{celsius}000\n")
        zone.chmod(0o444)
        before = sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
        heat.take(sense(source, 0))
        states.append(heat.throttled)
        assert before == sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
        zone.chmod(0o644)
    assert states == [False, False, True, True, True, False]
    zone.unlink()
    assert sense(source, 0) is None


def test_the_only_command_is_a_question(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout=THROTTLED)

    monkeypatch.setattr("halogen_ascend.captured.subprocess.run", run)
    assert sense(Captured(DoctorContext()), 3).celsius == 91
    assert asked == [["npu-smi", "info", "-t", "common", "-i", "3"]]


# -- the thread of a real part


def test_a_slow_sensor_holds_nobody_up_and_closing_ends_the_questions():
    backend, entered, answer = npu_on_cpu(), threading.Event(), threading.Event()

    def read():
        entered.set()
        answer.wait(10)
        return Reading(celsius=95)

    backend.watch_heat(read)
    assert entered.wait(10)
    assert backend.limits().max_tokens is None, "asked while the sensor still thinks"
    answer.set()
    (thread,) = (t for t in threading.enumerate() if t.name == "ascend-heat")
    backend.close()
    thread.join(10)
    assert not thread.is_alive()
    assert backend.heat.throttled


def test_sensors_that_fall_silent_are_given_up_and_said(caplog):
    heat, answers = Heat(name="ascend:1"), iter([Reading(celsius=95), *[None] * PATIENCE])
    poll = HeatPoll(heat, lambda: next(answers))
    assert poll.once()
    assert heat.throttled
    with caplog.at_level(logging.WARNING, "halogen_ascend"):
        assert [poll.once() for _ in range(PATIENCE)] == [True] * (PATIENCE - 1) + [False]
    assert not heat.throttled, "an unwatched part does not stay throttled"
    assert "`ascend:1` cannot be read" in caplog.text


def npu_on_cpu():
    return NpuBackend(BackendOptions(), device="cpu", name="ascend")


def test_a_real_parts_limits_and_predictions_follow():
    backend, shape = npu_on_cpu(), StepShape(prefill_tokens=64, decode_sequences=0, kv_tokens=64)
    for tokens in range(8, 200, 8):
        backend.observe(attrs.evolve(shape, prefill_tokens=tokens), tokens * 1e-3)
    cool, chunk = backend.cost(shape), RIDGE.ridge_tokens(1.0)
    backend.heat.take(Reading(celsius=91, clock_share=0.5))
    assert backend.limits().max_tokens == chunk // 2
    assert backend.cost(shape).p50 == pytest.approx(2 * cool.p50)
    for _ in range(50):  # what was foretold comes true: nothing new is learnt from it
        backend.observe(shape, backend.cost(shape).p50)
    told = backend.counters()
    assert (told.gauges["device_throttled"], told.counters["device_throttle_events"]) == (1, 1)
    backend.heat.take(Reading(celsius=60, clock_share=1.0))
    assert backend.limits().max_tokens is None
    assert backend.cost(shape).p50 == pytest.approx(cool.p50, rel=0.05)


def test_the_ridge_of_each_part_is_a_power_of_two_that_falls_with_the_clock():
    for part in profiles().values():
        sizes = [part.ridge_tokens(share) for share in (0.01, 0.25, 0.5, 1.0)]
        assert sizes == sorted(sizes)
        assert all(size & (size - 1) == 0 and 16 <= size <= 512 for size in sizes)


# -- the engine in simulated time


def slow_part():
    """A part so slow that a small model keeps its cubes busy, with a ridge of 512 tokens."""
    options = sim_options(BackendOptions(device="ascend:sim:tiny"))
    part = attrs.evolve(
        options.part, clock=2e5, hbm_bandwidth=2e7, dma=6e6, vector_bytes_per_cycle=1 << 20
    )
    return SimBackend.open(attrs.evolve(options, part=part, graph_buckets=()))


@attrs.frozen
class Phase:
    gap: float
    """Longest step: what running answers wait for their next token."""
    ttft: float
    most: int
    """Most tokens that a step was allowed."""


@attrs.define
class Run:
    """An engine whose clock is the simulated one, under three endless answers and long prompts."""

    engine: object
    device: object
    sent: int = 0
    tokens: dict = attrs.field(factory=dict)

    def send(self, length, answer):
        self.sent += 1
        self.engine.submit(
            GenerateRequest(
                request_id=f"r{self.sent}",
                prompt_token_ids=[(7 * self.sent + i) % 97 for i in range(length)],
                max_tokens=answer,
                use_prefix_cache=False,
            )
        )

    def phase(self, seconds):
        """`seconds` with one long prompt after the other; device time."""
        end, gaps, first, most = self.device.now + seconds, [], [], 0
        while self.device.now < end:
            if self.engine.scheduler.num_running + self.engine.scheduler.num_waiting < 4:
                self.send(380, 1)
            before = self.device.now
            for output in self.engine.step():
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.timings and output.timings.ttft_s:
                    first.append(output.timings.ttft_s)
            gaps.append(self.device.now - before)
            most = max(most, self.engine.scheduler.limits.max_tokens)
        return Phase(max(gaps), max(first), most)


def started(monkeypatch, backend, **options):
    device = backend.device
    clock = SimpleNamespace(perf_counter=lambda: device.now)
    monkeypatch.setattr("halogen_core.engine.runner.time", clock)
    engine = engine_of(backend, "llama", max_batch_tokens=512, **options)
    engine.clock = lambda: device.now
    run = Run(engine, device)
    for _ in range(3):
        run.send(4, 10_000)
    return run


def cool_hot_cool(run, backend):
    """A phase at full clock, one at half of it, one back; each begins once the engine has asked."""
    told = [run.phase(2)]
    for faults in ((Fault(kind="throttle", factor=0.5),), ()):
        backend.device.faults.faults = faults
        run.phase(REFRESH_S + 0.1)
        told.append(run.phase(2))
    return told


def test_a_throttled_part_gets_smaller_steps_and_running_answers_keep_their_pace(monkeypatch):
    backend = slow_part()
    run = started(monkeypatch, backend)
    cool, hot, late = cool_hot_cool(run, backend)
    assert [phase.most for phase in (cool, hot, late)] == [512, 256, 512]
    assert hot.gap < 1.3 * cool.gap
    assert late.gap < 1.05 * cool.gap
    assert late.ttft < 1.05 * cool.ttft < hot.ttft < 2.5 * cool.ttft
    stats = run.engine.stats()
    assert stats.counters["device_throttle_events"] == 1
    assert (stats.gauges["device_throttled"], stats.gauges["step_max_tokens"]) == (0, 512)


@pytest.mark.slow
def test_without_its_sensors_the_same_part_stutters(monkeypatch):
    """What the test above would show if nobody looked."""
    deaf = slow_part()
    monkeypatch.setattr(Heat, "take", lambda self, reading: None)
    cool, hot, _ = cool_hot_cool(started(monkeypatch, deaf), deaf)
    assert hot.most == 512
    assert hot.gap > 1.6 * cool.gap


def test_a_target_holds_in_the_heat_too(monkeypatch):
    target = 0.200
    backend = slow_part()
    run = started(monkeypatch, backend, tpot_target_ms=target * 1e3)
    for phase in cool_hot_cool(run, backend):
        assert phase.gap < 1.02 * target
        assert phase.ttft < 3 * target


def test_heat_changes_no_token(monkeypatch):
    runs = []
    for faults in ((), (Fault(kind="throttle", at=200, until=900, factor=0.3),)):
        backend = slow_part()
        backend.device.faults.faults = faults
        run = started(monkeypatch, backend)
        run.phase(2)
        runs.append(run.tokens)
    shared = runs[0].keys() & runs[1].keys()
    assert len(shared) > 4
    for name in shared:
        one, other = (r[name] for r in runs)
        length = min(len(one), len(other))
        assert one[:length] == other[:length]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("throttle=0", "above 0 and up to 1"),
        ("throttle=2", "above 0 and up to 1"),
        ("slow_core=3:0.5", "factor of 1 or more"),
        ("slow_core=3", "core:factor"),
        ("throttle=1:0.5", "only it names a core"),
        ("oom@3=2", "happens once"),
        ("device_lost@3-5", "happens once"),
        ("throttle@9-4", "a later one"),
        ("throttle=.5.", "one of oom"),
    ],
)
def test_faults_that_make_no_sense_are_refused(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        open_sim(faults=text)
    assert (caught.value.code, text in str(caught.value)) == ("HRT-7105", True)


def test_a_throttle_from_one_launch_to_another_is_one_event():
    backend, states = open_sim(faults="throttle@2-4=0.6"), []
    x = backend.upload(np.ones((2, 16), np.float32))
    for _ in range(6):
        backend.ops.add(x, x)
        states.append((backend.limits().max_tokens is not None, backend.counters().gauges))
    assert [lowered for lowered, _ in states] == [False, False, True, True, False, False]
    assert [g["device_celsius"] for _, g in states] == [47, 47, 91, 91, 47, 47]
    assert [g["device_clock_ratio"] for _, g in states] == [1, 1, 0.6, 0.6, 1, 1]
