"""Serving in simulated time: steps cost what the part's model says, nothing sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from halogen_ascend.scheduling.arrivals import Arrival
from halogen_ascend.scheduling.window import BatchBudget, BatchWindow, compose
from halogen_core.spi import StepShape

StepSeconds = Callable[[StepShape, float], float]
"""Seconds of a step that starts at a simulated time."""


@attrs.define
class Live:
    """A request being served."""

    request: Arrival
    started: float
    made: int = 0
    first_token: float = 0.0

    @property
    def kv(self) -> int:
        return self.request.input_len + self.made


@attrs.frozen(kw_only=True)
class Served:
    """One finished request; times in seconds since it arrived."""

    request: Arrival
    queued: float
    ttft: float
    total: float


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run gave."""

    served: tuple[Served, ...]
    seconds: float
    busy: float
    steps: int
    rows: int
    """Sequences summed over steps."""

    @property
    def utilisation(self) -> float:
        return self.busy / self.seconds if self.seconds else 0.0

    @property
    def mean_batch(self) -> float:
        return self.rows / self.steps if self.steps else 0.0

    @property
    def tokens_per_busy_second(self) -> float:
        return sum(s.request.output_len for s in self.served) / self.busy if self.busy else 0.0


def serve_continuously(
    arrivals: Iterable[Arrival], window: BatchWindow, budget: BatchBudget, step: StepSeconds
) -> Outcome:
    """Requests join at any step; the window only delays a batch that starts from idle."""
    return _Run(sorted(arrivals, key=lambda a: a.at), window, budget, step).loop(joins=True)


def serve_statically(
    arrivals: Iterable[Arrival], window: BatchWindow, budget: BatchBudget, step: StepSeconds
) -> Outcome:
    """A batch runs to its longest request's end before the next starts: the baseline."""
    return _Run(sorted(arrivals, key=lambda a: a.at), window, budget, step).loop(joins=False)


@attrs.define
class _Run:
    arrivals: Sequence[Arrival]
    window: BatchWindow
    budget: BatchBudget
    step: StepSeconds
    now: float = 0.0
    busy: float = 0.0
    steps: int = 0
    rows: int = 0
    next: int = 0
    waiting: list[Arrival] = attrs.field(factory=list)
    live: list[Live] = attrs.field(factory=list)
    served: list[Served] = attrs.field(factory=list)

    def loop(self, *, joins: bool) -> Outcome:
        """Until everything that arrived is served."""
        while self.next < len(self.arrivals) or self.waiting or self.live:
            if not self.live:
                self._wait_for_work()
            self._take_arrivals()
            if joins or not self.live:
                self._admit()
            self._step()
        return Outcome(
            served=tuple(self.served),
            seconds=self.now,
            busy=self.busy,
            steps=self.steps,
            rows=self.rows,
        )

    def _wait_for_work(self) -> None:
        if not self.waiting:
            self.now = max(self.now, self.arrivals[self.next].at)
            self._take_arrivals()
        while True:
            start = self.window.dispatch_at(self.waiting, self.now)
            assert start is not None
            coming = self.arrivals[self.next].at if self.next < len(self.arrivals) else start
            if coming >= start:
                break
            self.now = max(self.now, coming)
            self._take_arrivals()
        self.now = max(self.now, start)

    def _take_arrivals(self) -> None:
        while self.next < len(self.arrivals) and self.arrivals[self.next].at <= self.now:
            self.waiting.append(self.arrivals[self.next])
            self.next += 1

    def _admit(self) -> None:
        held = sum(s.request.input_len + s.request.output_len for s in self.live)
        joined = compose(self.waiting, self.budget, running_kv=held, running=len(self.live))
        for request in joined:
            self.waiting.remove(request)
            self.live.append(Live(request, self.now))
        if not self.live and self.waiting:
            raise ValueError(f"{self.waiting[0]} is larger than the budget {self.budget}")

    def _step(self) -> None:
        new = [s for s in self.live if not s.made]
        shape = StepShape(
            prefill_tokens=sum(s.request.input_len for s in new),
            decode_sequences=len(self.live) - len(new),
            kv_tokens=sum(s.kv for s in self.live),
        )
        took = self.step(shape, self.now)
        self.now, self.busy = self.now + took, self.busy + took
        self.steps, self.rows = self.steps + 1, self.rows + len(self.live)
        for sequence in self.live:
            sequence.made += 1
            sequence.first_token = sequence.first_token or self.now
            if sequence.made == sequence.request.output_len:
                self._finish(sequence)
        self.live = [s for s in self.live if s.made < s.request.output_len]

    def _finish(self, sequence: Live) -> None:
        at = sequence.request.at
        self.served.append(
            Served(
                request=sequence.request,
                queued=sequence.started - at,
                ttft=sequence.first_token - at,
                total=self.now - at,
            )
        )
