"""What a step is to do."""

from __future__ import annotations

import attrs

from halogen_core.errors import RequestError
from halogen_core.scheduler.sequence import ScheduledSequence, Sequence


@attrs.frozen(kw_only=True, eq=False)
class StepPlan:
    """One step: running sequences first, then prompts, each in order."""

    items: tuple[ScheduledSequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    """Block copies (source, destination) to run before the step, in order."""
    num_swapped_out: int = 0
    """Blocks that went to a lower tier while planning (already done by the pool's mover)."""
    num_swapped_in: int = 0
    expired: tuple[tuple[Sequence, RequestError], ...] = ()
    """Sequences given up, with the reason; the caller finishes them."""
    wait_until: float | None = None
    """No items now; ask again at this time at the latest, or when a request comes."""

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
