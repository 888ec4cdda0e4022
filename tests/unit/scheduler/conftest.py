"""A fake KV store that checks every slot a step would read."""

import pytest

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.ledger import breach
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.scheduler.sequence import Sequence, Status
from halogen_core.spi import Limits


def next_token(prefix):
    """A deterministic model: what comes after `prefix`."""
    return hash(tuple(prefix)) % 50


class Driver:
    """Runs the real scheduler and pool over a store of what each slot holds."""

    def __init__(self, pool, config, check_every=1, **options):
        self.pool = pool
        self.scheduler = Scheduler(config, pool, **options)
        self.size = pool.block_size
        self.store = [None] * (pool.num_blocks * self.size)
        self.now = 0.0
        self.steps = 0
        self.check_every = check_every
        self.finished = []
        self.ended = {}

    def step(self, eos=7):
        plan = self.scheduler.schedule(self.now)
        self.check_plan(plan)
        for source, target in plan.copies:
            rows = self.store[source * self.size : (source + 1) * self.size]
            self.store[target * self.size : (target + 1) * self.size] = rows
        for item in plan.items:
            self.write(item)
        sampled = [[self.read(item)] if item.samples else [] for item in plan.items]
        self.now += 0.01
        self.scheduler.update(plan, sampled)
        for item in plan.items:
            self.end_if_done(item.seq, eos)
        for seq, _ in plan.expired:
            self.scheduler.finish(seq)
        self.steps += 1
        if self.steps % self.check_every == 0:
            self.audit()
        return plan

    def check_plan(self, plan):
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_batch_tokens
        assert len(self.scheduler.running) <= config.max_batch
        assert len({item.seq.seq_id for item in plan.items}) == len(plan.items)
        for seq, count, samples in plan.items:
            assert seq.status is Status.RUNNING
            assert 0 < count <= seq.num_uncomputed_tokens
            assert samples == (count == seq.num_uncomputed_tokens)

    def slot(self, seq, position):
        return seq.block_table[position // self.size] * self.size + position % self.size

    def write(self, item):
        seq = item.seq
        start = seq.num_computed_tokens
        for position in range(start, start + item.num_tokens):
            digest = hash(tuple(seq.token_ids[: position + 1]))
            self.store[self.slot(seq, position)] = (position, digest)

    def read(self, item):
        """All context slots must hold this sequence's prefix."""
        seq = item.seq
        for position in range(seq.num_tokens):
            digest = hash(tuple(seq.token_ids[: position + 1]))
            assert self.store[self.slot(seq, position)] == (position, digest), position
        return next_token(seq.token_ids)

    def end_if_done(self, seq, eos):
        if seq.num_generated and (
            seq.token_ids[-1] == eos or seq.num_generated >= seq.max_new_tokens
        ):
            self.scheduler.finish(seq)
            self.finished.append(seq)
            self.ended[seq.seq_id] = self.now

    def audit(self):
        assert {seq.lease for seq in self.scheduler.running} == set(self.pool.leases)
        assert breach(self.pool) is None

    def run(self, limit=20_000):
        while self.scheduler.num_running or self.scheduler.num_waiting:
            plan = self.step()
            if not plan.items:
                assert plan.wait_until is not None, "no work and no time to wait for"
                self.now = max(self.now, plan.wait_until)
            assert self.steps < limit, "no progress"


def expected(prompt, max_new_tokens, eos=7):
    """What a sequence says when it runs alone."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == eos:
            break
    return tokens


@pytest.fixture
def drive():
    """Makes a driver: `drive(num_blocks, block_size, max_batch=.., ...)`."""

    def make(
        num_blocks=64, block_size=4, *, pool=None, policy=None, cost=None, limits=Limits, **config
    ):
        config = {"max_batch": 8, "max_batch_tokens": 64, "headroom": 0.0, **config}
        return Driver(
            pool or BlockPool(num_blocks, block_size),
            SchedulerConfig(**config),
            policy=policy,
            cost=cost,
            limits=limits,
        )

    return make


@pytest.fixture
def sequence():
    """Makes sequences with ascending ids: `sequence(prompt, max_new_tokens, ...)`."""
    made = []

    def make(prompt, max_new_tokens=4, **options):
        seq = Sequence(
            seq_id=len(made), token_ids=list(prompt), max_new_tokens=max_new_tokens, **options
        )
        made.append(seq)
        return seq

    return make


@pytest.fixture
def alone():
    return expected
