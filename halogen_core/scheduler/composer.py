"""What goes into one step, in which lane, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import attrs

from halogen_core.scheduler.blocks import BlockManagerProtocol
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.deadlines import Deadlines
from halogen_core.scheduler.entry import Entry
from halogen_core.scheduler.lanes import Lanes, is_long
from halogen_core.scheduler.limits import StepLimits
from halogen_core.scheduler.pacing import StepBudget
from halogen_core.scheduler.plan import Step
from halogen_core.scheduler.residents import Residents, rank
from halogen_core.scheduler.sequence import Lane, Sequence, Status


@attrs.define(eq=False)
class Composer:
    """Fills a step: answers first, then prompts that run, then whoever waits."""

    config: SchedulerConfig
    blocks: BlockManagerProtocol
    limits: StepLimits
    residents: Residents
    entry: Entry
    deadlines: Deadlines
    budget: StepBudget
    lanes: Lanes

    def compose(self, now: float) -> Step:
        """The step of the lane whose turn it is, of the other if that has nothing to do."""
        step = Step()
        turn = self._turn(step)
        if turn is Lane.LONG:
            self._long_step(step, now)
        if not (step or self.residents.preempted):
            self._normal_step(step, now)
        if not (step or self.residents.preempted):
            self._long_step(step, now)
        if self.residents.preempted:
            step.drop_preempted()
        return step

    def _turn(self, step: Step) -> Lane:
        normal, long = self._has_work(Lane.NORMAL), self._has_work(Lane.LONG)
        if normal and long:
            answers = [seq for seq in self.residents.running if not is_long(seq)]
            kv_tokens = sum(seq.num_computed_tokens for seq in answers)
            step.slack_s = self.budget.slack(len(answers), kv_tokens)
        if step.slack_s is None:
            return self.lanes.next(normal=normal, long=long)
        return self.lanes.next_within(step.slack_s, self._slice_seconds())

    def _slice_seconds(self) -> float:
        """Of the shortest slice of which half the time does more than get a step going."""
        context = next((s.num_computed_tokens for s in self.residents.running if is_long(s)), 0)
        return 2 * self._alone(self.blocks.block_size, context)

    def _alone(self, tokens: int, context: int) -> float:
        """Predicted time of a slice; 0 where nothing is known."""
        seconds = self.budget.seconds(tokens, context=context, decodes=0, kv_tokens=context)
        return seconds or 0.0

    def _has_work(self, lane: Lane) -> bool:
        if len(self.entry.queues[lane]):
            return True
        long = lane is Lane.LONG
        if self.config.long_prompt_tokens is None and self.config.prefill_timeout_s is None:
            return not long and self.residents.num_running > 0
        return (
            any(map(is_long, self.residents.watched))
            if long
            else not all(map(is_long, self.residents.running))
        )

    def _normal_step(self, step: Step, now: float) -> None:
        prompts: list[Sequence] = []
        residents = self.residents
        watched = self._awake(step)
        for seq in watched:
            if seq.num_uncomputed_tokens > 1 or seq.num_draft_tokens:
                if not is_long(seq):
                    prompts.append(seq)
            elif seq.status is Status.RUNNING and residents.make_room(seq, 1):
                step.decode(residents.settle(seq))
        prompts = [seq for seq in prompts if not self.deadlines.prefill_over(seq, now)]
        budget = self._prompt_budget(step, prompts)
        budget = self._continue_prompts(prompts, budget, step)
        if not residents.preempted:  # else nobody enters now
            self._admit(now, budget, step)

    def _awake(self, step: Step) -> Tokens[Sequence]:
        """Take those that are steady into a normal step; returns the others that may be in it.

        Some may not only after the device lowered its limits.
        """
        residents, most = self.residents, self.limits.max_sequences
        if residents.num_running <= most:
            step.decodes = list(residents.steady.values())
            step.texts = list(residents.texts.values())
            return tuple(residents.watched)
        first = sorted((s for s in residents.running if not is_long(s)), key=rank)[:most]
        for seq in first:
            if seq in residents.steady:
                step.decode(residents.steady[seq])
        return [seq for seq in first if seq in residents.watched]

    def _long_step(self, step: Step, now: float) -> None:
        """Over-long prompts alone, one after the other, in slices that others can wait for."""
        prompts = [seq for seq in self.residents.watched if is_long(seq)][:1]
        context = prompts[0].num_computed_tokens if prompts else 0
        limit, within_s = self.limits.max_tokens, self.budget.target_s
        if self.residents.num_running > len(prompts):
            limit = max(self.blocks.block_size, limit // 4)
            within_s = self.lanes.saved_s if step.slack_s is not None else within_s
        budget = self.budget.prompt_tokens(
            within_s, limit, context=context, decodes=0, kv_tokens=context
        )
        self._continue_prompts(prompts, budget, step)
        if not (step or self.residents.preempted):
            self._enter(Lane.LONG, now, budget, step)
        if step.slack_s is not None:
            for item in step.prompts:
                self.lanes.spend(self._alone(item.num_tokens, context))

    def _prompt_budget(self, step: Step, prompts: list[Sequence]) -> int:
        left, within_s = self.limits.max_tokens - len(step.decodes), self.budget.target_s
        if within_s is None or not step.decodes:
            return left
        if step.slack_s is not None:  # the rest is saved for the long lane
            within_s -= self.config.long_lane_share * step.slack_s
        members = (*(item.seq for item in step.decodes), *prompts)
        return self.budget.prompt_tokens(
            within_s,
            left,
            context=max((seq.num_computed_tokens for seq in prompts), default=0),
            decodes=len(step.decodes),
            kv_tokens=sum(seq.num_computed_tokens for seq in members),
        )

    def _continue_prompts(self, prompts: list[Sequence], budget: int, step: Step) -> int:
        others_wait = len(self.entry.queues[Lane.NORMAL])
        for seq in prompts:
            if seq.status is not Status.RUNNING or budget <= 0:
                continue
            share = max(1, budget // 2) if others_wait else budget
            count = self._clip(seq, share)
            if self.residents.make_room(seq, count):
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
        if self.entry.long_is_starved(now, self.config.long_patience_s):
            return
        step.wait_until = self.entry.opens(Lane.NORMAL, now, budget)
        if step.wait_until is None:
            while budget > 0 and (count := self._enter(Lane.NORMAL, now, budget, step)):
                budget -= count

    def _enter(self, lane: Lane, now: float, budget: int, step: Step) -> int:
        """Let the first of a lane in and give it tokens of this step; 0: nobody entered."""
        seq = self.entry.next(lane, now)
        if seq is None:
            return 0
        count = self._clip(seq, budget)
        if not self.residents.make_room(seq, count):
            return 0
        step.compute(seq, count)
        return count
