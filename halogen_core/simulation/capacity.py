"""How many requests per second a box bears: a sweep of the arrival rate, percentiles for each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import attrs

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.policies import eviction_policy
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.policies import scheduling_policy
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.simulation.clients import (
    AgentShape,
    Client,
    Prompts,
    agent,
    bursty,
    poisson,
    question,
)
from halogen_core.simulation.device import DeviceProfile
from halogen_core.simulation.simulator import Simulator


@attrs.frozen(kw_only=True)
class Scenario:
    """A box and what it is asked."""

    device: DeviceProfile
    config: SchedulerConfig
    num_blocks: int
    block_size: int = 16
    scheduling: str = "fcfs"
    eviction: str = "lru"
    arrivals: str = "poisson"
    """`poisson` or `bursty`."""
    load: str = "mixed"
    """`mixed` (single questions, C50 lengths) or `agents`."""
    duration_s: float = 120.0
    seed: int = 0


@attrs.frozen(kw_only=True)
class Capacity:
    """What users see at one arrival rate. Times in seconds."""

    rate: float
    finished: int
    refused: int
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    output_tokens_per_s: float
    utilization: float
    """Share of the time that the device worked."""
    cache_hit_ratio: float
    preemptions: int


def simulator_of(scenario: Scenario, rate: float) -> Simulator:
    """A simulator at `rate` arrivals per second, not yet run."""
    rng = random.Random(scenario.seed)
    pool = BlockPool(
        scenario.num_blocks, scenario.block_size, eviction=eviction_policy(scenario.eviction)
    )
    scheduler = Scheduler(
        scenario.config,
        pool,
        policy=scheduling_policy(scenario.scheduling),
        cost=scenario.device.cost,
    )
    times = (bursty if scenario.arrivals == "bursty" else poisson)(rng, rate)
    within = itertools.takewhile(lambda t: t < scenario.duration_s, times)
    arrivals = zip(within, _clients(scenario, rng), strict=False)
    return Simulator(scheduler, pool, scenario.device, arrivals, seed=scenario.seed)


def measure(scenario: Scenario, rate: float) -> Capacity:
    """Run one rate until the last request that arrived within `duration_s` is done."""
    simulator = simulator_of(scenario, rate)
    simulator.run(until_s=20 * scenario.duration_s)
    done = [o for o in simulator.outcomes if o.finished is not None and not o.error]
    counters = simulator.scheduler.counters()
    ttft, tpot = [o.ttft for o in done], [o.tpot for o in done if o.num_generated > 1]
    return Capacity(
        rate=rate,
        finished=len(done),
        refused=sum(bool(o.error) for o in simulator.outcomes),
        ttft_p50=percentile(ttft, 50),
        ttft_p95=percentile(ttft, 95),
        tpot_p50=percentile(tpot, 50),
        tpot_p95=percentile(tpot, 95),
        output_tokens_per_s=sum(o.num_generated for o in done) / max(1e-9, simulator.now),
        utilization=simulator.busy_s / max(1e-9, simulator.now),
        cache_hit_ratio=counters["prefix_cache_hits"] / max(1, counters["prefix_cache_queries"]),
        preemptions=int(counters["preemptions"]),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))]


def _clients(scenario: Scenario, rng: random.Random) -> Iterator[Client]:
    shape = AgentShape()
    prompts = Prompts.make(rng, shape)
    for i in itertools.count():
        own = random.Random(rng.random())
        if scenario.load == "agents":
            yield agent(own, f"agent{i}", shape, prompts)
        else:
            yield question(own, f"client{i}")
