"""Blocks, prefixes, salts, pins, windows, tiers: small cases with known answers."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halogen_core.errors import ConfigError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.eviction import LRU, SessionPriority
from halogen_core.kv.lease import Match
from halogen_core.kv.ledger import breach, mend
from halogen_core.kv.salt import cache_salt
from halogen_core.kv.tiers import Tier, Tiers
from halogen_core.kv.tree import ReuseRules
from halogen_core.spi import KVSpec, kv_block_shape
from halogen_core.spi.memory import kv_row_bytes


def put(pool, tokens, owner=0, **options):
    """A sequence that computed `tokens` and is over."""
    lease = pool.open(owner, **options)
    pool.adopt(lease, pool.match(lease, tokens))
    assert pool.grow(lease, len(tokens))
    pool.begin_step()
    pool.end_step()
    pool.release(lease, tokens, len(tokens))
    assert breach(pool) is None


def hit(pool, tokens, salt=b""):
    lease = pool.open(99, salt)
    found = pool.match(lease, tokens).num_tokens
    pool.release(lease)
    return found


def test_whole_blocks_and_a_tail_are_found():
    pool = BlockPool(16, 4)
    put(pool, list(range(11)))
    assert hit(pool, [*list(range(11)), 50]) == 11
    assert hit(pool, [*list(range(8)), 50]) == 8
    assert hit(pool, [*list(range(6)), 50, 51]) == 6
    assert hit(pool, [50, *range(11)]) == 0


def test_one_token_is_always_left_to_compute():
    pool = BlockPool(16, 4)
    put(pool, list(range(8)))
    assert hit(pool, list(range(8))) == 7


def test_a_tail_shorter_than_the_rule_is_not_copied():
    pool = BlockPool(16, 8, rules=ReuseRules(min_tail=3))
    put(pool, list(range(10)))
    assert hit(pool, [*list(range(10)), 50]) == 8
    assert hit(pool, [0, 1, 50]) == 0
    assert hit(pool, [0, 1, 2, 50]) == 3


def test_copies_are_given_again_until_the_step_ran():
    pool = BlockPool(16, 4)
    put(pool, list(range(6)))
    lease = pool.open(1)
    assert pool.adopt(lease, pool.match(lease, [*list(range(6)), 9]))
    (copy,) = pool.pending_copies()
    assert pool.pending_copies() == (copy,)
    assert copy[1] == lease.blocks[1]
    assert breach(pool) is None
    pool.end_step()
    assert pool.pending_copies() == ()


def test_a_copy_whose_target_is_given_back_is_dropped():
    pool = BlockPool(16, 4)
    put(pool, list(range(6)))
    lease = pool.open(1)
    pool.adopt(lease, pool.match(lease, [*list(range(6)), 9]))
    pool.release(lease)
    assert pool.pending_copies() == ()
    assert pool.stats().active == 0


def test_twins_share_one_block():
    pool = BlockPool(16, 4)
    tokens = list(range(8))
    leases = [pool.open(i) for i in range(2)]
    for lease in leases:
        pool.grow(lease, 8)
    for lease in leases:
        pool.publish(lease, tokens, 8)
    assert leases[0].blocks == leases[1].blocks
    assert pool.stats().active == 2
    assert breach(pool) is None


def test_salts_do_not_meet():
    pool = BlockPool(16, 4)
    put(pool, list(range(9)), salt=cache_salt(tenant="a"))
    assert hit(pool, list(range(9)), cache_salt(tenant="a")) == 8
    assert hit(pool, list(range(9)), cache_salt(adapter="a")) == 0
    assert hit(pool, list(range(9))) == 0


def test_salts_are_typed_and_delimited():
    """A tenant named like an adapter, or one that swallows the next field, is another salt."""
    salts = {
        cache_salt(tenant=t, adapter=a, extra=x)
        for t in ("", "a", "ab", "a\x01")
        for a in ("", "a", "b", "ab")
        for x in (b"", b"b", b"a\x01\x00\x00\x00b")
    }
    assert len(salts) == 48


class Colliding(bytes):
    """Tokens whose hash has one value: what a collision looks like to the tree."""

    def __hash__(self):
        return 7


def test_a_forced_hash_collision_reuses_nothing(monkeypatch):
    from halogen_core.kv import block_pool, tree

    def collide(tokens):
        return Colliding(np.asarray(tokens, np.uint32).tobytes())

    monkeypatch.setattr(block_pool, "pack_tokens", collide)
    monkeypatch.setattr(tree, "pack_tokens", collide)
    pool = BlockPool(64, 4, rules=ReuseRules(min_tail=4))
    for i in range(10):
        put(pool, [i, 1, 2, 3, 4], owner=i)
    assert hit(pool, [3, 1, 2, 3, 9]) == 4
    assert hit(pool, [77, 1, 2, 3, 9]) == 0


def test_eviction_takes_tails_before_heads_and_the_longest_unused_first():
    pool = BlockPool(6, 4)
    put(pool, list(range(12)))
    put(pool, list(range(100, 112)))
    lease = pool.open(5)
    assert pool.grow(lease, 8)
    assert hit(pool, list(range(13))) == 4
    assert hit(pool, list(range(100, 113))) == 12


def test_pins_hold_under_pressure_and_within_the_quota():
    pool = BlockPool(20, 4, eviction=SessionPriority(), pin_quota=0.5)
    main = list(range(16))
    put(pool, main, session="main", priority=1)
    for i in range(50):
        put(pool, list(range(1000 * (i + 1), 1000 * (i + 1) + 24)), owner=i)
    assert hit(pool, [*main, 7]) == 16
    put(pool, list(range(500, 560)), session="greedy", priority=1)
    assert pool.residency.num_pin_marks <= 10
    assert breach(pool) is None


def test_a_session_that_branches_pins_whole_paths():
    pool = BlockPool(12, 2, eviction=SessionPriority(), pin_quota=0.5)
    put(pool, [0] * 10, session="s", priority=1)
    put(pool, [0, 1, *[0] * 10], session="s", priority=1)
    lease = pool.open(3)
    assert pool.grow(lease, 2 * pool.num_available), "all that counts as available can be had"
    assert hit(pool, [0] * 11) == 10


def test_the_longest_unseen_session_loses_its_pins_to_progress():
    pool = BlockPool(8, 4, eviction=SessionPriority(), pin_quota=1.0)
    put(pool, list(range(32)), session="a", priority=1)
    lease = pool.open(2)
    assert not pool.grow(lease, 4)
    assert pool.unpin_oldest()
    assert pool.grow(lease, 32)
    assert not pool.unpin_oldest()


@pytest.mark.parametrize("use_cache", [True, False])
def test_blocks_outside_the_window_are_let_go(use_cache):
    pool = BlockPool(8, 4, rules=ReuseRules(window=8))
    lease = pool.open(1, use_cache=use_cache)
    tokens = list(range(100))
    for done in range(1, 101):
        assert pool.grow(lease, done), "a window of two blocks must live in a pool of eight"
        pool.publish(lease, tokens, done)
        assert breach(pool) is None
        kept = set(range((done - 8 + 1) // 4, len(lease.blocks)))
        held = {lease.blocks[i] for i in kept if i >= 0}
        assert set(lease.blocks) <= held | {lease.blocks[-1]}
    pool.release(lease, tokens, 100)
    assert pool.stats().active == 0


def test_under_a_window_the_end_of_a_prefix_is_enough():
    pool = BlockPool(8, 4, rules=ReuseRules(window=8))
    lease = pool.open(1)
    tokens = list(range(60))
    for done in range(4, 61, 4):
        pool.grow(lease, done)
        pool.publish(lease, tokens, done)
    pool.release(lease, tokens, 60)
    lease = pool.open(2)
    match = pool.match(lease, [*tokens, 7])
    assert match.num_tokens == 60
    assert pool.adopt(lease, match)
    assert pool.grow(lease, 61)
    assert breach(pool) is None
    pool.release(lease)


def test_recurrent_state_bounds_what_can_be_reused():
    pool = BlockPool(16, 4, rules=ReuseRules(needs_state=True))
    lease = pool.open(1)
    tokens = list(range(12))
    pool.grow(lease, 12)
    pool.publish(lease, tokens, 8)
    pool.checkpoint(lease, "state at 8")
    pool.publish(lease, tokens, 12)
    pool.release(lease, tokens, 12)
    lease = pool.open(2)
    match = pool.match(lease, [*tokens, 5])
    assert (match.num_tokens, match.state) == (8, "state at 8")


def test_the_state_of_an_evicted_or_mended_block_is_given_back():
    dropped = []
    pool = BlockPool(4, 4, rules=ReuseRules(needs_state=True))
    pool.residency.drop_state = dropped.append

    def cache(tokens, state):
        lease = pool.open(1)
        pool.grow(lease, len(tokens))
        pool.publish(lease, tokens, len(tokens))
        pool.checkpoint(lease, state)
        pool.release(lease, tokens, len(tokens))

    cache(list(range(16)), "first")
    cache([9] * 8, "second")
    assert dropped == ["first"]
    pool.residency.num_idle -= 1  # wrong, so that the books are rebuilt
    pool.audit_idle()
    assert dropped == ["first", "second"]


class Mover:
    """A device of rows."""

    bytes_per_block = 8

    def __init__(self, num_blocks):
        self.rows = np.zeros((num_blocks, 8), np.uint8)

    def export_blocks(self, blocks):
        return self.rows[list(blocks)].copy()

    def import_blocks(self, blocks, data):
        self.rows[list(blocks)] = data


def test_evicted_blocks_come_back_from_the_host_and_the_disk(tmp_path):
    mover = Mover(4)
    stack = (Tier.host(2 * 8, 8), Tier.disk(tmp_path, 8 * 8, 8))
    pool = BlockPool(4, 4, tiers=Tiers(mover, stack))
    for owner in range(3):
        lease = pool.open(owner)
        tokens = list(range(100 * owner, 100 * owner + 16))
        pool.grow(lease, 16)
        for i, block in enumerate(lease.blocks):
            mover.rows[block] = 10 * owner + i
        pool.release(lease, tokens, 16)
        assert breach(pool) is None
    assert pool.take_moves() == (8, 0)
    for owner in (0, 1):
        lease = pool.open(9)
        match = pool.match(lease, [*range(100 * owner, 100 * owner + 16), 1])
        assert match.num_tokens == 16
        assert match.num_absent == 4
        assert pool.adopt(lease, match)
        found = [int(mover.rows[block][0]) for block in lease.blocks]
        assert found == [10 * owner + i for i in range(4)]
        pool.release(lease)
        assert breach(pool) is None
    assert list(tmp_path.iterdir()) == [], "the disk tier's file has no name"


def test_moving_pays_or_it_is_not_done():
    """A block takes 1 s to move one way, one after `depth` others `depth` s to compute."""

    class SlowMover(Mover):
        now = 0.0

        def export_blocks(self, blocks):
            self.now += len(blocks)
            return super().export_blocks(blocks)

    mover = SlowMover(6)
    stack = (Tier.host(64, 8),)
    tiers = Tiers(mover, stack, recompute_s=float, clock=lambda: mover.now)
    pool = BlockPool(6, 4, tiers=tiers)
    put(pool, list(range(24)))
    assert tiers.move_s == 0.0
    put(pool, list(range(100, 104)))
    assert tiers.move_s == 1.0
    put(pool, list(range(200, 220)))
    assert sorted(node.depth for node in stack[0].members) == [3, 4, 5]


def test_a_wrong_ledger_is_counted_and_mended():
    pool = BlockPool(16, 4)
    put(pool, list(range(20)))
    lease = pool.open(1)
    pool.adopt(lease, pool.match(lease, list(range(9))))
    pool.residency.free.pop()
    assert "other than one place" in mend(pool)
    assert breach(pool) is None
    assert pool.counters()["kv_invariant_breaches"] == 1
    assert len(lease.blocks) == 2
    pool.release(lease)
    lease = pool.open(2)
    assert pool.grow(lease, 64), "no block is lost"


def test_a_leak_is_found_when_nobody_runs():
    pool = BlockPool(16, 4)
    pool.residency.free.pop()
    pool.audit_idle()
    assert pool.stats().free == 16
    assert pool.breaches == 1
    pool.audit_idle()
    assert pool.breaches == 1


class Forgetful(LRU):
    """A plugin's policy that loses its candidates."""

    def pop(self, tick):
        return None if self._live > 1 else super().pop(tick)


