"""Limits, windows, lanes, deadlines: each rule on a fake clock."""

import pytest

from halogen_core.errors import ConfigError, Overloaded, RequestError
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.sequence import Lane
from halogen_core.spi import Cost, Limits


def cost(shape):
    """1 ms, 10 us a prompt token, 0.1 ms a running sequence."""
    seconds = 1e-3 + 1e-5 * shape.prefill_tokens + 1e-4 * shape.decode_sequences
    return Cost(p50=seconds, p95=seconds)


# -- at the door


def test_the_longest_prompt_is_taken_and_one_token_more_is_not(drive, sequence):
    driver = drive(max_prompt_len=10)
    driver.scheduler.add(sequence(range(10)))
    with pytest.raises(RequestError, match="prompt has 11 tokens; at most 10") as caught:
        driver.scheduler.add(sequence(range(11)))
    assert caught.value.code == "HRT-4102"


def test_answers_are_cut_to_max_decode_len(drive, sequence):
    driver = drive(max_decode_len=3)
    seq = sequence(range(5), 100)
    driver.scheduler.add(seq)
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        driver.step(eos=None)
    assert seq.num_generated == 3


def test_what_can_never_fit_is_refused_with_the_sum_and_the_next_runs(drive, sequence):
    driver = drive(4, 4)
    with pytest.raises(RequestError, match=r"10 \+ 8 = 18 tokens, that is 5 blocks of 4.* has 4"):
        driver.scheduler.add(sequence(range(10), 8))
    driver.scheduler.add(sequence(range(8), 8))
    driver.run()
    assert len(driver.finished) == 1


def test_a_full_queue_is_overload(drive, sequence):
    driver = drive(max_queue=2)
    driver.scheduler.add(sequence(range(4)))
    driver.scheduler.add(sequence(range(4)))
    with pytest.raises(Overloaded, match="2 requests wait; at most 2"):
        driver.scheduler.add(sequence(range(4)))


def test_the_backends_context_bounds_sequences(drive, sequence):
    driver = drive(limits=lambda: Limits(max_context=12))
    with pytest.raises(RequestError, match=r"10 \+ 4 = 14 tokens; the context holds 12"):
        driver.scheduler.add(sequence(range(10), 4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch": 64, "max_batch_tokens": 32}, "`max_batch_tokens` is 32 and `max_batch`"),
        ({"min_window_s": 0.02, "max_window_s": 0.01}, "is 20 and `max_batch_window_ms` is 10"),
        ({"max_prompt_len": 100, "max_total_tokens": 100}, "no token for an answer"),
        ({"max_batch": 0}, "`max_batch` is 0"),
        ({"long_lane_share": 0.0}, "`long_lane_share` is 0"),
        ({"fail_on_prefill_timeout": True}, "without a `prefill_timeout_ms`"),
    ],
)
def test_contradictions_are_refused_with_numbers(options, text):
    with pytest.raises(ConfigError, match=text):
        SchedulerConfig(**options)


# -- windows


