"""The scheduler in any order of arrivals, aborts, drafts, changed limits and repeated steps."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halogen_core.errors import RequestError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.ledger import breach
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.policies import SCHEDULING_POLICIES, scheduling_policy
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.scheduler.sequence import Sequence, Status
from halogen_core.spi import Limits

SIZE = 2


class SchedulerMachine(RuleBasedStateMachine):
    """The model: tokens a sequence must have computed, and when it must be over."""

    @initialize(
        blocks=st.integers(4, 14),
        policy=st.sampled_from([spec.name for spec in SCHEDULING_POLICIES]),
        long=st.sampled_from([None, 6]),
        total=st.sampled_from([None, 20]),
        preemptions=st.integers(0, 2),
    )
    def start(self, blocks, policy, long, total, preemptions):
        self.pool = BlockPool(blocks, SIZE)
        config = SchedulerConfig(
            max_batch=3,
            max_batch_tokens=7,
            max_queue=10,
            long_prompt_tokens=long,
            max_total_tokens=total,
            max_preemptions=preemptions,
            headroom=0.0,
        )
        self.told = Limits()
        self.scheduler = Scheduler(
            config, self.pool, policy=scheduling_policy(policy), limits=lambda: self.told
        )
        self.live = {}
        self.now = 0.0
        self.serial = 0
        self.idle_steps = 0

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=16),
        new=st.integers(1, 12),
        session=st.sampled_from("ab"),
        priority=st.integers(-1, 3),
    )
    def add(self, tokens, new, session, priority):
        self.serial += 1
        seq = Sequence(
            seq_id=self.serial,
            token_ids=tokens,
            max_new_tokens=new,
            session=session,
            priority=priority,
            arrival=self.now,
        )
        try:
            self.scheduler.add(seq)
        except RequestError:
            return
        self.live[seq.seq_id] = seq

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        victim = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(victim)
        assert not self.scheduler.abort(victim)
        assert self.live.pop(victim).status is Status.FINISHED

    @rule(sequences=st.integers(1, 3), tokens=st.integers(1, 7))
    def change_limits(self, sequences, tokens):
        self.told = Limits(max_sequences=sequences, max_tokens=tokens)
        self.now += 1.0  # now it is asked again

    @precondition(lambda self: self.answering())
    @rule(data=st.data(), count=st.integers(1, 2))
    def draft(self, data, count):
        self.scheduler.draft(data.draw(st.sampled_from(self.answering())), count)

    def answering(self):
        """Those that have room in their answer for drafts."""
        running = self.scheduler.running if hasattr(self, "scheduler") else ()
        ready = [s for s in running if s.num_uncomputed_tokens == 1 and not s.num_draft_tokens]
        return [s for s in ready if s.max_new_tokens - s.num_generated >= 3]

    @rule(repeat=st.booleans(), accepted=st.integers(0, 2))
    def step(self, repeat, accepted=0):
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        if repeat:  # the device was busy: the engine asks again
            plan = self.scheduler.schedule(self.now)
        assert plan.num_tokens <= (self.told.max_tokens or 7)
        assert len(plan.items) <= (self.told.max_sequences or 3)
        self.idle_steps = 0 if plan.items or not self.live else self.idle_steps + 1
        assert self.idle_steps < 3, "work and nothing done"
        before = [seq.num_computed_tokens for seq, _, _ in plan.items]
        wrong = [max(0, seq.num_draft_tokens - accepted) for seq, _, _ in plan.items]
        sampled = [
            [n % 3 for n in range(1 + seq.num_draft_tokens - left)] if samples else []
            for (seq, _, samples), left in zip(plan.items, wrong, strict=True)
        ]
        self.scheduler.update(plan, sampled)
        for (seq, count, samples), start, left in zip(plan.items, before, wrong, strict=True):
            assert seq.num_computed_tokens == start + count - (left if samples else 0)
            assert seq.num_uncomputed_tokens == 1 or not samples
            assert len(seq.block_table) * SIZE >= seq.num_computed_tokens
            if seq.num_generated >= seq.max_new_tokens:
                self.scheduler.finish(seq)
                del self.live[seq.seq_id]

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "pool"):
            return
        assert breach(self.pool) is None
        running = self.scheduler.running
        assert {seq.lease for seq in running} == set(self.pool.leases)
        assert len(running) + self.scheduler.num_waiting == len(self.live)
        limit = self.scheduler.config.max_preemptions
        assert all(seq.num_preemptions <= max(limit, 0) for seq in self.live.values())

    def teardown(self):
        """Whatever the state, all that is left ends."""
        for _ in range(3000):
            if not getattr(self, "live", None):
                return
            self.step(repeat=False)
        raise AssertionError(f"{len(self.live)} sequences do not end")


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