@pytest.mark.parametrize("cached", [False, True])
def test_a_policy_that_loses_its_candidates_costs_the_cache_and_no_request(cached):
    """Bug 45: wrong books end no process; what runs keeps its blocks, the cache is forgotten."""
    pool = BlockPool(8, 4, eviction=Forgetful())
    running = pool.open(1)
    pool.grow(running, 8)
    pool.publish(running, list(range(8)), 8)
    for i in range(3):
        put(pool, [50 + i] * 8, owner=2)
    assert (pool.stats().free, pool.stats().cached) == (0, 6)
    lease = pool.open(3)
    match = pool.match(lease, [50] * 6) if cached else Match(0)
    assert pool.adopt(lease, match) is not cached, "its tail needs a block that is not had"
    assert pool.grow(lease, 8)
    assert (pool.breaches, breach(pool)) == (1, None)
    assert running.blocks == [node.block for node in running.nodes]
    assert (pool.stats().active, pool.stats().cached) == (4, 0)


def test_an_empty_pool_is_refused():
    with pytest.raises(ConfigError, match="0 blocks of 16 tokens holds nothing"):
        BlockPool(0, 16)


def test_steady_state_allocates_nothing_that_lasts():
    """After warm-up, a thousand requests leave the process as large as it was (B11)."""
    import gc
    import tracemalloc

    pool = BlockPool(64, 4)

    def load(count):
        for i in range(count):
            put(pool, [i % 7, *range(i % 50, i % 50 + 30)], owner=i)

    load(300)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    load(1000)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    nodes = 64 * 600  # bytes of a node with its dict: what a replaced cache may occupy at most
    assert grown < nodes


@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 64),
    head_dim=st.sampled_from([32, 64, 80, 96, 112, 128, 256]),
    size=st.sampled_from([8, 16, 32, 64, 128, 256]),
    dtype=st.sampled_from(["f32", "f16", "bf16", "q8_0"]),
)
def test_a_block_is_whole_tokens_of_all_heads(layers, heads, head_dim, size, dtype):
    """B13: no row straddles two blocks, whatever the model's shape."""
    if dtype == "q8_0" and head_dim % 32:
        return
    spec = KVSpec(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, block_size=size
    )
    token = heads * kv_row_bytes(spec)
    shape = kv_block_shape(spec, 1)
    assert prod(shape) == layers * 2 * size * token
    assert prod(shape[-3:]) % token == 0
