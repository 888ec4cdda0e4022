"""One sequence as the scheduler sees it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import attrs


class Status(IntEnum):
    """Where a sequence is; there is no prefill state and no decode state."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Lane(IntEnum):
    """Which steps compute a prompt: over-long prompts never share one with others."""

    NORMAL = 0
    LONG = 1


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One request's tokens and its place in the KV cache.

    `num_computed_tokens` catches up with `token_ids` (prompt, then output) step by step. What is
    kept is how far behind it is: 1 while decoding, so nothing changes from step to step.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int = attrs.Factory(lambda self: len(self.token_ids), takes_self=True)
    max_new_tokens: int = 16
    salt: bytes = b""
    """Sequences share cached prefixes only within a salt (see `halogen_core.kv.salt`)."""
    priority: int = 0
    """Higher is sooner."""
    session: str = ""
    """Fairness and pin key."""
    arrival: float = 0.0
    """Seconds, on the clock that `schedule` is called with."""
    use_prefix_cache: bool = True
    checkpoints: tuple[int, ...] = ()
    """Positions at which recurrent state is to be saved (system end, history end)."""
    payload: Any = None
    """The engine's own; never looked at."""

    num_uncomputed_tokens: int = attrs.field(init=False)
    num_cached_tokens: int = attrs.field(default=0, init=False)
    """Prompt tokens that the prefix cache gave at first admission."""
    num_draft_tokens: int = attrs.field(default=0, init=False)
    """Speculated tokens that the engine wants verified in the next step."""
    num_preemptions: int = attrs.field(default=0, init=False)
    block_table: list[int] = attrs.field(factory=list, init=False)
    status: Status = attrs.field(default=Status.WAITING, init=False)
    lane: Lane = attrs.field(default=Lane.NORMAL, init=False)
    started: float | None = attrs.field(default=None, init=False)
    """When it was first admitted."""
    prefill_began: float | None = attrs.field(default=None, init=False)
    key: tuple[float, int] = attrs.field(default=(0.0, 0), init=False)
    """Its rank in the queue, smallest first; kept over preemptions."""
    lease: Any = attrs.field(default=None, init=False)
    """Its hold on KV blocks, from the block manager."""
    capacity: int = attrs.field(default=0, init=False)
    """Tokens that its blocks can hold."""

    def __attrs_post_init__(self) -> None:
        self.num_uncomputed_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return len(self.token_ids) - self.num_uncomputed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self.num_uncomputed_tokens = len(self.token_ids) - count

    @property
    def max_tokens(self) -> int:
        """Tokens it may come to, prompt and answer."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step."""

    seq: Sequence
    num_tokens: int
    """Tokens to compute, from `seq.num_computed_tokens` on."""
    samples: bool
    """Whether they end with the sequence's last token, so that a new one is picked."""
