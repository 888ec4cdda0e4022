"""Continuous batching under one token budget (Orca 2022, Sarathi-Serve 2024).

There is no prefill phase and no decode phase: in every step each sequence lets
`num_computed_tokens` catch up with its tokens, as far as the budget goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Tokens

from halogen_core.errors import RequestError
from halogen_core.scheduler.admission import Door
from halogen_core.scheduler.blocks import BlockManagerProtocol
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.pacing import BatchWindow, CostModel, StepBudget
from halogen_core.scheduler.plan import StepPlan
from halogen_core.scheduler.policy import FCFS, QueuePolicy
from halogen_core.scheduler.queue import WaitingQueue
from halogen_core.scheduler.sequence import Lane, ScheduledSequence, Sequence, Status
from halogen_core.spi import Limits

COUNTERS = (
    "requests_admitted",
    "preemptions",
    "recomputed_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefill_timeouts",
    "queue_timeouts",
)


class Scheduler:
    """Chooses each step's work; running sequences come before waiting ones."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManagerProtocol,
        *,
        policy: QueuePolicy | None = None,
        cost: CostModel | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.policy = policy or FCFS()
        limits = limits or Limits()
        self.max_batch = min(config.max_batch, limits.max_sequences or config.max_batch)
        self.max_tokens = min(config.max_batch_tokens, limits.max_tokens or config.max_batch_tokens)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self._door = Door(config, blocks.num_blocks, blocks.block_size, limits.max_context)
        self._budget = StepBudget(cost, config.tpot_target_s, blocks.block_size)
        self._window = BatchWindow.of(config)
        self._headroom = int(config.headroom * blocks.num_blocks)
        self._sequences: dict[int, Sequence] = {}
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._serial = 0
        self._live_tokens = 0

    # -- the public face

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def counters(self) -> Mapping[str, float]:
        """Totals since start, by metric name without prefix and suffix."""
        return {**self._counts, **self.blocks.counters()}

    def gauges(self) -> Mapping[str, float]:
        """Values now."""
        long_lane = sum(seq.lane is Lane.LONG for seq in self.running)
        return {"requests_long_lane": long_lane, **self.blocks.gauges()}

    def add(self, seq: Sequence) -> None:
        """Queue `seq`; constant time but for the heap.

        Raises `Overloaded` if the queue is full, `RequestError` if it can never run.
        """
        self._door.check(seq, len(self.waiting))
        limit = self.config.long_prompt_tokens
        if limit is not None and seq.num_prompt_tokens > limit:
            seq.lane = Lane.LONG
        self._serial += 1
        seq.key = (self.policy.key(seq), self._serial)
        self._sequences[seq.seq_id] = seq
        self.waiting.push(seq)

    def abort(self, seq_id: int) -> bool:
        """Forget a sequence in whatever state; False if it is unknown (it may just have ended)."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return False
        self.finish(seq)
        return True

    def finish(self, seq: Sequence) -> None:
        """`seq` is over: its blocks are free, what they hold stays findable."""
        if self._sequences.pop(seq.seq_id, None) is None:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._give_back(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED

    def schedule(self, now: float) -> StepPlan:
        """This step's work."""
        self.blocks.begin_step()
        items: list[ScheduledSequence] = []
        prompts: list[Sequence] = []
        for seq in tuple(self.running):
            if seq.status is not Status.RUNNING:
                continue
            if len(seq.token_ids) - seq.num_computed_tokens > 1:
                prompts.append(seq)
            elif seq.num_computed_tokens < seq.capacity or self._make_room(seq, 1):
                items.append(seq.decode_item)
        budget = self._prompt_budget(items)
        budget = self._continue_prompts(prompts, budget, items)
        wait = self._admit(now, budget, items)
        return StepPlan(
            items=tuple(items),
            copies=self.blocks.pending_copies(),
            wait_until=None if items else wait,
        )

    def update(self, plan: StepPlan, sampled: Mapping[int, Tokens[int]], now: float) -> None:
        """Record that `plan` ran: tokens by sequence id, several if drafts were accepted."""
        self.blocks.end_step()
        size = self.blocks.block_size
        for seq, num_tokens, samples in plan.items:
            if seq.status is not Status.RUNNING:
                continue
            before = seq.num_computed_tokens
            seq.num_computed_tokens = after = before + num_tokens
            if before // size != after // size:
                self.blocks.publish(seq.lease, seq.token_ids, after)
            if samples and (tokens := sampled.get(seq.seq_id)):
                seq.token_ids += tokens

    # -- running

    def _prompt_budget(self, items: list[ScheduledSequence]) -> int:
        left = self.max_tokens - len(items)
        if self._budget.target_s is None:
            return left
        kv_tokens = sum(item.seq.num_computed_tokens for item in items)
        return self._budget.prefill_tokens(len(items), kv_tokens, left)

    def _continue_prompts(
        self, prompts: list[Sequence], budget: int, items: list[ScheduledSequence]
    ) -> int:
        for seq in prompts:
            if seq.status is not Status.RUNNING or budget <= 0:
                continue
            share = budget if not len(self.waiting) else max(1, budget // 2)
            count = min(seq.num_uncomputed_tokens, share)
            if self._make_room(seq, count):
                items.append(self._item(seq, count))
                budget -= count
        return budget

    def _item(self, seq: Sequence, count: int) -> ScheduledSequence:
        return ScheduledSequence(seq, count, count == seq.num_uncomputed_tokens)

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens of `seq`, by preempting whoever ranks last."""
        while not self._grow(seq, count):
            victim = max(self.running, key=_rank)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence, count: int) -> bool:
        if not self.blocks.grow(seq.lease, seq.num_computed_tokens + count):
            return False
        seq.capacity = len(seq.block_table) * self.blocks.block_size
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._counts["preemptions"] += 1
        seq.num_preemptions += 1
        self._give_back(seq)
        seq.status = Status.WAITING
        self.waiting.push(seq)

    def _give_back(self, seq: Sequence) -> None:
        self.blocks.release(seq.lease, seq.token_ids, seq.num_computed_tokens)
        seq.lease = None
        seq.block_table = []
        seq.capacity = seq.num_computed_tokens = 0

    # -- waiting

    def _admit(self, now: float, budget: int, items: list[ScheduledSequence]) -> float | None:
        while budget > 0 and len(self.running) < self.max_batch:
            seq = self.waiting.head()
            if seq is None or not self._try_admit(seq, now):
                return None
            count = min(seq.num_uncomputed_tokens, budget)
            if not self._grow(seq, count):
                raise RequestError("admission promised blocks that are not there")
            items.append(self._item(seq, count))
            budget -= count
        return None

    def _try_admit(self, seq: Sequence, now: float) -> bool:
        blocks = self.blocks
        lease = blocks.open(
            seq.seq_id,
            seq.salt,
            use_cache=seq.use_prefix_cache,
            priority=seq.priority,
            session=seq.session,
        )
        match = blocks.match(lease, seq.token_ids)
        total = -(-seq.num_tokens // blocks.block_size)
        new = total - len(match.nodes) + match.num_absent
        if new + match.num_idle + self._reserve() > blocks.num_available or not blocks.adopt(
            lease, match
        ):
            blocks.release(lease)
            return False
        self._enter(seq, lease, match.num_tokens, now)
        return True

    def _reserve(self) -> int:
        """Blocks kept for those that run: what they are known to need, and headroom to grow."""
        if not self.running:
            return 0
        size = self.blocks.block_size
        promised = sum(
            -(-len(seq.token_ids) // size) - len(seq.block_table)
            for seq in self.running
            if len(seq.token_ids) > seq.capacity
        )
        return promised + self._headroom

    def _enter(self, seq: Sequence, lease: object, num_cached: int, now: float) -> None:
        self.waiting.remove(seq)
        self.policy.admitted(seq)
        self._counts["requests_admitted"] += not seq.num_preemptions
        seq.lease = lease
        seq.block_table = seq.lease.blocks
        seq.capacity = len(seq.block_table) * self.blocks.block_size
        seq.num_computed_tokens = num_cached
        if seq.started is None:
            seq.started = now
            seq.num_cached_tokens = num_cached
            self._counts["prefix_cache_queries"] += seq.num_prompt_tokens
            self._counts["prefix_cache_hits"] += num_cached
        seq.status = Status.RUNNING
        self.running.append(seq)


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.key
