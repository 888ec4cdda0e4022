"""Continuous batching under one token budget (Orca 2022, Sarathi-Serve 2024).

There is no prefill phase and no decode phase: in every step each sequence lets
`num_computed_tokens` catch up with its tokens, as far as the budget goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens

from halogen_core.scheduler.admission import Door
from halogen_core.scheduler.blocks import BlockManagerProtocol
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.deadlines import Deadlines
from halogen_core.scheduler.lanes import Lanes, is_long, lane_of
from halogen_core.scheduler.limits import StepLimits
from halogen_core.scheduler.pacing import BatchWindow, CostModel, StepBudget
from halogen_core.scheduler.plan import StepPlan
from halogen_core.scheduler.policy import FCFS, QueuePolicy
from halogen_core.scheduler.queue import WaitingQueue
from halogen_core.scheduler.residents import Residents
from halogen_core.scheduler.sequence import Lane, ScheduledSequence, Sequence, Status
from halogen_core.spi import Limits

COUNTERS = (
    "requests_admitted",
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
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
        limits: Callable[[], Limits] = Limits,
    ) -> None:
        """`cost` and `limits` are the backend's; `limits` is asked again while running."""
        self.config = config
        self.blocks = blocks
        self.policy = FCFS() if policy is None else policy
        self.limits = StepLimits(config, limits)
        self.waiting = {lane: WaitingQueue() for lane in Lane}
        self._residents = Residents(config, blocks)
        self._door = Door(config, blocks.num_blocks, blocks.block_size)
        self._budget = StepBudget(cost, config.tpot_target_s, blocks.block_size)
        self._window = BatchWindow.of(config)
        self._deadlines = Deadlines(config)
        self._lanes = Lanes(config.long_lane_share)
        self._sequences: dict[int, Sequence] = {}
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._serial = 0

    # -- the public face

    @property
    def running(self) -> list[Sequence]:
        return self._residents.running

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self.waiting.values())

    def counters(self) -> Mapping[str, float]:
        """Totals since start, by metric name without prefix and suffix."""
        return {
            **self._counts,
            "recomputed_tokens": self._residents.recomputed_tokens,
            "prefill_timeouts": self._deadlines.num_prefill,
            "queue_timeouts": self._deadlines.num_queue,
            **self.blocks.counters(),
        }

    def gauges(self) -> Mapping[str, float]:
        """Values now."""
        long = len(self.waiting[Lane.LONG]) + sum(is_long(seq) for seq in self.running)
        used = sum(seq.num_computed_tokens for seq in self.running)
        held = sum(len(seq.block_table) for seq in self.running) * self.blocks.block_size
        return {
            "requests_long_lane": long,
            "step_max_sequences": self.limits.max_sequences,
            "step_max_tokens": self.limits.max_tokens,
            "kv_fragmentation_ratio": 1 - used / held if held else 0.0,
            **self.blocks.gauges(),
        }

    def add(self, seq: Sequence) -> None:
        """Queue `seq`; the cost does not depend on how many wait (but for the heap's logarithm).

        Raises `Overloaded` if the queue is full, `RequestError` if it can never run.
        """
        self._door.check(seq, self.num_waiting, self.limits.max_context)
        seq.lane = lane_of(seq, self.config)
        self._serial += 1
        seq.key = (self.policy.key(seq), self._serial)
        self._sequences[seq.seq_id] = seq
        self.waiting[seq.lane].push(seq)

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
            self._residents.leave(seq)
        else:
            self.waiting[seq.lane].remove(seq)
            self.blocks.forget(seq.seq_id)
        seq.status = Status.FINISHED
        if not self.running:
            self.blocks.audit_idle()

    def schedule(self, now: float) -> StepPlan:
        """This step's work."""
        self.limits.refresh(now)
        self.blocks.begin_step()
        self._residents.begin_step()
        self._deadlines.expired.clear()
        for seq in self._deadlines.waited_too_long(self.waiting.values(), now):
            self.finish(seq)
        normal, long = self._has_work(Lane.NORMAL), self._has_work(Lane.LONG)
        turn = self._lanes.next(normal=normal, long=long)
        items = self._long_step(now) if turn is Lane.LONG else []
        wait = None
        if not (items or self._residents.preempted):
            items, wait = self._normal_step(now)
        if not (items or self._residents.preempted):
            items = self._long_step(now)
        for seq in self._residents.preempted:
            self.waiting[seq.lane].push(seq)
        self._counts["preemptions"] += len(self._residents.preempted)
        moved_out, moved_in = self.blocks.take_moves()
        return StepPlan(
            items=tuple(items),
            copies=self.blocks.pending_copies(),
            num_swapped_out=moved_out,
            num_swapped_in=moved_in,
            expired=tuple(self._deadlines.expired),
            wait_until=None if items else wait,
        )

    def update(self, plan: StepPlan, sampled: Mapping[int, Tokens[int]], now: float) -> None:
        """Record that `plan` ran: tokens by sequence id, several if drafts were accepted."""
        self.blocks.end_step()
        size, publish = self.blocks.block_size, self.blocks.publish
        running, of = Status.RUNNING, sampled.get
        for seq, num_tokens, samples in plan.items:
            if seq.status is not running:
                continue
            before = seq.num_computed_tokens
            after = before + num_tokens
            if samples and (tokens := of(seq.seq_id)):
                seq.token_ids += tokens
                if seq.num_draft_tokens:
                    after -= seq.num_draft_tokens - (len(tokens) - 1)
                    seq.num_draft_tokens = 0
            seq.num_computed_tokens = after
            if after % size < num_tokens and before // size != after // size:
                publish(seq.lease, seq.token_ids, after)

    # -- one step

    def _has_work(self, lane: Lane) -> bool:
        if len(self.waiting[lane]):
            return True
        long = lane is Lane.LONG
        if self.config.long_prompt_tokens is None and self.config.prefill_timeout_s is None:
            return not long and bool(self.running)
        return any(is_long(seq) == long for seq in self.running)

    def _normal_step(self, now: float) -> tuple[list[ScheduledSequence], float | None]:
        items: list[ScheduledSequence] = []
        prompts: list[Sequence] = []
        make_room = self._residents.make_room
        fast, running = self.config.max_total_tokens is None, Status.RUNNING
        for seq in self._awake():
            if seq.status is not running:
                continue
            computed = seq.num_computed_tokens
            if len(seq.token_ids) - computed > 1 or seq.num_draft_tokens:
                if not is_long(seq):
                    prompts.append(seq)
            elif (fast and computed < seq.capacity) or make_room(seq, 1):
                items.append(seq.decode_item)
        budget = self._prompt_budget(items)
        prompts = [seq for seq in prompts if not self._deadlines.prefill_over(seq, now)]
        budget = self._continue_prompts(prompts, budget, items)
        if self._residents.preempted:  # some of them may be in `items`; nobody enters now
            return [item for item in items if item.seq.status is Status.RUNNING], None
        return items, self._admit(self.waiting[Lane.NORMAL], now, budget, items)

    def _awake(self) -> Tokens[Sequence]:
        """Who may be in a normal step; fewer than run only after the device lowered its limits."""
        most = self.limits.max_sequences
        if self.num_running <= most:
            return tuple(self.running)
        return [seq for seq in self.running if not is_long(seq)][:most]

    def _long_step(self, now: float) -> list[ScheduledSequence]:
        """Over-long prompts alone, one after the other, in slices that others can wait for."""
        items: list[ScheduledSequence] = []
        others = sum(not is_long(seq) for seq in self.running)
        limit = (
            max(self.blocks.block_size, self.limits.max_tokens // 4)
            if others
            else self.limits.max_tokens
        )
        budget = self._budget.prefill_tokens(max(1, others), 0, limit)
        prompts = [seq for seq in self.running if is_long(seq)][:1]
        self._continue_prompts(prompts, budget, items)
        if self._residents.preempted:
            return [item for item in items if item.seq.status is Status.RUNNING]
        if not items and (head := self.waiting[Lane.LONG].head()):
            self._enter(head, now, budget, items)
        return items

    def _prompt_budget(self, items: list[ScheduledSequence]) -> int:
        left = self.limits.max_tokens - len(items)
        if self._budget.target_s is None:
            return left
        kv_tokens = sum(item.seq.num_computed_tokens for item in items)
        return self._budget.prefill_tokens(len(items), kv_tokens, left)

    def _continue_prompts(
        self, prompts: list[Sequence], budget: int, items: list[ScheduledSequence]
    ) -> int:
        others_wait = len(self.waiting[Lane.NORMAL])
        for seq in prompts:
            if seq.status is not Status.RUNNING or budget <= 0:
                continue
            share = max(1, budget // 2) if others_wait else budget
            count = self._clip(seq, share)
            if self._residents.make_room(seq, count):
                items.append(_item(seq, count))
                budget -= count
        return budget

    def _clip(self, seq: Sequence, limit: int) -> int:
        """Tokens of `seq` to compute now: not past a checkpoint of recurrent state."""
        count = min(seq.num_uncomputed_tokens + seq.num_draft_tokens, limit)
        for position in seq.checkpoints:
            if 0 < position - seq.num_computed_tokens < count:
                return position - seq.num_computed_tokens
        return count

    # -- entry

    def _admit(
        self, queue: WaitingQueue, now: float, budget: int, items: list[ScheduledSequence]
    ) -> float | None:
        """Let waiting sequences in; the time to ask again, if they are to wait for company."""
        oldest = queue.oldest()
        if oldest is None or self._long_is_starved(now):
            return None
        full = (
            oldest.num_preemptions > 0
            or len(queue) >= self.limits.max_sequences - self.num_running
            or queue.num_tokens >= budget
        )
        opens = self._window.opens(oldest.arrival, busy=self.num_running > 0, full=full)
        if now + 1e-9 < opens:
            return opens
        while budget > 0 and self.num_running < self.limits.max_sequences:
            seq = queue.head()
            if seq is None or not (count := self._enter(seq, now, budget, items)):
                return None
            budget -= count
        return None

    def _enter(self, seq: Sequence, now: float, budget: int, items: list[ScheduledSequence]) -> int:
        """Let `seq` in and give it tokens of this step; 0: it must wait."""
        first = seq.started is None
        if self.num_running >= self.limits.max_sequences or not self._residents.admit(seq, now):
            return 0
        self.waiting[seq.lane].remove(seq)
        if first:
            self.policy.admitted(seq)
            self._counts["requests_admitted"] += 1
            self._counts["prefix_cache_queries"] += seq.num_prompt_tokens
            self._counts["prefix_cache_hits"] += seq.num_cached_tokens
        count = self._clip(seq, budget)
        if not self._residents.make_room(seq, count):
            return 0
        items.append(_item(seq, count))
        return count

    def _long_is_starved(self, now: float) -> bool:
        head = self.waiting[Lane.LONG].head()
        return (
            head is not None
            and self.num_running > 0
            and now - head.arrival > self.config.long_patience_s
            and not any(is_long(seq) for seq in self.running)
        )


def _item(seq: Sequence, count: int) -> ScheduledSequence:
    return ScheduledSequence(seq, count, count >= seq.num_uncomputed_tokens)
