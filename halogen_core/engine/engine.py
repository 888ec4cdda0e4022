"""The engine: takes requests, runs steps, gives tokens. One thread owns it (`EngineLoop`)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from halogen_core.engine.batch import Row, build_step
from halogen_core.engine.flight import Flight
from halogen_core.engine.generation import (
    check,
    finish_reason,
    generation_of,
    item_of,
    sequence_of,
    timings_of,
)
from halogen_core.engine.grammar import Grammars
from halogen_core.engine.measures import StepMeasures, memory_gauges
from halogen_core.engine.outputs import failed, logprobs_of, prompt_logprobs, refused
from halogen_core.engine.protocol import (
    EngineInfo,
    EngineStats,
    GenerateRequest,
    TokenLogprobs,
    TokenOutput,
)
from halogen_core.engine.runner import Runner, StepResult
from halogen_core.engine.snapshots import Snapshots
from halogen_core.errors import ConfigError, HalogenError, RequestError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.scheduler.sequence import Sequence as KVSequence
from halogen_core.spi import Adjustable, MemoryPlan

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Engine:
    """Continuous batching over one runner."""

    runner: Runner[Any]
    scheduler: Scheduler
    blocks: BlockPool
    info: EngineInfo
    snapshots: Snapshots
    grammars: Grammars
    end_token_ids: tuple[int, ...]
    plan: MemoryPlan
    load_s: float
    """Seconds that loading the weights took."""
    run_ahead: bool = True
    """Launch the next step while one runs, where the backend can."""
    clock: Callable[[], float] = time.monotonic
    _ids: itertools.count[int] = attrs.field(factory=itertools.count)
    _sequences: dict[str, KVSequence] = attrs.field(factory=dict)
    measures: StepMeasures = attrs.field(factory=StepMeasures)
    _steps: int = 0
    _wake: float | None = None
    _counters: dict[str, float] = attrs.field(factory=dict)
    _flight: Flight | None = None
    """The next step, launched already."""
    _late: Exception | None = None
    """What kept the next step from being launched; raised once this step's tokens are out."""
    _gone: list[TokenOutput] = attrs.field(factory=list)
    """Of sequences that the scheduler gave up."""

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self._flight is not None

    def next_wake(self) -> float | None:
        """Seconds until the scheduler wants to be asked again; None: now."""
        if self._wake is None or self._flight is not None:
            return None
        return max(0.0, self._wake - self.clock())

    def submit(self, request: GenerateRequest) -> list[TokenOutput]:
        """Queue a request; a refusal comes back as its only output."""
        now = self.clock()
        try:
            check(request, self.info)
            if request.request_id in self._sequences:
                raise RequestError(f"request id `{request.request_id}` is in use", code="HRT-4002")
            sequence = sequence_of(
                request,
                next(self._ids),
                grammar=self.grammars.start(request.grammar) if request.grammar else None,
                end_token_ids=self.end_token_ids,
                context_length=self.info.context_length,
                now=now,
            )
            self.scheduler.add(sequence)
        except HalogenError as exc:
            return [refused(request, exc)]
        self._sequences[request.request_id] = sequence
        self._wake = None
        return []

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks; unknown ids are fine (it may just have ended)."""
        if sequence := self._sequences.pop(request_id, None):
            self.scheduler.abort(sequence.seq_id)
            self._count("requests_cancelled", 1)

    def step(self) -> list[TokenOutput]:
        """Run one step and return what it brought; the next may be on its way by then."""
        if self._late is not None:
            late, self._late = self._late, None
            raise late
        flight = self._flight or self._launch()
        self._flight = None
        outputs = []
        if flight is not None:
            self._flight = self._follow(flight)
            outputs = self._take(flight)
        gone, self._gone = self._gone, []
        return gone + outputs

    def stats(self) -> EngineStats:
        """Counts and gauges now."""
        pool, backend = self.blocks.stats(), self.runner.backend
        telemetry = backend.counters()
        counters = {**telemetry.counters, **self.scheduler.counters(), **self._counters}
        counters["steps_captured"] = self.runner.captured_steps
        counters["steps_eager"] = self.runner.eager_steps
        return EngineStats(
            step=self._steps,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_active=pool.active,
            blocks_cached=pool.cached,
            blocks_pinned=pool.pinned,
            counters=counters,
            gauges={
                **telemetry.gauges,
                **self.scheduler.gauges(),
                **memory_gauges(self.plan, backend.memory()),
                "model_load_seconds": self.load_s,
            },
            histograms=self.measures.snapshot(),
        )

    def close(self) -> None:
        """Release the device."""
        self._flight = None
        self.runner.close()

    def save_cache(self, path: str) -> int:
        """Write the prefix cache to `path`; the number of blocks."""
        return self.snapshots.save(Path(path))

    def load_cache(self, path: str) -> int:
        """Read a prefix cache from `path`; the number of blocks. Raises for a foreign file."""
        return self.snapshots.load(Path(path))

    def adjust(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Change settings of the backend from the next step on; returns all with their values."""
        backend = self.runner.backend
        if not isinstance(backend, Adjustable):
            if not settings:
                return {}
            raise ConfigError(
                f"`{backend.capabilities().name}` has no settings that can change while it runs",
                code="HRT-3407",
            )
        for key, value in settings.items():
            backend.adjust(key, value)
        return dict(backend.adjustable())

    # -- one step

    def _launch(self, before: Flight | None = None) -> Flight | None:
        """Plan a step and give it to the device; None: there is nothing to do now."""
        began = time.perf_counter()
        plan = self.scheduler.schedule(self.clock())
        self.measures.schedule.add(time.perf_counter() - began)
        self._wake = plan.wait_until
        self._gone += [self._fail(seq, error.code, error.message) for seq, error in plan.expired]
        if not plan.items:
            return None
        if plan.copies:
            self.runner.backend.kv_copy(self.runner.kv, plan.copies)
        rows = before.rows() if before else {}
        now = self.clock()
        items = [item_of(*item, rows.get(item.seq, -1), now) for item in plan.items]
        tokens = before.launched.sampled.token_ids if before else None
        step = build_step(items, self.blocks.block_size, tokens)
        return Flight(plan, step, self.runner.launch(step.batch, step.shape))

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch the step after `flight` before its tokens are known, if that can be done."""
        if not (self.run_ahead and self.runner.runs_ahead and flight.can_be_followed):
            return None
        flight.assume(self.scheduler)
        try:
            return self._launch(flight)
        except Exception as exc:
            self._late = exc
            return None

    def _take(self, flight: Flight) -> list[TokenOutput]:
        """Wait for a step and hand out its tokens."""
        result = self.runner.wait(flight.launched)
        ran = time.perf_counter()
        shape = flight.step.shape
        self._steps += 1
        self._count("prompt_tokens", shape.prefill_tokens)
        outputs = self._outputs(flight, result)
        device = self.measures.prefill if shape.prefill_tokens else self.measures.decode
        device.add(result.seconds)
        self.measures.results.add(time.perf_counter() - ran)
        self.measures.tokens.add(flight.plan.num_tokens)
        return outputs

    # -- one step's results

    def _outputs(self, flight: Flight, result: StepResult) -> list[TokenOutput]:
        items = flight.plan.items
        picked: list[tuple[int, TokenLogprobs | None] | None] = [None] * len(items)
        for at, row in enumerate(flight.step.rows):
            sequence = items[row.item].seq
            if not self._is_open(sequence):
                continue
            logprobs = logprobs_of(result, at, generation_of(sequence).request.num_logprobs)
            if row.is_prompt:
                self._keep_prompt_logprob(sequence, row, logprobs)
            else:
                picked[row.item] = (int(result.token_ids[at]), logprobs)
        vocab = range(self.info.vocab_size)
        sampled = [[pick[0]] if pick and pick[0] in vocab else [] for pick in picked]
        flight.settle(self.scheduler, sampled)
        self._count("generation_tokens", sum(map(len, sampled)))
        outputs = []
        for item, pick, tokens in zip(items, picked, sampled, strict=True):
            if pick and tokens:
                outputs.append(self._output(item.seq, *pick))
            elif pick:
                outputs.append(self._fail(item.seq, "HRT-3004", "the model's output is not finite"))
        return outputs

    def _is_open(self, sequence: KVSequence) -> bool:
        """Whether somebody still waits for its tokens; it may have ended after this launch."""
        request_id = generation_of(sequence).request.request_id
        return self._sequences.get(request_id) is sequence

    def _output(
        self, sequence: KVSequence, token: int, logprobs: TokenLogprobs | None
    ) -> TokenOutput:
        generation = generation_of(sequence)
        generation.sampler.record(token)
        if generation.sampler.error:
            return self._fail(sequence, "HRT-4011", generation.sampler.error)
        now = self.clock()
        if generation.first_token is None:
            generation.first_token = now
        reason = finish_reason(sequence, token)
        if reason:
            self._end(sequence)
        output = TokenOutput(
            request_id=generation.request.request_id,
            token_ids=[token],
            logprobs=[logprobs] if logprobs else [],
            prompt_logprobs=prompt_logprobs(sequence),
            finish_reason=reason,
            stop_token_id=token if token in generation.end_tokens else None,
            cached_tokens=sequence.num_cached_tokens,
            timings=timings_of(generation, now) if reason else None,
        )
        generation.reported = True
        return output

    def _fail(self, sequence: KVSequence, code: str, text: str) -> TokenOutput:
        self._end(sequence)
        return failed(generation_of(sequence).request, code, text)

    def _end(self, sequence: KVSequence) -> None:
        self.scheduler.finish(sequence)
        self._sequences.pop(generation_of(sequence).request.request_id, None)

    def _keep_prompt_logprob(
        self, sequence: KVSequence, row: Row, logprobs: TokenLogprobs | None
    ) -> None:
        if logprobs:
            generation_of(sequence).prompt_logprobs[row.position] = logprobs

    def _count(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0) + amount
