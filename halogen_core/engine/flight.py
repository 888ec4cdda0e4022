"""A step on its way, and what may be said about the next before its tokens are known (ADR 0079).

While the device computes a step the engine plans the next, as if each sequence went on: its newest
token stands as `UNKNOWN` in its text and reaches the next step on the device. Who turns out to have
ended has computed one row in vain.
"""

from __future__ import annotations

from typing import Any

import attrs

from halogen_core.engine.batch import Step
from halogen_core.engine.generation import generation_of
from halogen_core.engine.runner import Launched
from halogen_core.scheduler.plan import StepPlan
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.scheduler.sequence import Sequence

UNKNOWN = -1
"""Stands for the newest token; no token of it is computed, so no cached block holds it."""


@attrs.define(eq=False)
class Flight:
    """A launched step."""

    plan: StepPlan
    step: Step
    launched: Launched[Any]
    assumed: bool = attrs.field(default=False, init=False)
    """The scheduler counts its tokens already."""

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step asks for nothing that depends on these tokens' values."""
        items = self.plan.items
        return all(
            generation_of(items[row.item].seq).sampler.next_is_independent for row in self.step.rows
        )

    def rows(self) -> dict[Sequence, int]:
        """Which row picks the newest token of a sequence."""
        items, rows = self.plan.items, enumerate(self.step.rows)
        return {items[row.item].seq: at for at, row in rows if not row.is_prompt}

    def assume(self, scheduler: Scheduler) -> None:
        """Let every sequence go on by a token; those that end by their length end now."""
        self.assumed = True
        scheduler.update(self.plan, [[UNKNOWN] if item.samples else [] for item in self.plan.items])
        for seq, _, samples in self.plan.items:
            if samples and seq.num_generated >= seq.max_new_tokens:
                scheduler.finish(seq)

    def settle(self, scheduler: Scheduler, sampled: list[list[int]]) -> None:
        """The tokens are known: by item, none where nothing valid was picked."""
        if not self.assumed:
            scheduler.update(self.plan, sampled)
            return
        for item, tokens in zip(self.plan.items, sampled, strict=True):
            if tokens:
                item.seq.token_ids[-1] = tokens[0]
