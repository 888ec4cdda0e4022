"""The running sequences: their room to grow, who gives way, and the promise that all end.

A preempted sequence keeps its rank. After `max_preemptions` it is let in again only with every
block it can ever need set aside, so it is never preempted again: no thrash, and a proof of
progress (the first in rank always runs).
"""

from __future__ import annotations

from typing import Any

import attrs

from halogen_core.scheduler.blocks import BlockManagerProtocol, MatchProtocol
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.sequence import ScheduledSequence, Sequence, Status

PATIENCE = 16
"""Steps after which a sequence without room is looked up again."""


@attrs.define(eq=False)
class Residents:
    """Who runs, and what blocks they hold, are promised or have set aside."""

    config: SchedulerConfig
    blocks: BlockManagerProtocol
    steady: dict[Sequence, ScheduledSequence] = attrs.field(factory=dict, init=False)
    """One token behind and with room for it: each with its share of any step. Nobody needs to look
    at them until a block is full, so what a step costs follows from what changes."""
    texts: dict[Sequence, list[int]] = attrs.field(factory=dict, init=False)
    """The tokens of those that are steady, in the same order: all that a step has to touch."""
    watched: dict[Sequence, ScheduledSequence] = attrs.field(factory=dict, init=False)
    """All others that run, in order of entry."""
    preempted: list[Sequence] = attrs.field(factory=list, init=False)
    """In this step."""
    set_aside: int = attrs.field(default=0, init=False)
    """Blocks that guarded sequences do not hold yet but have been promised."""
    live_tokens: int = attrs.field(default=0, init=False)
    """Tokens in the KV cache, kept only under `max_total_tokens`."""
    recomputed_tokens: int = attrs.field(default=0, init=False)
    _denied: tuple[int, int, int] = attrs.field(default=(-1, 0, 0), init=False)
    """Who was denied entry last, the blocks available then, and tries left unanswered since."""

    @property
    def running(self) -> list[Sequence]:
        return [*self.steady, *self.watched]

    @property
    def num_running(self) -> int:
        return len(self.steady) + len(self.watched)

    def settle(self, seq: Sequence) -> ScheduledSequence:
        """`seq` has room for its next token; its share of a step."""
        if self.config.max_total_tokens is not None:  # there is something to count in each step
            return self.watched[seq]
        item = self.steady[seq] = self.watched.pop(seq)
        self.texts[seq] = seq.token_ids
        return item

    def watch(self, seq: Sequence) -> None:
        """`seq` filled a block, or is to verify drafts."""
        if item := self.steady.pop(seq, None):
            del self.texts[seq]
            self.watched[seq] = item

    def begin_step(self) -> None:
        self.preempted.clear()
        if self.config.max_total_tokens is not None:
            self.live_tokens = sum(map(self._weight, self.running))

    def make_room(self, seq: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens of `seq`, if need be from whoever ranks last.

        False: `seq` itself had to give way.
        """
        while not self._grow(seq, count):
            victim = max((s for s in self.running if not self.is_guarded(s)), key=rank)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def is_guarded(self, seq: Sequence) -> bool:
        """Whether `seq` has given way often enough."""
        return seq.num_preemptions >= self.config.max_preemptions

    def admit(self, seq: Sequence, now: float) -> bool:
        """Let `seq` in if the blocks of its whole known text are there, cached ones included."""
        blocks = self.blocks
        tokens = seq.max_tokens if self.is_guarded(seq) else seq.num_tokens
        if self.num_running and (self._over_cap(tokens) or self._nothing_changed(seq)):
            return False
        lease = blocks.open(
            seq.seq_id,
            seq.salt,
            use_cache=seq.use_prefix_cache,
            priority=seq.priority,
            session=seq.session,
        )
        match = blocks.match(lease, seq.token_ids)
        if not self._fits(seq, match):
            match = match.whole_blocks(blocks.block_size)
        if not self._fits_after_unpinning(seq, match) or not blocks.adopt(lease, match):
            blocks.release(lease)
            self._denied = (seq.seq_id, blocks.num_available, 0)
            return False
        self._enter(seq, lease, match.num_tokens, now)
        return True

    def leave(self, seq: Sequence, *, back: bool = False) -> None:
        """`seq` gives its blocks back; what they hold stays findable."""
        if self.steady.pop(seq, None):
            del self.texts[seq]
        else:
            del self.watched[seq]
        if self.is_guarded(seq):
            self.set_aside -= self._ceiling(seq) - len(seq.block_table)
        self.blocks.release(seq.lease, seq.token_ids, seq.num_computed_tokens, back=back)
        seq.lease = None
        seq.block_table = []
        seq.capacity = 0

    # -- room

    def _grow(self, seq: Sequence, count: int) -> bool:
        total, guarded = seq.num_computed_tokens + count, self.is_guarded(seq)
        if not guarded and self._over_cap(count) and self.num_running > 1:
            return False
        if total > seq.capacity:
            missing = -(-total // self.blocks.block_size) - len(seq.block_table)
            aside = 0 if guarded else self.set_aside
            if aside and missing + aside > self.blocks.num_available:
                return False
            if not self.blocks.grow(seq.lease, total):
                return False
            self.set_aside -= missing if guarded else 0
            seq.capacity += missing * self.blocks.block_size
        self.live_tokens += 0 if guarded else count
        return True

    def _over_cap(self, count: int) -> bool:
        cap = self.config.max_total_tokens
        return cap is not None and self.live_tokens + count > cap

    def _weight(self, seq: Sequence) -> int:
        """What `seq` counts for under `max_total_tokens`."""
        return seq.max_tokens if self.is_guarded(seq) else seq.num_computed_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.live_tokens -= seq.num_computed_tokens
        self.leave(seq, back=True)
        seq.num_preemptions += 1
        seq.num_computed_tokens = seq.num_draft_tokens = 0
        seq.status = Status.WAITING
        self.preempted.append(seq)

    # -- entry

    def _ceiling(self, seq: Sequence) -> int:
        """Blocks that `seq` can come to hold."""
        return -(-max(seq.max_tokens, seq.num_tokens) // self.blocks.block_size)

    def _nothing_changed(self, seq: Sequence) -> bool:
        """Whether `seq` was denied just before and there is no more room now.

        Spares a look-up of its whole prompt in every step; now and then it is looked up all the
        same, since others may have cached what it begins with.
        """
        who, available, tries = self._denied
        if who != seq.seq_id or self.blocks.num_available > available or tries >= PATIENCE:
            return False
        self._denied = (who, available, tries + 1)
        return True

    def _fits(self, seq: Sequence, match: MatchProtocol) -> bool:
        known = -(-seq.num_tokens // self.blocks.block_size)
        total = self._ceiling(seq) if self.is_guarded(seq) else known
        needed = total - len(match.nodes) + match.num_absent + match.num_idle
        return needed + self._reserve() <= self.blocks.num_available

    def _fits_after_unpinning(self, seq: Sequence, match: MatchProtocol) -> bool:
        """As `_fits`; pins yield to a sequence that could not run otherwise."""
        while not self._fits(seq, match):
            if self.num_running or not self.blocks.unpin_oldest():
                return False
        return True

    def _reserve(self) -> int:
        """Blocks kept for those that run: what their known text needs, and some to grow."""
        if not self.num_running:
            return 0
        size = self.blocks.block_size
        promised = sum(
            -(-len(seq.token_ids) // size) - len(seq.block_table)
            for seq in self.watched  # those that are steady have room
            if len(seq.token_ids) > seq.capacity and not self.is_guarded(seq)
        )
        headroom = int(self.config.headroom * self.blocks.num_blocks)
        return promised + self.set_aside + headroom

    def _enter(self, seq: Sequence, lease: Any, num_cached: int, now: float) -> None:
        seq.lease = lease
        seq.block_table = lease.blocks
        seq.capacity = len(seq.block_table) * self.blocks.block_size
        seq.num_computed_tokens = num_cached
        if self.is_guarded(seq):
            self.set_aside += self._ceiling(seq) - len(seq.block_table)
        if seq.started is None:
            seq.started = seq.prefill_began = now
            seq.num_cached_tokens = num_cached
        else:
            self.recomputed_tokens += seq.num_tokens - num_cached
        seq.status = Status.RUNNING
        self.live_tokens += self._weight(seq)
        self.watched[seq] = ScheduledSequence(seq, 1, True)


def rank(seq: Sequence) -> tuple[float, int]:
    """Smallest first."""
    return seq.key
