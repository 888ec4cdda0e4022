"""The simulator: a million steps, the claims of the notes as relations, and its command."""

import itertools
import json
import random
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from halogen_core.cli.simulate import command
from halogen_core.errors import ConfigError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.cheapest_loss import CheapestLoss
from halogen_core.kv.ledger import breach
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.policy import FairShare
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.simulation.caching import agent_trace, compare_policies
from halogen_core.simulation.capacity import Scenario, measure, simulator_of
from halogen_core.simulation.clients import (
    AgentShape,
    Prompts,
    Turn,
    agent,
    bursty,
    mixed_length,
    poisson,
    words,
)
from halogen_core.simulation.device import PROFILES, DeviceProfile, load_profile
from halogen_core.simulation.plot import line_plot
from halogen_core.simulation.simulator import Simulator
from halogen_core.spi import StepShape
from halogen_core.spi.costs import LinearCost

SMALL = DeviceProfile(
    name="small", weight_bytes=1e9, kv_bytes_per_token=1e5, bandwidth=1e11, compute=5e3
)


def small_turns(rng, prompts):
    """A short conversation, sometimes with a shared beginning."""
    history = rng.choice(prompts)[: rng.randrange(1, 60)] + words(rng, rng.randrange(1, 40))
    for _ in range(rng.randrange(1, 4)):
        history = history + (
            yield Turn(
                prompt=history,
                max_new_tokens=rng.randrange(1, 40),
                delay_s=rng.random() / 20,
                session=f"s{rng.randrange(8)}",
                priority=rng.randrange(3),
            )
        )
        history = history + words(rng, rng.randrange(1, 10))


def run_steps(num_steps, seed):
    rng = random.Random(seed)
    prompts = [words(rng, 60) for _ in range(4)]
    pool = BlockPool(96, 4, eviction=CheapestLoss())
    config = SchedulerConfig(
        max_batch=8,
        max_batch_tokens=48,
        max_queue=64,
        prefill_timeout_s=0.5,
        long_prompt_tokens=90,
        tpot_target_s=0.05,
        max_window_s=0.01,
    )
    scheduler = Scheduler(config, pool, policy=FairShare(), cost=SMALL.cost)
    arrivals = zip(
        bursty(rng, 6.0), (small_turns(rng, prompts) for _ in itertools.count()), strict=False
    )
    simulator = Simulator(scheduler, pool, SMALL, arrivals, audit_every=500)
    for _ in range(num_steps // 1000):
        simulator.run(max_steps=simulator.num_steps + 1000)
        victims = scheduler.running[:2]
        if victims and rng.random() < 0.5:
            scheduler.abort(victims[-1].seq_id)
        simulator.outcomes.clear()
    assert simulator.num_steps >= num_steps
    assert breach(pool) is None
    assert pool.breaches == 0
    return scheduler.counters()


def test_twenty_thousand_steps_without_a_breach():
    counters = run_steps(20_000, seed=1)
    assert counters["preemptions"] > 50
    assert counters["kv_evictions{policy=lru,reason=forgotten}"] > 1000
    assert counters["prefix_cache_hits"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_steps_without_a_breach():
    run_steps(1_000_000, seed=2)


def test_the_length_mix_is_that_of_the_notes():
    rng = random.Random(1)
    lengths = [mixed_length(rng) for _ in range(6000)]
    observed = (
        sum(n < 128 for n in lengths),
        sum(128 <= n <= 1024 for n in lengths),
        sum(n > 1024 for n in lengths),
    )
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, (1800, 2400, 1800), strict=True))
    assert chi2 < 9.21, "1 % of a chi-square with two degrees of freedom"


@pytest.mark.parametrize("process", [poisson, bursty])
def test_arrivals_have_the_rate_they_say(process):
    times = list(itertools.islice(process(random.Random(3), 5.0), 20_000))
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = sum((g - mean) ** 2 for g in gaps) / len(gaps) / mean**2
    assert spread == pytest.approx(1.0, abs=0.1) if process is poisson else spread > 2


def test_a_side_turn_and_a_subagent_leave_the_main_conversation_whole():
    """Each turn of the main conversation begins with the one before and its answer."""
    rng = random.Random(2)
    shape = AgentShape(system=100, side_turn=1.0, subagent=0.5)
    prompts = Prompts.make(rng, shape)
    client = agent(rng, "a", shape, prompts)
    turn, before, mains = next(client), None, 0
    while True:
        answer = words(rng, turn.max_new_tokens)
        if turn.prompt[:100] == prompts.main:
            assert before is None or turn.prompt[: len(before)] == before
            before, mains = turn.prompt + answer, mains + 1
        try:
            turn = client.send(answer)
        except StopIteration:
            break
    assert mains == shape.turns


