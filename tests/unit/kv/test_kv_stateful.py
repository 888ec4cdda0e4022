"""The pool against a naive model: what must be found, what may be found, and the books."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.cheapest_loss import CheapestLoss
from halogen_core.kv.eviction import LRU, SessionPriority
from halogen_core.kv.ledger import breach

SIZE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class PoolMachine(RuleBasedStateMachine):
    """Leases open, grow, publish and end in any order; a store says what each slot holds."""

    @initialize(
        blocks=st.integers(4, 16), policy=st.sampled_from([LRU, SessionPriority, CheapestLoss])
    )
    def start(self, blocks, policy):
        self.pool = BlockPool(blocks, SIZE, eviction=policy())
        self.store = {}
        self.live = []
        self.seen = set()
        self.serial = 0

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"x"]), priority=st.integers(0, 1))
    def begin(self, tokens, salt, priority):
        self.serial += 1
        session = f"s{priority}"
        lease = self.pool.open(self.serial, salt, priority=priority, session=session)
        match = self.pool.match(lease, tokens)
        assert match.num_tokens < len(tokens)
        prefix = (salt, tuple(tokens[: match.num_tokens]))
        assert not match.num_tokens or prefix in self.seen, "found what was never computed"
        if not (self.pool.adopt(lease, match) and self.pool.grow(lease, len(tokens))):
            self.pool.release(lease)
            return
        for source, target in self.pool.pending_copies():
            for offset in range(SIZE):
                self.store[target, offset] = self.store.get((source, offset))
        self.pool.end_step()
        for at in range(match.num_tokens):
            assert self.store[self.slot(lease, at)] == (salt, tuple(tokens[: at + 1]))
        for at in range(match.num_tokens, len(tokens)):
            self.store[self.slot(lease, at)] = (salt, tuple(tokens[: at + 1]))
            self.seen.add((salt, tuple(tokens[: at + 1])))
        self.live.append((lease, salt, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans(), back=st.booleans())
    def end(self, data, keep, back):
        lease, _, tokens = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        if keep:
            self.pool.release(lease, tokens, len(tokens), back=back)
        else:
            self.pool.release(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data):
        lease, _, tokens = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        self.pool.publish(lease, tokens, len(tokens))

    @rule(owner=st.integers(1, 30))
    def forget(self, owner):
        self.pool.forget(owner)

    @rule()
    def tick(self):
        self.pool.begin_step()

    @invariant()
    def books_are_right(self):
        if hasattr(self, "pool"):
            assert breach(self.pool) is None

    @invariant()
    def running_sequences_keep_their_content(self):
        for lease, salt, tokens in getattr(self, "live", ()):
            for at in range(len(tokens)):
                assert self.store[self.slot(lease, at)] == (salt, tuple(tokens[: at + 1]))

    def slot(self, lease, at):
        return lease.blocks[at // SIZE], at % SIZE


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
