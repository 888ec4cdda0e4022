"""Continuous batching under one token budget (Orca 2022, Sarathi-Serve 2024).

There is no prefill phase and no decode phase: in every step each sequence lets
`num_computed_tokens` catch up with its tokens, as far as the budget goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from itertools import islice

from halogen_core.scheduler.admission import Door
from halogen_core.scheduler.blocks import BlockManagerProtocol
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.deadlines import Deadlines
from halogen_core.scheduler.entry import Entry
from halogen_core.scheduler.lanes import Lanes, is_long, lane_of
from halogen_core.scheduler.limits import StepLimits
from halogen_core.scheduler.pacing import BatchWindow, CostModel, StepBudget
from halogen_core.scheduler.plan import Step, StepPlan
from halogen_core.scheduler.policy import FCFS, QueuePolicy
from halogen_core.scheduler.residents import Residents, rank
from halogen_core.scheduler.sequence import Lane, ScheduledSequence, Sequence, Status
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
        self._budget = StepBudget(cost, config.tpot_target_s, blocks.block_size)
        self._deadlines = Deadlines(config)
        self._lanes = Lanes(config.long_lane_share)
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
        step = self._compose(now)
        for seq in self._residents.preempted:
            self._entry.put_back(seq)
        self._num_preemptions += len(self._residents.preempted)
        moved_out, moved_in = self.blocks.take_moves()
        return StepPlan(
            items=(*step.decodes, *step.prompts),
            num_decodes=len(step.decodes),
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
        size = self.blocks.block_size
        full = 1 % size  # tokens of the text that go beyond full blocks, once a block is full
        results = zip(plan.items, sampled, strict=True)
        for (seq, _, _), tokens in islice(results, plan.num_decodes):
            if len(tokens) == 1:
                text = seq.token_ids
                text += tokens
                if len(text) % size == full:
                    self._block_is_full(seq)
            else:
                self._record(seq, 1, tokens)
        for (seq, num_tokens, _), tokens in results:
            self._record(seq, num_tokens, tokens)

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

    # -- one step

    def _compose(self, now: float) -> Step:
        """The step of the lane whose turn it is, of the other if that has nothing to do."""
        step = Step()
        turn = self._turn(step)
        if turn is Lane.LONG:
            self._long_step(step, now)
        if not (step or self._residents.preempted):
            self._normal_step(step, now)
        if not (step or self._residents.preempted):
            self._long_step(step, now)
        if self._residents.preempted:
            step.drop_preempted()
        return step

    def _turn(self, step: Step) -> Lane:
        normal, long = self._has_work(Lane.NORMAL), self._has_work(Lane.LONG)
        if normal and long:
            answers = [seq for seq in self.running if not is_long(seq)]
            kv_tokens = sum(seq.num_computed_tokens for seq in answers)
            step.slack_s = self._budget.slack(len(answers), kv_tokens)
        if step.slack_s is None:
            return self._lanes.next(normal=normal, long=long)
        return self._lanes.next_within(step.slack_s, self._slice_seconds())

    def _slice_seconds(self) -> float:
        """Of the shortest slice of which half the time does more than get a step going."""
        context = next((s.num_computed_tokens for s in self.running if is_long(s)), 0)
        return 2 * (self._budget.seconds(self.blocks.block_size, 0, context) or 0.0)

    def _has_work(self, lane: Lane) -> bool:
        if len(self._entry.queues[lane]):
            return True
        long = lane is Lane.LONG
        if self.config.long_prompt_tokens is None and self.config.prefill_timeout_s is None:
            return not long and self.num_running > 0
        return (
            any(map(is_long, self._residents.watched))
            if long
            else not all(map(is_long, self.running))
        )

    def _normal_step(self, step: Step, now: float) -> None:
        prompts: list[Sequence] = []
        residents = self._residents
        step.decodes, watched = self._awake()
        for seq in watched:
            if seq.num_uncomputed_tokens > 1 or seq.num_draft_tokens:
                if not is_long(seq):
                    prompts.append(seq)
            elif seq.status is Status.RUNNING and residents.make_room(seq, 1):
                step.decodes.append(residents.settle(seq))
        prompts = [seq for seq in prompts if not self._deadlines.prefill_over(seq, now)]
        budget = self._prompt_budget(step, prompts)
        budget = self._continue_prompts(prompts, budget, step)
        if not residents.preempted:  # else nobody enters now
            self._admit(now, budget, step)

    def _awake(self) -> tuple[list[ScheduledSequence], Tokens[Sequence]]:
        """Who may be in a normal step; fewer than run only after the device lowered its limits."""
        steady, watched = self._residents.steady, self._residents.watched
        most = self.limits.max_sequences
        if self.num_running <= most:
            return list(steady.values()), tuple(watched)
        first = sorted((s for s in self.running if not is_long(s)), key=rank)[:most]
        return [steady[s] for s in first if s in steady], [s for s in first if s in watched]

    def _long_step(self, step: Step, now: float) -> None:
        """Over-long prompts alone, one after the other, in slices that others can wait for."""
        prompts = [seq for seq in self._residents.watched if is_long(seq)][:1]
        context = prompts[0].num_computed_tokens if prompts else 0
        limit, within_s = self.limits.max_tokens, self._budget.target_s
        if self.num_running > len(prompts):
            limit = max(self.blocks.block_size, limit // 4)
            within_s = self._lanes.saved_s if step.slack_s is not None else within_s
        budget = self._budget.prompt_tokens(within_s, limit, kv_tokens=context)
        self._continue_prompts(prompts, budget, step)
        if not (step or self._residents.preempted):
            self._enter(Lane.LONG, now, budget, step)
        if step.slack_s is not None:
            for item in step.prompts:
                self._lanes.spend(self._budget.seconds(item.num_tokens, 0, context) or 0.0)

    def _prompt_budget(self, step: Step, prompts: list[Sequence]) -> int:
        left, within_s = self.limits.max_tokens - len(step.decodes), self._budget.target_s
        if within_s is None or not step.decodes:
            return left
        if step.slack_s is not None:  # the rest is saved for the long lane
            within_s -= self.config.long_lane_share * step.slack_s
        members = (*(item.seq for item in step.decodes), *prompts)
        return self._budget.prompt_tokens(
            within_s,
            left,
            decodes=len(step.decodes),
            kv_tokens=sum(seq.num_computed_tokens for seq in members),
        )

    def _continue_prompts(self, prompts: list[Sequence], budget: int, step: Step) -> int:
        others_wait = len(self._entry.queues[Lane.NORMAL])
        for seq in prompts:
            if seq.status is not Status.RUNNING or budget <= 0:
                continue
            share = max(1, budget // 2) if others_wait else budget
            count = self._clip(seq, share)
            if self._residents.make_room(seq, count):
                step.compute(seq, count)
                budget -= count
        return budget

    def _clip(self, seq: Sequence, limit: int) -> int:
        """Tokens of `seq` to compute now: not past a checkpoint of recurrent state."""
        count = min(seq.num_uncomputed_tokens + seq.num_draft_tokens, limit)
        for position in seq.checkpoints:
            if 0 < position - seq.num_computed_tokens < count:
                return position - seq.num_computed_tokens
        return count

    def _admit(self, now: float, budget: int, step: Step) -> None:
        """Let waiting sequences in, unless they are to wait for company."""
        if self._entry.long_is_starved(now, self.config.long_patience_s):
            return
        step.wait_until = self._entry.opens(Lane.NORMAL, now, budget)
        if step.wait_until is None:
            while budget > 0 and (count := self._enter(Lane.NORMAL, now, budget, step)):
                budget -= count

    def _enter(self, lane: Lane, now: float, budget: int, step: Step) -> int:
        """Let the first of a lane in and give it tokens of this step; 0: nobody entered."""
        seq = self._entry.next(lane, now)
        if seq is None:
            return 0
        count = self._clip(seq, budget)
        if not self._residents.make_room(seq, count):
            return 0
        step.compute(seq, count)
        return count
