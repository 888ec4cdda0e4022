"""Who waits, in what order, and when they are let in."""

from __future__ import annotations

import attrs

from halogen_core.scheduler.lanes import is_long
from halogen_core.scheduler.limits import StepLimits
from halogen_core.scheduler.pacing import BatchWindow
from halogen_core.scheduler.policy import QueuePolicy
from halogen_core.scheduler.queue import WaitingQueue
from halogen_core.scheduler.residents import Residents
from halogen_core.scheduler.sequence import Lane, Sequence


@attrs.define(eq=False)
class Entry:
    """The waiting queues of both lanes and the way in."""

    residents: Residents
    policy: QueuePolicy
    limits: StepLimits
    window: BatchWindow
    queues: dict[Lane, WaitingQueue] = attrs.field(init=False)
    num_admitted: int = attrs.field(default=0, init=False)
    num_looked_up: int = attrs.field(default=0, init=False)
    """Prompt tokens of those admitted."""
    num_cached: int = attrs.field(default=0, init=False)
    """Of these, found in the prefix cache."""
    _serial: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.queues = {lane: WaitingQueue() for lane in Lane}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def push(self, seq: Sequence) -> None:
        """A new sequence: it gets its rank, for good."""
        self._serial += 1
        seq.key = (self.policy.key(seq), self._serial)
        self.queues[seq.lane].push(seq)

    def put_back(self, seq: Sequence) -> None:
        """A preempted one."""
        self.queues[seq.lane].push(seq)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands."""
        self.queues[seq.lane].remove(seq)

    def opens(self, lane: Lane, now: float, budget: int) -> float | None:
        """When those that wait may enter, if that is not yet; None: now, or nobody waits."""
        queue = self.queues[lane]
        oldest = queue.oldest()
        if oldest is None:
            return None
        running = self.residents.num_running
        full = (
            oldest.num_preemptions > 0
            or len(queue) >= self.limits.max_sequences - running
            or queue.num_tokens >= budget
        )
        opens = self.window.opens(oldest.arrival, busy=running > 0, full=full)
        return opens if now + 1e-9 < opens else None

    def next(self, lane: Lane, now: float) -> Sequence | None:
        """Let the first in rank in; None: nobody waits, or it finds no place."""
        seq = self.queues[lane].head()
        if seq is None or self.residents.num_running >= self.limits.max_sequences:
            return None
        first = seq.started is None
        if not self.residents.admit(seq, now):
            return None
        self.queues[lane].remove(seq)
        if first:
            self.policy.admitted(seq)
            self.num_admitted += 1
            self.num_looked_up += seq.num_prompt_tokens
            self.num_cached += seq.num_cached_tokens
        return seq

    def long_is_starved(self, now: float, patience_s: float) -> bool:
        """Whether others must leave blocks to the first of the long lane."""
        head = self.queues[Lane.LONG].head()
        return (
            head is not None
            and self.residents.num_running > 0
            and now - head.arrival > patience_s
            and not any(is_long(seq) for seq in self.residents.running)
        )