def test_more_load_means_longer_waits_and_a_busier_device():
    scenario = Scenario(
        device=SMALL, config=SchedulerConfig(), num_blocks=4096, duration_s=30.0, seed=4
    )
    light, heavy = measure(scenario, 0.3), measure(scenario, 5.0)
    assert light.ttft_p95 < heavy.ttft_p95
    assert light.utilization < heavy.utilization <= 1.0
    assert heavy.ttft_p50 <= heavy.ttft_p95
    assert light.refused == 0


def test_continuous_batching_beats_a_static_batch():
    """C8, relation only: the same load, one after another and together."""
    results = {}
    for batch in (1, 32):
        config = SchedulerConfig(max_batch=batch)
        scenario = Scenario(device=SMALL, config=config, num_blocks=8192, duration_s=20.0, seed=4)
        results[batch] = measure(scenario, 2.0)
    assert results[32].output_tokens_per_s > 1.5 * results[1].output_tokens_per_s


def test_the_cost_target_bounds_time_per_token_in_the_simulation():
    base = {"device": SMALL, "num_blocks": 8192, "duration_s": 20.0, "seed": 4}
    free = measure(Scenario(config=SchedulerConfig(), **base), 1.5)
    bound = measure(Scenario(config=SchedulerConfig(tpot_target_s=0.03), **base), 1.5)
    assert bound.tpot_p95 < free.tpot_p95
    assert bound.tpot_p95 <= 0.035


def test_a_long_job_does_not_slow_short_ones_much():
    """B16: one prompt of 64K tokens and twenty short ones; TTFT p95 within 3 x unloaded."""

    def short_waits(long_tokens):
        rng = random.Random(1)
        pool = BlockPool(8192, 16)
        config = SchedulerConfig(long_prompt_tokens=8192, tpot_target_s=0.05)
        scheduler = Scheduler(config, pool, cost=SMALL.cost)

        def one(count):
            yield Turn(prompt=words(rng, count), max_new_tokens=20)

        arrivals = [(0.0, one(long_tokens))] if long_tokens else []
        arrivals += [(0.5 + 0.4 * i, one(200)) for i in range(20)]
        simulator = Simulator(scheduler, pool, SMALL, iter(arrivals))
        simulator.run()
        waits = sorted(o.ttft for o in simulator.outcomes if len(o.turn.prompt) == 200)
        assert len(waits) == 20
        return waits[18]

    assert short_waits(65_536) <= 3 * short_waits(0)


@pytest.mark.parametrize(("share", "target"), [(0.25, 0.08), (0.5, 0.08), (1.0, 0.08), (0.5, 0.03)])
def test_answers_keep_the_target_while_a_long_prompt_is_computed(share, target):
    """B17: the time per token of eight answers beside 64K tokens of prompt; it gets done too."""
    rng = random.Random(2)
    pool = BlockPool(8192, 16)
    config = SchedulerConfig(
        long_prompt_tokens=8192, tpot_target_s=target, long_lane_share=share, max_queue=64
    )
    scheduler = Scheduler(config, pool, cost=SMALL.cost)

    def one(count, answer):
        yield Turn(prompt=words(rng, count), max_new_tokens=answer)

    arrivals = [(0.1 * i, one(100, 100)) for i in range(8)]
    arrivals = [*arrivals, (1.0, one(65_536, 1)), *((1.5 + i, one(100, 40)) for i in range(200))]
    simulator = Simulator(scheduler, pool, SMALL, iter(arrivals))
    simulator.run()
    (long,) = [o for o in simulator.outcomes if len(o.turn.prompt) == 65_536]
    beside = [o for o in simulator.outcomes if o.first_token < long.finished and o is not long]
    assert len(beside) > 20
    worst = max(o.tpot for o in beside)
    assert worst <= 1.05 * target, f"{worst * 1e3:.1f} ms"
    assert long.ttft < 200, "the long prompt starves"


class Learning:
    """A device whose cost model knows nothing at first."""

    block_copy_s = jitter = 0.0

    def __init__(self, profile, spread):
        self.profile, self.spread = profile, spread
        self.model, self.errors, self.rng = LinearCost(), [], random.Random(3)

    def seconds(self, shape):
        real = self.profile.seconds(shape) * (1 + self.rng.uniform(-self.spread, self.spread))
        if predicted := self.model.predict(shape):
            self.errors.append(abs(predicted.p50 - real) / real)
        self.model.observe(shape, real)
        return real


