"""Two lanes: prompts that are over-long never share a step with anything else (A13, A14)."""

from __future__ import annotations

import attrs

from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.sequence import Lane, Sequence


@attrs.define
class Lanes:
    """Whose step it is: the long lane has its share while others have work, else all of it."""

    share: float
    credit: float = 0.0

    def next(self, *, normal: bool, long: bool) -> Lane:
        """The lane of this step, given which lanes have work."""
        if not (normal and long):
            self.credit = 0.0
            return Lane.LONG if long else Lane.NORMAL
        self.credit += self.share
        if self.credit < 1.0:
            return Lane.NORMAL
        self.credit -= 1.0
        return Lane.LONG


def lane_of(seq: Sequence, config: SchedulerConfig) -> Lane:
    """The lane that `seq` arrives in."""
    limit = config.long_prompt_tokens
    return Lane.LONG if limit is not None and seq.num_prompt_tokens > limit else Lane.NORMAL


def is_long(seq: Sequence) -> bool:
    """Whether `seq` has a prompt to compute in the long lane; its answer runs with the others."""
    return seq.lane is Lane.LONG and seq.num_uncomputed_tokens > 1
