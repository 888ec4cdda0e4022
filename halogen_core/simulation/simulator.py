"""The event loop: a fake clock, a device that is a cost model, the real scheduler and pool."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator

import attrs

from halogen_core.errors import HalogenError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.ledger import breach
from halogen_core.scheduler.plan import StepPlan
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.scheduler.sequence import Sequence
from halogen_core.simulation.clients import VOCABULARY, Client, Turn
from halogen_core.simulation.device import DeviceProfile
from halogen_core.spi import StepShape


@attrs.define(eq=False)
class Outcome:
    """What became of one request. Seconds on the simulated clock."""

    turn: Turn
    arrived: float
    first_token: float | None = None
    finished: float | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        assert self.first_token is not None
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        assert self.finished is not None
        assert self.first_token is not None
        return (self.finished - self.first_token) / max(1, self.num_generated - 1)


@attrs.define(eq=False)
class _Request:
    client: Client
    outcome: Outcome


@attrs.define(eq=False)
class Simulator:
    """Runs clients against a scheduler; `arrivals` are (time, client), ascending."""

    scheduler: Scheduler
    pool: BlockPool
    device: DeviceProfile
    arrivals: Iterator[tuple[float, Client]]
    seed: int = 0
    audit_every: int = 1000
    """Steps between full audits of the ledger."""
    now: float = attrs.field(default=0.0, init=False)
    num_steps: int = attrs.field(default=0, init=False)
    busy_s: float = attrs.field(default=0.0, init=False)
    outcomes: list[Outcome] = attrs.field(factory=list, init=False)
    _events: list[tuple[float, int, Client, Turn]] = attrs.field(factory=list, init=False)
    _serial: int = attrs.field(default=0, init=False)
    _next: tuple[float, Client] | None = attrs.field(default=None, init=False)
    _rng: random.Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._next = next(self.arrivals, None)

    def run(self, *, until_s: float = float("inf"), max_steps: int | None = None) -> None:
        """Until the clients are done, or the clock or the number of steps says stop."""
        while self.now < until_s and (max_steps is None or self.num_steps < max_steps):
            self._arrive()
            if not (self.scheduler.num_running or self.scheduler.num_waiting):
                if (wake := self._next_event()) is None:
                    return
                self.now = wake
                continue
            self.step()

    def step(self) -> StepPlan:
        """One step of the engine."""
        plan = self.scheduler.schedule(self.now)
        for seq, error in plan.expired:
            self.scheduler.finish(seq)
            self._end(seq, error.code)
        if not plan.items:
            self._wait(plan)
            return plan
        seconds = self._seconds(plan)
        self.now += seconds
        self.busy_s += seconds
        draw = self._rng.randrange
        sampled = [(draw(VOCABULARY),) if item.samples else () for item in plan.items]
        self.scheduler.update(plan, sampled)
        for item in plan.items:
            if item.samples:
                self._progress(item.seq)
        self.num_steps += 1
        self._check()
        return plan

    # -- clients

    def _arrive(self) -> None:
        while self._next is not None and self._next[0] <= self.now:
            at, client = self._next
            self._ask(client, at, first=True)
            self._next = next(self.arrivals, None)
        while self._events and self._events[0][0] <= self.now:
            at, _, client, turn = heapq.heappop(self._events)
            self._submit(client, turn, at)

    def _ask(
        self, client: Client, at: float, *, answer: list[int] | None = None, first: bool = False
    ) -> None:
        try:
            turn = next(client) if first else client.send(answer or [])
        except StopIteration:
            return
        self._serial += 1
        heapq.heappush(self._events, (at + turn.delay_s, self._serial, client, turn))

    def _submit(self, client: Client, turn: Turn, at: float) -> None:
        outcome = Outcome(turn, at)
        self.outcomes.append(outcome)
        self._serial += 1
        seq = Sequence(
            seq_id=self._serial,
            token_ids=list(turn.prompt),
            max_new_tokens=turn.max_new_tokens,
            session=turn.session,
            priority=turn.priority,
            arrival=at,
            payload=_Request(client, outcome),
        )
        try:
            self.scheduler.add(seq)
        except HalogenError as exc:
            outcome.error = exc.code

    def _progress(self, seq: Sequence) -> None:
        request: _Request = seq.payload
        if request.outcome.first_token is None:
            request.outcome.first_token = self.now
        if seq.num_generated >= seq.max_new_tokens:
            self.scheduler.finish(seq)
            self._end(seq)

    def _end(self, seq: Sequence, error: str = "") -> None:
        request: _Request = seq.payload
        outcome = request.outcome
        outcome.finished, outcome.error = self.now, error
        outcome.num_generated = seq.num_generated
        outcome.num_cached = seq.num_cached_tokens
        outcome.num_preemptions = seq.num_preemptions
        if not error:
            self._ask(request.client, self.now, answer=seq.token_ids[seq.num_prompt_tokens :])

    # -- time

    def _seconds(self, plan: StepPlan) -> float:
        prefill = sum(item.num_tokens for item in plan.items if item.num_tokens > 1)
        shape = StepShape(
            prefill_tokens=prefill,
            decode_sequences=sum(item.num_tokens == 1 for item in plan.items),
            kv_tokens=sum(item.seq.num_computed_tokens + item.num_tokens for item in plan.items),
        )
        moved = (plan.num_swapped_in + plan.num_swapped_out) * self.device.block_copy_s
        spread = self._rng.uniform(-1, 1) * self.device.jitter if self.device.jitter else 0.0
        return self.device.seconds(shape) * (1 + spread) + moved

    def _next_event(self) -> float | None:
        times = [self._events[0][0]] if self._events else []
        if self._next is not None:
            times.append(self._next[0])
        return min(times, default=None)

    def _wait(self, plan: StepPlan) -> None:
        """Nothing to run now: on to the next moment at which that can change."""
        times = [t for t in (plan.wait_until, self._next_event()) if t is not None and t > self.now]
        if times:
            self.now = min(times)
        elif not plan.expired:
            raise AssertionError("the scheduler has work, no plan and no time to wait for")

    def _check(self) -> None:
        stats = self.pool.stats()
        assert min(stats.free, stats.active, stats.cached, stats.pinned) >= 0, stats
        if self.num_steps % self.audit_every == 0:
            found = breach(self.pool)
            assert found is None, found


def started_at(times: Iterable[float], clients: Iterable[Client]) -> Iterator[tuple[float, Client]]:
    """Clients with their arrival times, until either ends."""
    return zip(times, clients, strict=False)
