"""Continuous batching under one token budget (Orca 2022, Sarathi-Serve 2024).

There is no prefill phase and no decode phase: in every step each sequence lets
`num_computed_tokens` catch up with its tokens, as far as the budget goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens

from halogen_core.scheduler.admission import Door
from halogen_core.scheduler.blocks import BlockManagerProtocol
from halogen_core.scheduler.composer import Composer
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.deadlines import Deadlines
from halogen_core.scheduler.entry import Entry
from halogen_core.scheduler.lanes import Lanes, is_long, lane_of
from halogen_core.scheduler.limits import StepLimits
from halogen_core.scheduler.pacing import BatchWindow, CostModel, StepBudget
from halogen_core.scheduler.plan import StepPlan
from halogen_core.scheduler.policy import FCFS, QueuePolicy
from halogen_core.scheduler.residents import Residents
from halogen_core.scheduler.sequence import Lane, Sequence, Status
from halogen_core.spi import Limits


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
        self.limits = StepLimits(config, limits)
        self._residents = Residents(config, blocks)
        policy = FCFS() if policy is None else policy
        self._entry = Entry(self._residents, policy, self.limits, BatchWindow.of(config))
        self._door = Door(config, blocks.num_blocks, blocks.block_size)
        self._deadlines = Deadlines(config)
        self._composer = Composer(
            config,
            blocks,
            self.limits,
            self._residents,
            self._entry,
            self._deadlines,
            StepBudget(cost, config.tpot_target_s, blocks.block_size),
            Lanes(config.long_lane_share),
        )
        self._sequences: dict[int, Sequence] = {}
        self._num_preemptions = 0

    # -- the public face

    @property
    def running(self) -> list[Sequence]:
        """A copy."""
        return self._residents.running

    @property
    def num_running(self) -> int:
        return self._residents.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._entry)

    def counters(self) -> Mapping[str, float]:
        """Totals since start, by metric name without prefix and suffix."""
        return {
            "requests_admitted": self._entry.num_admitted,
            "prefix_cache_queries": self._entry.num_looked_up,
            "prefix_cache_hits": self._entry.num_cached,
            "preemptions": self._num_preemptions,
            "recomputed_tokens": self._residents.recomputed_tokens,
            "prefill_timeouts": self._deadlines.num_prefill,
            "queue_timeouts": self._deadlines.num_queue,
            **self.blocks.counters(),
        }

    def gauges(self) -> Mapping[str, float]:
        """Values now."""
        running = self._residents.running
        long = len(self._entry.queues[Lane.LONG]) + sum(map(is_long, running))
        used = sum(seq.num_computed_tokens for seq in running)
        held = sum(len(seq.block_table) for seq in running) * self.blocks.block_size
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
        self._sequences[seq.seq_id] = seq
        self._entry.push(seq)

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
            self._entry.remove(seq)
            self.blocks.forget(seq.seq_id)
        seq.status = Status.FINISHED
        if not self.num_running:
            self.blocks.audit_idle()

    def schedule(self, now: float) -> StepPlan:
        """This step's work."""
        self.limits.refresh(now)
        self.blocks.begin_step()
        self._residents.begin_step()
        self._deadlines.expired.clear()
        for seq in self._deadlines.waited_too_long(self._entry.queues.values(), now):
            self.finish(seq)
        step = self._composer.compose(now)
        for seq in self._residents.preempted:
            self._entry.put_back(seq)
        self._num_preemptions += len(self._residents.preempted)
        moved_out, moved_in = self.blocks.take_moves()
        return StepPlan(
            items=(*step.decodes, *step.prompts),
            texts=step.texts,
            copies=self.blocks.pending_copies(),
            num_swapped_out=moved_out,
            num_swapped_in=moved_in,
            expired=tuple(self._deadlines.expired),
            wait_until=None if step else step.wait_until,
        )

    def draft(self, seq: Sequence, num_tokens: int) -> None:
        """Verify so many speculated tokens of a running `seq` in the next step."""
        seq.num_draft_tokens = num_tokens
        self._residents.watch(seq)

    def update(self, plan: StepPlan, sampled: Tokens[Tokens[int]]) -> None:
        """Record that `plan` ran: for each item the new tokens, several if drafts were accepted."""
        self.blocks.end_step()
        items, size = plan.items, self.blocks.block_size
        full = 1 % size  # tokens of the text that go beyond full blocks, once a block is full
        for i, (text, tokens) in enumerate(zip(plan.texts, sampled, strict=False)):
            if len(tokens) == 1:
                text.extend(tokens)
                if len(text) % size == full:
                    self._block_is_full(items[i].seq)
            else:
                self._record(items[i].seq, 1, tokens)
        for i in range(len(plan.texts), len(items)):
            self._record(items[i].seq, items[i].num_tokens, sampled[i])

    def _record(self, seq: Sequence, num_tokens: int, tokens: Tokens[int]) -> None:
        if seq.status is not Status.RUNNING:
            return
        seq.token_ids += tokens
        new = len(tokens)
        if new and seq.num_draft_tokens:  # those that were not accepted are written over
            new = seq.num_draft_tokens + 1
            seq.num_draft_tokens = 0
        seq.num_uncomputed_tokens += new - num_tokens
        if seq.num_computed_tokens % self.blocks.block_size < num_tokens:
            self._block_is_full(seq)

    def _block_is_full(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self.blocks.publish(seq.lease, seq.token_ids, seq.num_computed_tokens)
            self._residents.watch(seq)
