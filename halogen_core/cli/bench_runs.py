"""Measuring an engine: prompts, decoding and both at once, through the real step loop."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from halogen_core.engine.engine import Engine
from halogen_core.engine.protocol import GenerateRequest
from halogen_core.errors import EngineUnavailable

Clock = Callable[[], float]


@attrs.frozen(kw_only=True)
class Work:
    """What one measurement runs; lengths in tokens."""

    kind: str
    """`prefill`, `decode` or `mixed`."""
    batch: int
    prompt: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.batch} × ({self.prompt} in, {self.tokens} out)"


@attrs.frozen(kw_only=True)
class Run:
    """One run: the rate in tokens per second, and how it felt. Times in seconds."""

    rate: float
    ttft: tuple[float, ...]
    gaps: tuple[float, ...]


@attrs.frozen(kw_only=True)
class Measured:
    """All runs of a work."""

    work: Work
    runs: tuple[Run, ...]

    @property
    def rate(self) -> float:
        return statistics.median(run.rate for run in self.runs)

    @property
    def spread(self) -> float:
        """Highest less lowest rate, over the median."""
        rates = [run.rate for run in self.runs]
        return (max(rates) - min(rates)) / self.rate

    def report(self) -> dict[str, Any]:
        """As data; tail and throughput stand together."""
        gaps = sorted(gap for run in self.runs for gap in run.gaps)
        ttft = sorted(first for run in self.runs for first in run.ttft)
        found = {
            **attrs.asdict(self.work),
            "tok_s": self.rate,
            "spread": self.spread,
            "tok_s_runs": [run.rate for run in self.runs],
            "ttft_ms": {"p50": 1e3 * quantile(ttft, 0.5), "p99": 1e3 * quantile(ttft, 0.99)},
        }
        if gaps:
            found["itl_ms"] = {"p50": 1e3 * quantile(gaps, 0.5), "p99": 1e3 * quantile(gaps, 0.99)}
        if self.work.kind == "decode":
            found["consistent"] = self._consistent(gaps)
        return found

    def _consistent(self, gaps: Sequence[float]) -> bool:
        """Whether throughput is concurrency over time per token, within 15 %."""
        expected = self.work.batch / statistics.fmean(gaps)
        return abs(self.rate / expected - 1) <= 0.15


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the one at `share`."""
    return values[min(len(values) - 1, round(share * (len(values) - 1)))]


def measure(engine: Engine, work: Work, runs: int, *, clock: Clock = time.perf_counter) -> Measured:
    """One run to warm up and `runs` that count."""
    made = [_run(engine, work, seed, clock) for seed in range(runs + 1)]
    return Measured(work=work, runs=tuple(made[1:]))


def _run(engine: Engine, work: Work, seed: int, clock: Clock) -> Run:
    tokens = 1 if work.kind == "prefill" else work.tokens
    requests = [_request(engine, work.prompt, tokens, f"{seed}.{i}") for i in range(work.batch)]
    late: list[GenerateRequest] = []
    if work.kind == "mixed":
        # half of them arrive while the others decode
        late = requests[work.batch // 2 :]
        requests = requests[: work.batch // 2]
    times = _drive(engine, requests, late, clock)
    first = [stamps[1] - stamps[0] for stamps in times.values()]
    gaps = [b - a for stamps in times.values() for a, b in itertools.pairwise(stamps[1:])]
    return Run(rate=_rate(work, times), ttft=tuple(first), gaps=tuple(gaps))


def _rate(work: Work, times: dict[str, list[float]]) -> float:
    """Tokens per second; `times` as `_drive` returns them."""
    began = min(stamps[0] for stamps in times.values())
    end = max(stamps[-1] for stamps in times.values())
    if work.kind == "prefill":
        return work.batch * work.prompt / (end - began)
    if work.kind == "decode":
        # steady: from when everybody has a first token
        began = max(stamps[1] for stamps in times.values())
    return sum(t > began for stamps in times.values() for t in stamps[1:]) / (end - began)


def _drive(
    engine: Engine, requests: list[GenerateRequest], late: list[GenerateRequest], clock: Clock
) -> dict[str, list[float]]:
    """When each request came and when each of its tokens did; `late` ones join when all others
    have begun.
    """
    times = _submit(engine, requests, clock)
    while engine.has_work or late:
        for output in engine.step():
            if output.finish_reason == "error":
                raise EngineUnavailable(output.error, code=output.error_code or None)
            times[output.request_id] += [clock()] * len(output.token_ids)
        if late and all(len(stamps) > 1 for stamps in times.values()):
            times |= _submit(engine, late, clock)
            late = []
    return times


def _submit(
    engine: Engine, requests: list[GenerateRequest], clock: Clock
) -> dict[str, list[float]]:
    for request in requests:
        for refusal in engine.submit(request):
            raise EngineUnavailable(refusal.error, code=refusal.error_code or None)
    return {request.request_id: [clock()] for request in requests}


def _request(engine: Engine, prompt: int, tokens: int, name: str) -> GenerateRequest:
    rng = np.random.default_rng(list(name.encode()))
    ids = rng.integers(0, engine.info.vocab_size, prompt)
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=ids.tolist(),
        max_tokens=tokens,
        ignore_eos=True,
        use_prefix_cache=False,
    )
