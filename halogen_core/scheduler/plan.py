"""What a step is to do."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import attrs

from halogen_core.errors import RequestError
from halogen_core.scheduler.sequence import ScheduledSequence, Sequence, Status


@attrs.define(eq=False)
class Step:
    """A step while it is put together."""

    decodes: list[ScheduledSequence] = attrs.field(factory=list)
    texts: list[list[int]] = attrs.field(factory=list)
    """The tokens of `decodes`."""
    prompts: list[ScheduledSequence] = attrs.field(factory=list)
    wait_until: float | None = None
    """When those that wait for company may enter."""
    slack_s: float | None = None
    """What answers leave of the target, if both lanes have work and the target is known."""

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompts)

    def decode(self, item: ScheduledSequence) -> None:
        """The next token of an answer."""
        self.decodes.append(item)
        self.texts.append(item.seq.token_ids)

    def compute(self, seq: Sequence, count: int) -> None:
        """`count` tokens of a prompt, or of an answer with as many drafts as that leaves."""
        drafts = count - seq.num_uncomputed_tokens
        if drafts >= 0:
            seq.num_draft_tokens = drafts
        self.prompts.append(ScheduledSequence(seq, count, drafts >= 0))

    def drop_preempted(self) -> None:
        """Sequences that gave way after they were chosen."""
        self.decodes = [item for item in self.decodes if item.seq.status is Status.RUNNING]
        self.texts = [item.seq.token_ids for item in self.decodes]
        self.prompts = [item for item in self.prompts if item.seq.status is Status.RUNNING]


@attrs.frozen(kw_only=True, eq=False)
class StepPlan:
    """One step: sequences that compute one token and pick the next, then prompts."""

    items: tuple[ScheduledSequence, ...] = ()
    texts: Tokens[list[int]] = ()
    """The tokens of the first items, which compute one token and have no drafts."""
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