def test_three_requests_within_the_window_form_one_batch(drive, sequence):
    """The worked example C57: (512, 128), (2048, 64) and (128, 256) go together, at once."""
    driver = drive(256, 16, max_batch=8, max_batch_tokens=4096, min_window_s=0.01)
    lengths = ((512, 128), (2048, 64), (128, 256))
    for i, (prompt, new) in enumerate(lengths):
        driver.now = 0.003 * i
        driver.scheduler.add(sequence(range(i, i + prompt), new, arrival=driver.now))
        plan = driver.scheduler.schedule(driver.now)
        assert plan.items == ()
        assert plan.wait_until == pytest.approx(0.01)
    plan = driver.scheduler.schedule(0.01)
    assert [item.num_tokens for item in plan.items] == [512, 2048, 128]
    assert all(item.samples for item in plan.items)
    longest = max(prompt + new for prompt, new in lengths)
    assert longest <= 256 * 16
    assert driver.pool.stats().active == sum(-(-prompt // 16) for prompt, _ in lengths)


def test_an_idle_device_never_waits_under_a_cap_alone(drive, sequence):
    driver = drive(max_window_s=0.01)
    driver.scheduler.add(sequence(range(8), arrival=0.0))
    assert len(driver.scheduler.schedule(0.0).items) == 1


def test_a_busy_device_waits_for_company_up_to_the_cap(drive, sequence):
    driver = drive(max_window_s=0.025)
    driver.scheduler.add(sequence(range(8), 30))
    driver.step(eos=None)
    late = sequence(range(50, 58), arrival=driver.now)
    driver.scheduler.add(late)
    began = driver.now
    while late.started is None:
        assert len(driver.step(eos=None).items) >= 1, "those that run go on"
    assert 0.025 <= late.started - began <= 0.025 + 0.011


def test_a_full_batch_does_not_wait(drive, sequence):
    driver = drive(max_batch=2, min_window_s=0.5)
    for i in range(2):
        driver.scheduler.add(sequence(range(i, i + 4), arrival=0.0))
    assert len(driver.scheduler.schedule(0.0).items) == 2


# -- budget


def test_a_long_prompt_does_not_freeze_admission(drive, sequence):
    """vllm#53130: while a long prefill eats the budget, short requests still get in."""
    driver = drive(256, 4, max_batch_tokens=32)
    driver.scheduler.add(sequence(range(400)))
    driver.step()
    short = sequence(range(500, 508), 2)
    driver.scheduler.add(short)
    for _ in range(3):
        driver.step()
    assert short.num_generated >= 1


def test_the_cost_model_keeps_running_answers_at_the_target(drive, sequence):
    driver = drive(1024, 4, max_batch_tokens=4096, tpot_target_s=0.003, cost=cost)
    driver.scheduler.add(sequence(range(8), 100))
    driver.step(eos=None)
    driver.scheduler.add(sequence(range(3000)))
    for _ in range(8):
        plan = driver.step(eos=None)
        prefill = sum(item.num_tokens for item in plan.items if item.num_tokens > 1)
        assert 150 <= prefill <= 190
        shape = type("Shape", (), {"prefill_tokens": prefill, "decode_sequences": 1})
        assert cost(shape).p50 <= 0.003


def test_live_tokens_stay_under_the_total(drive, sequence):
    driver = drive(256, 4, max_total_tokens=60, max_batch=8)
    for i in range(6):
        driver.scheduler.add(sequence(range(i, i + 12), 20, arrival=0.0))
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        driver.step(eos=None)
        assert sum(s.num_computed_tokens for s in driver.scheduler.running) <= 60
        assert driver.steps < 2000
    assert len(driver.finished) == 6
    assert max(s.num_preemptions for s in driver.finished) <= 3


# -- lanes and deadlines


def test_no_step_holds_both_lanes_and_both_move(drive, sequence):
    driver = drive(512, 4, max_batch_tokens=32, long_prompt_tokens=100)
    long = sequence(range(600), 4, arrival=0.0)
    driver.scheduler.add(long)
    lanes = []
    shorts = 0
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        if driver.steps % 4 == 0 and shorts < 25:
            shorts += 1
            prompt = range(1000 * shorts, 1000 * shorts + 8)
            driver.scheduler.add(sequence(prompt, 4, arrival=driver.now))
        prefilling = long.num_uncomputed_tokens > 1
        plan = driver.step()
        members = [item.seq is long for item in plan.items]
        if prefilling and any(members):
            assert members == [True]
        lanes.append(any(members))
        assert driver.steps < 1000
    assert long.num_generated
    waits = [seq.started - seq.arrival for seq in driver.finished if seq is not long]
    assert max(waits) <= 0.03, "a short request waits for one step of the long lane at most"


def test_the_long_lane_has_the_device_to_itself_when_nobody_else_wants_it(drive, sequence):
    driver = drive(512, 4, max_batch_tokens=64, long_prompt_tokens=100)
    driver.scheduler.add(sequence(range(640)))
    for _ in range(5):
        assert driver.step().num_tokens == 64


def test_a_slow_prefill_moves_to_the_long_lane(drive, sequence):
    driver = drive(512, 4, max_batch_tokens=16, prefill_timeout_s=0.05)
    seq = sequence(range(300))
    driver.scheduler.add(seq)
    while seq.lane is Lane.NORMAL:
        driver.step()
    assert 0.05 <= driver.now <= 0.08
    assert driver.scheduler.counters()["prefill_timeouts"] == 1
    driver.run()
    assert driver.finished == [seq]


def test_a_slow_prefill_fails_with_the_reason_if_told_so(drive, sequence):
    driver = drive(
        512, 4, max_batch_tokens=16, prefill_timeout_s=0.05, fail_on_prefill_timeout=True
    )
    driver.scheduler.add(sequence(range(300)))
    while not (plan := driver.step()).expired:
        assert driver.steps < 20
    ((_, error),) = plan.expired
    assert error.code == "HRT-4104"
    assert "of 300 prompt tokens are computed; `prefill_timeout_ms` is 50" in str(error)
    assert driver.pool.stats().active == 0


def test_nobody_waits_forever_without_a_reason(drive, sequence):
    driver = drive(8, 4, max_batch=1, queue_timeout_s=0.2)
    driver.scheduler.add(sequence(range(4), 28))
    driver.scheduler.add(sequence(range(4), 28, arrival=0.0))
    expired = []
    while not expired:
        expired += driver.step(eos=None).expired
    assert expired[0][1].code == "HRT-4105"
    assert driver.now == pytest.approx(0.21, abs=0.011)


# -- preemption


def test_preemptions_are_bounded_and_the_preempted_keep_their_place(drive, sequence, alone):
    driver = drive(9, 4, max_batch=6, max_batch_tokens=64, max_preemptions=2)
    sequences = [sequence(range(10 * i, 10 * i + 8), 24, arrival=0.0) for i in range(6)]
    for seq in sequences:
        driver.scheduler.add(seq)
    driver.run()
    assert driver.scheduler.counters()["preemptions"] > 0
    assert max(seq.num_preemptions for seq in sequences) <= 2
    for i, seq in enumerate(sequences):
        assert seq.token_ids == alone(range(10 * i, 10 * i + 8), 24)


def test_a_pool_barely_larger_than_one_request_serves_many(drive, sequence):
    """T13: 64 requests over 1.1 x one request's blocks: all complete."""
    driver = drive(9, 4, max_batch=64, max_batch_tokens=128, max_queue=64)
    for i in range(64):
        driver.scheduler.add(sequence(range(i, i + 16), 16, arrival=0.0))
    driver.run()
    assert len(driver.finished) == 64


def test_drafts_are_verified_and_rejected_ones_forgotten(drive, sequence):
    driver = drive()
    seq = sequence(range(6), 10)
    driver.scheduler.add(seq)
    driver.step(eos=None)
    driver.scheduler.draft(seq, 3)
    plan = driver.scheduler.schedule(1.0)
    (item,) = plan.items
    assert (item.num_tokens, item.samples) == (4, True)
    driver.scheduler.update(plan, [[40, 41]])
    assert seq.token_ids[-2:] == [40, 41]
    assert seq.num_uncomputed_tokens == 1
    assert seq.num_draft_tokens == 0


def test_chunks_end_at_checkpoints_of_recurrent_state(drive, sequence):
    driver = drive()
    driver.scheduler.add(sequence(range(30), checkpoints=(8, 20)))
    counts = [driver.step().items[0].num_tokens for _ in range(3)]
    assert counts == [8, 12, 10]


def test_no_place_is_idle_while_somebody_waits(drive, sequence):
    """A34: what ends in one step is replaced in the next."""
    driver = drive(512, 4, max_batch=4)
    for i in range(40):
        driver.scheduler.add(sequence(range(i, i + 6), 1 + i % 7, arrival=0.0))
    while driver.scheduler.num_waiting:
        assert len(driver.step(eos=None).items) == 4


def test_the_backends_depth_bounds_a_step(drive, sequence):
    """A33: a device that takes three sequences gets no more, however much memory is free."""
    driver = drive(512, 4, max_batch=8, limits=lambda: Limits(max_sequences=3, max_tokens=20))
    for i in range(8):
        driver.scheduler.add(sequence(range(i, i + 6), 4, arrival=0.0))
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        plan = driver.step(eos=None)
        assert len(plan.items) <= 3
        assert plan.num_tokens <= 20


def test_limits_that_a_device_lowers_while_running_hold_and_nobody_loses_blocks(
    drive, sequence, alone
):
    """C43: within a second of a throttled device's word; later arrivals pause and go on."""
    told = {"now": Limits()}
    driver = drive(1024, 4, max_batch=8, max_batch_tokens=64, limits=lambda: told["now"])
    made = [sequence(range(i, i + 6), 300, arrival=0.0) for i in range(8)]
    for seq in made:
        driver.scheduler.add(seq)
    assert len(driver.step(eos=None).items) == 8
    told["now"] = Limits(max_sequences=2, max_tokens=16, max_context=100)
    while len(plan := driver.step(eos=None).items) == 8:
        assert driver.now < 1.05, "the device was not asked again"
    assert driver.now > 0.9, "the device was asked in every step"
    for _ in range(20):
        assert [item.seq for item in plan] == made[:2]
        plan = driver.step(eos=None).items
    assert driver.scheduler.gauges()["step_max_sequences"] == 2
    with pytest.raises(RequestError, match="the context holds 100"):
        driver.scheduler.add(sequence(range(6), 100))
    told["now"] = Limits()
    driver.now += 1.0
    assert len(driver.step(eos=None).items) == 8
    while driver.scheduler.num_running:
        driver.step(eos=None)
    assert driver.scheduler.counters()["preemptions"] == 0
    assert all(seq.token_ids == alone(range(i, i + 6), 300, None) for i, seq in enumerate(made))


def test_a_long_prompt_takes_no_place_of_those_that_a_lowered_limit_leaves(drive, sequence):
    told = {"now": Limits()}
    driver = drive(512, 4, max_batch=4, long_prompt_tokens=20, limits=lambda: told["now"])
    driver.scheduler.add(sequence(range(200), 4, arrival=0.0))
    driver.scheduler.add(sequence(range(6), 4, arrival=0.0))
    driver.step(eos=None)
    told["now"] = Limits(max_sequences=1, max_tokens=8)
    driver.now += 1.0
    driver.run()
    assert len(driver.finished) == 2


def test_a_long_prompt_goes_on_when_those_that_wait_find_no_blocks(drive, sequence):
    """The short one's turn, and every block is set aside for the long one: no step may be lost."""
    driver = drive(5, 2, max_batch=3, max_batch_tokens=4, long_prompt_tokens=6, max_preemptions=0)
    driver.scheduler.add(sequence(range(9), 1, arrival=0.0))
    driver.step(eos=None)
    driver.scheduler.add(sequence([1], 1, arrival=0.0))
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        assert driver.step(eos=None).items


def test_a_limit_of_tokens_bounds_sequences_too(drive, sequence):
    driver = drive(512, 4, max_batch=8, limits=lambda: Limits(max_tokens=3))
    for i in range(8):
        driver.scheduler.add(sequence(range(i, i + 6), 4, arrival=0.0))
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        assert driver.step(eos=None).num_tokens <= 3


def test_slots_lost_to_fragmentation_are_few(drive, sequence):
    """C5: under 5 % of the slots that running sequences hold are unused."""
    driver = drive(4096, 16, max_batch=32, max_batch_tokens=4096, max_queue=300)
    for i in range(60):
        driver.scheduler.add(sequence(range(i, i + 300 + 7 * i), 12, arrival=0.0))
    worst = 0.0
    while driver.scheduler.num_running or driver.scheduler.num_waiting:
        plan = driver.scheduler.schedule(driver.now)
        sampled = [[1] if item.samples else [] for item in plan.items]
        driver.scheduler.update(plan, sampled)
        if len(driver.scheduler.running) == 32 and not any(n > 1 for _, n, _ in plan.items):
            worst = max(worst, driver.scheduler.gauges()["kv_fragmentation_ratio"])
        for item in plan.items:
            driver.end_if_done(item.seq, None)
    assert 0 < worst < 0.05


def test_a_fresh_pool_gives_neighbouring_blocks(drive, sequence):
    """B12: block tables are ascending runs while nothing has been evicted."""
    driver = drive(64, 4)
    seq = sequence(range(40), 4)
    driver.scheduler.add(seq)
    driver.step(eos=None)
    assert seq.block_table == list(range(10))
