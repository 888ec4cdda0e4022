"""Orders of the queue: what overtakes what, and for how long at most."""

import random

import pytest

from halogen_core.errors import ConfigError
from halogen_core.kv.policies import eviction_policy
from halogen_core.scheduler.policies import (
    SCHEDULING_POLICIES,
    priority_of,
    scheduling_policy,
)
from halogen_core.scheduler.policy import FairShare, Priority, ShortestRemaining
from halogen_core.spi import PolicySpec


def order(driver, limit=5000):
    """Ids in the order in which they were let in."""
    started = []
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        for item in driver.step(eos=None).items:
            if item.seq.seq_id not in started:
                started.append(item.seq.seq_id)
        assert driver.steps < limit
    return started


def test_first_come_first_served(drive, sequence):
    driver = drive(max_batch=1)
    for i in range(5):
        driver.scheduler.add(sequence(range(4), 2, arrival=i * 0.001, priority=i))
    assert order(driver) == [0, 1, 2, 3, 4]


def test_high_priority_overtakes_within_the_bound(drive, sequence):
    driver = drive(max_batch=1, policy=Priority(aging_s=1.0))
    for i, (arrival, priority) in enumerate([(0.0, 0), (0.1, 1), (0.9, 1), (1.5, 1), (0.2, -1)]):
        driver.scheduler.add(sequence(range(4), 2, arrival=arrival, priority=priority))
        assert i == driver.scheduler.num_waiting - 1
    assert order(driver) == [1, 2, 0, 3, 4]


def test_shortest_first_but_nothing_starves(drive, sequence):
    driver = drive(max_batch=1, policy=ShortestRemaining(seconds_per_token=0.01, bound_s=1.0))
    driver.scheduler.add(sequence(range(200), 10, arrival=0.0))
    driver.scheduler.add(sequence(range(4), 2, arrival=0.5))
    driver.scheduler.add(sequence(range(4), 2, arrival=1.1))
    assert order(driver) == [1, 0, 2]


def run_fairness(drive, sequence, policy):
    """One client with 200 requests, ten clients with one: latencies of the ten (T32)."""
    driver = drive(512, 4, max_batch=4, max_queue=300, policy=policy)
    rng = random.Random(5)

    def request(session):
        prompt = [rng.randrange(1000) for _ in range(12)]
        return sequence(prompt, 8, arrival=driver.now, session=session)

    for _ in range(200):
        driver.scheduler.add(request("heavy"))
    light = []
    for i in range(10):
        for _ in range(5):
            driver.step(eos=None)
        light.append(request(f"light{i}"))
        driver.scheduler.add(light[-1])
    while not all(seq in driver.finished for seq in light):
        driver.step(eos=None)
        assert driver.steps < 5000
    return max(driver.ended[seq.seq_id] - seq.arrival for seq in light)


def test_light_clients_are_not_held_up_by_a_heavy_one(drive, sequence):
    solo = 0.01 * 9
    assert run_fairness(drive, sequence, FairShare()) <= 3 * solo
    assert run_fairness(drive, sequence, None) > 3 * solo, "without fairness they are"


def test_fair_share_divides_tokens_not_requests(drive, sequence):
    driver = drive(2048, 4, max_batch=1, max_queue=500, policy=FairShare())
    for i in range(50):
        driver.scheduler.add(sequence(range(i, i + 30), 10, session="large"))
        driver.scheduler.add(sequence(range(i, i + 5), 5, session="small"))
    started = order(driver)[:40]
    large = sum(seq_id % 2 == 0 for seq_id in started)
    assert large / 40 == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("name", [spec.name for spec in SCHEDULING_POLICIES])
def test_no_policy_starves_anybody(name, drive, sequence):
    """A stream of favoured work that alone fills the device: the other one still runs."""
    driver = drive(256, 4, max_batch=2, max_queue=10_000, policy=scheduling_policy(name))
    victim = sequence(range(40), 20, arrival=0.0, session="a")
    for i in range(6):
        driver.scheduler.add(sequence(range(i, i + 4), 2, session="b", priority=3))
    driver.scheduler.add(victim)
    while victim.started is None:
        seq = sequence(range(driver.steps, driver.steps + 4), 2, session="b", priority=3)
        seq.arrival = driver.now
        driver.scheduler.add(seq)
        driver.step(eos=None)
        assert driver.now <= 5.1, "bound of every policy: five seconds"


def test_policies_by_name_and_from_plugins():
    spec = PolicySpec(name="mine", factory="halogen_core.scheduler.policy:FCFS")
    assert scheduling_policy("mine", [spec]).key is not None
    with pytest.raises(ConfigError, match="`foo`; there are fair, fcfs, priority, shortest"):
        scheduling_policy("foo")
    with pytest.raises(ConfigError, match="cheapest_loss, lru, session_priority"):
        eviction_policy("foo")


def test_priorities_by_label_and_number():
    assert priority_of("high") == 1
    assert priority_of(-2) == -2
    with pytest.raises(ConfigError, match="numbers and low, normal, high, urgent"):
        priority_of("hihg")
