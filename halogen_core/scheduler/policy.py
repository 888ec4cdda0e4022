"""Orders of the waiting queue: a policy is a key, the smallest goes first.

Keys are fixed when a sequence arrives. Ageing needs no re-sorting: what all wait alike cancels
out, so "priority grows while waiting" is the same order as "arrival minus a head start". Each
policy's starvation bound follows from its head start (T32).
"""

from __future__ import annotations

from typing import Protocol

import attrs

from halogen_core.scheduler.sequence import Sequence


class QueuePolicy(Protocol):
    """Ranks sequences."""

    def key(self, seq: Sequence) -> float:
        """Its rank, smallest first; asked once, when it arrives."""
        ...

    def admitted(self, seq: Sequence) -> None:
        """It leaves the queue."""
        ...


@attrs.define
class FCFS:
    """First come, first served."""

    def key(self, seq: Sequence) -> float:
        return seq.arrival

    def admitted(self, seq: Sequence) -> None:
        pass


@attrs.define
class Priority:
    """Each level of priority is a head start of `aging_s` seconds.

    So a request is overtaken only by what arrives within (difference in priority) * `aging_s`
    after it; levels beyond `max_level` count as `max_level`.
    """

    aging_s: float = 1.0
    max_level: int = 5

    def key(self, seq: Sequence) -> float:
        level = max(-self.max_level, min(self.max_level, seq.priority))
        return seq.arrival - level * self.aging_s

    def admitted(self, seq: Sequence) -> None:
        pass


@attrs.define
class ShortestRemaining:
    """Least work first: a token is worth `seconds_per_token` of waiting, at most `bound_s`.

    Least mean waiting time among policies that know sizes; nothing is overtaken by what arrives
    more than `bound_s` later.
    """

    seconds_per_token: float = 1e-3
    bound_s: float = 5.0

    def key(self, seq: Sequence) -> float:
        work = seq.num_prompt_tokens + seq.max_new_tokens
        return seq.arrival + min(self.bound_s, work * self.seconds_per_token)

    def admitted(self, seq: Sequence) -> None:
        pass


@attrs.define
class FairShare:
    """Sessions take turns in proportion to tokens, however many requests each one sends.

    Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a session's requests start one
    after another in virtual time, and virtual time is that of the last admission.
    """

    virtual: float = 0.0
    finish: dict[str, float] = attrs.field(factory=dict)

    def key(self, seq: Sequence) -> float:
        start = max(self.virtual, self.finish.get(seq.session, 0.0))
        self.finish[seq.session] = start + seq.num_prompt_tokens + seq.max_new_tokens
        return start

    def admitted(self, seq: Sequence) -> None:
        self.virtual = max(self.virtual, seq.key[0])
        if len(self.finish) > 1024:
            self.finish = {s: f for s, f in self.finish.items() if f > self.virtual}
