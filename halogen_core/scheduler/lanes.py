"""Two lanes: prompts that are over-long never share a step with anything else (A13, A14)."""

from __future__ import annotations

import attrs

from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.sequence import Lane, Sequence


@attrs.define
class Lanes:
    """Whose step it is: the long lane has its share while others have work, else all of it.

    A share of the steps; or, where a target for the time per output token bounds them, of the
    time that answers leave of the target. That time is saved up until a slice is worth it, so
    that answers keep the target on the mean of any few tokens.
    """

    share: float
    credit: float = 0.0
    """Steps that are due to the long lane."""
    saved_s: float = 0.0
    """Time that is."""

    def next(self, *, normal: bool, long: bool) -> Lane:
        """The lane of this step, given which lanes have work."""
        if not (normal and long):
            self.credit = self.saved_s = 0.0
            return Lane.LONG if long else Lane.NORMAL
        self.credit += self.share
        if self.credit < 1.0:
            return Lane.NORMAL
        self.credit -= 1.0
        return Lane.LONG

    def next_within(self, slack_s: float, slice_s: float) -> Lane:
        """The lane of this step when both have work and a slice of the long lane takes so long."""
        if self.saved_s >= slice_s:
            return Lane.LONG
        self.saved_s += self.share * slack_s
        return Lane.NORMAL

    def spend(self, seconds: float) -> None:
        """A slice of the long lane takes so long."""
        self.saved_s -= seconds


def lane_of(seq: Sequence, config: SchedulerConfig) -> Lane:
    """The lane that `seq` arrives in."""
    limit = config.long_prompt_tokens
    return Lane.LONG if limit is not None and seq.num_prompt_tokens > limit else Lane.NORMAL


def is_long(seq: Sequence) -> bool:
    """Whether `seq` has a prompt to compute in the long lane; its answer runs with the others."""
    return seq.lane is Lane.LONG and seq.num_uncomputed_tokens > 1