def test_what_is_learned_predicts_steps_and_keeps_the_target():
    """B17: after a few steps the mean error is under 10 %, and answers stay within the target."""
    device = Learning(SMALL, spread=0.05)
    scenario = Scenario(
        device=SMALL,
        config=SchedulerConfig(tpot_target_s=0.03),
        num_blocks=8192,
        duration_s=30.0,
        seed=4,
    )
    simulator = simulator_of(scenario, 1.5)
    simulator.device = device
    simulator.scheduler = Scheduler(scenario.config, simulator.pool, cost=device.model.predict)
    simulator.run()
    late = device.errors[len(device.errors) // 10 :]
    assert len(late) > 500
    assert sum(late) / len(late) < 0.1
    tpot = sorted(o.tpot for o in simulator.outcomes if o.num_generated > 1)
    assert tpot[int(0.95 * len(tpot))] <= 0.035


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_eviction_by_cheapest_loss_spares_agents(seed):
    """Five agents in a pool for three quarters of them; the optimum bounds every policy."""
    shape = AgentShape(system=600, tool_result=150, answer=60)
    trace = agent_trace(agents=5, seed=seed, shape=shape)
    longest = max(len(access.tokens) for access in trace)
    results = {r.policy: r for r in compare_policies(trace, int(0.6 * 5 * longest / 16), 16)}
    lost = {name: r.recomputed_tokens for name, r in results.items()}
    assert min(lost.values()) == lost["clairvoyant"]
    assert lost["cheapest_loss"] <= 0.8 * lost["lru"]


def test_a_step_costs_what_the_roofline_says():
    profile = PROFILES["unified-256GBps-8B-q4"]
    decode = profile.seconds(StepShape(prefill_tokens=0, decode_sequences=1, kv_tokens=0))
    assert decode == pytest.approx(0.001 + 4.7e9 / 212e9)
    deep = profile.seconds(StepShape(prefill_tokens=0, decode_sequences=1, kv_tokens=32_768))
    assert deep - decode == pytest.approx(32_768 * 131_072 / 212e9)


def test_profiles_from_files(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "weight_bytes = 1e9\nkv_bytes_per_token = 1e4\nbandwidth = 1e11\ncompute = 1e3\n"
    )
    assert load_profile(str(file)).name == "mine"
    file.write_text("weight_bytes = 1e9\ncolour = 'red'\n")
    with pytest.raises(ConfigError, match="its keys are name, weight_bytes"):
        load_profile(str(file))
    file.write_text("weight_bytes=1\nkv_bytes_per_token=1\nbandwidth=0\ncompute=1\n")
    with pytest.raises(ConfigError, match="`bandwidth` is 0"):
        load_profile(str(file))
    with pytest.raises(ConfigError, match="neither a file nor one of unified"):
        load_profile("nowhere")


def test_the_command_sizes_a_box(tmp_path):
    plot = tmp_path / "plot.svg"
    arguments = ["capacity", "--rates", "0.2,1", "--duration", "20", "--plot", str(plot)]
    done = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    rows = json.loads(done.output)
    assert [row["rate"] for row in rows] == [0.2, 1.0]
    assert all(row["ttft_p50"] <= row["ttft_p95"] for row in rows)
    svg = ElementTree.fromstring(plot.read_text())
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}polyline")) == 4
    table = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "TTFT" in table.output


def test_the_command_compares_eviction_policies():
    arguments = ["eviction", "--agents", "1", "--shares", "0.6", "--json"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    rows = json.loads(done.output)
    assert {row["policy"] for row in rows} >= {"lru", "cheapest_loss", "clairvoyant"}


@pytest.mark.parametrize("rates", ["a,b", "0", "-1", "1,,2", "inf"])
def test_bad_rates_are_refused(rates):
    done = CliRunner().invoke(command, ["capacity", "--rates", rates])
    assert isinstance(done.exception, ConfigError)


def test_a_plot_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to plot"):
        line_plot("t", "x", "y", {"a": [(1.0, float("nan"))]})


def test_the_same_seed_gives_the_same_simulation():
    scenario = Scenario(
        device=SMALL, config=SchedulerConfig(), num_blocks=2048, duration_s=10, load="agents"
    )
    runs = []
    for _ in range(2):
        simulator = simulator_of(scenario, 0.2)
        simulator.run(max_steps=2000)
        runs.append([(o.arrived, o.first_token, o.num_cached) for o in simulator.outcomes])
    assert runs[0] == runs[1]
