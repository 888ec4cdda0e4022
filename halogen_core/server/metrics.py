"""Prometheus metrics of the server; names and meanings are in docs/reference/metrics.md."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TypeVar

import attrs
import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from halogen_core import __version__
from halogen_core.engine.protocol import EngineInfo, EngineStats, GenerateRequest
from halogen_core.engine.text import TextDelta
from halogen_core.server.metrics_vllm import WithVllmNames

log = logging.getLogger(__name__)

T = TypeVar("T")

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
COUNTED_HERE = frozenset(
    {
        *("requests", "requests_cancelled", "requests_rejected", "requests_running"),
        *("requests_waiting", "errors", "http_responses", "prompt_tokens", "generation_tokens"),
        *("steps", "cache_usage", "kv_cache_usage_ratio", "kv_blocks", "ready", "model_info"),
        *("process_memory_bytes",),
    }
)
"""Names that mean something else when the engine counts (it sees no cached prompt tokens)."""
GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """The server's own counters, and the engine's at the moment of a scrape."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "halogen_requests",
            "Sequences that ended, by reason",
            ["finish_reason"],
            registry=registry,
        )
        self.responses = Counter(
            "halogen_http_responses", "HTTP responses by status", ["code"], registry=registry
        )
        self.errors = Counter(
            "halogen_errors", "Errors by HRT code", ["hrt_code"], registry=registry
        )
        self.rejected = Counter(
            "halogen_requests_rejected", "Requests refused", ["reason"], registry=registry
        )
        self.cancelled = Counter(
            "halogen_requests_cancelled",
            "Sequences whose client went away",
            ["phase"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "halogen_prompt_tokens", "Tokens of prompts", registry=registry
        )
        self.generation_tokens = Counter(
            "halogen_generation_tokens", "Tokens generated", registry=registry
        )
        self.first_token = _histogram(
            registry, "halogen_time_to_first_token_seconds", "Arrival to first token"
        )
        self.gap = _histogram(
            registry, "halogen_inter_token_latency_seconds", "Between two tokens", GAP
        )
        self.duration = _histogram(
            registry, "halogen_request_duration_seconds", "Arrival to last token"
        )
        self.queued = _histogram(
            registry, "halogen_queue_time_seconds", "Arrival to first scheduled"
        )
        self.prefill = _histogram(
            registry, "halogen_prefill_time_seconds", "First scheduled to first token"
        )
        self.decode = _histogram(
            registry, "halogen_decode_time_seconds", "First token to last token"
        )
        self.grammar = _histogram(
            registry, "halogen_grammar_compile_seconds", "CPU time of a structured answer's grammar"
        )
        self.ready = Gauge("halogen_ready", "1 while the engine loop answers", registry=registry)
        self.engine = _EngineCollector()
        registry.register(self.engine)

    def watch(self, request: GenerateRequest, began: float) -> Watch:
        """Follow one sequence that arrived at `began` (monotonic)."""
        self.prompt_tokens.inc(len(request.prompt_token_ids))
        return Watch(metrics=self, request=request, began=began)

    def exposition(
        self, info: EngineInfo | None, stats: EngineStats | None, *, vllm_model: str | None = None
    ) -> bytes:
        """The text format 0.0.4; with `vllm_model` also under vLLM's names."""
        self.ready.set(stats is not None)
        self.engine.info, self.engine.stats = info, stats
        source = WithVllmNames(self.registry, vllm_model) if vllm_model else self.registry
        text: bytes = generate_latest(source)
        return text


@attrs.define(kw_only=True)
class Watch:
    """Times and counts of one sequence."""

    metrics: Metrics
    request: GenerateRequest
    began: float
    tokens: int = 0
    first: float | None = None
    last: float = 0.0

    def delta(self, delta: TextDelta) -> None:
        """Account for new tokens, and for the end."""
        now, tokens = time.monotonic(), len(delta.token_ids)
        if tokens and self.first is None:
            self.first = now
            self.metrics.first_token.observe(now - self.began)
        elif tokens:
            for _ in range(tokens):
                self.metrics.gap.observe((now - self.last) / tokens)
        self.last = now
        self.tokens += tokens
        self.metrics.generation_tokens.inc(tokens)
        if delta.finish_reason is not None:
            self._end(delta, now)

    def cancelled(self) -> None:
        """The client went away."""
        log.info("%s: client went away after %d tokens", self.request.request_id, self.tokens)
        self.metrics.cancelled.labels("prefill" if self.first is None else "decode").inc()

    def _end(self, delta: TextDelta, now: float) -> None:
        log.info(
            "%s: %s, prompt %d tokens (%d cached), answer %d, first token %.3f s, total %.3f s",
            self.request.request_id,
            delta.finish_reason,
            len(self.request.prompt_token_ids),
            delta.cached_tokens,
            self.tokens,
            (self.first or now) - self.began,
            now - self.began,
        )
        self.metrics.requests.labels(delta.finish_reason).inc()
        self.metrics.duration.observe(now - self.began)
        self.metrics.decode.observe(now - (self.first or now))
        if (timings := delta.timings) is not None:
            self.metrics.queued.observe(timings.queued_s)
            self.metrics.prefill.observe(max(0.0, timings.ttft_s - timings.queued_s))


class _EngineCollector:
    """Turns the last snapshot of the engine into metric families."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from _process_memory()
        if (info := self.info) is not None:
            labels = ["model", "version", "backend", "device", "kv_dtype", "halogen"]
            about = GaugeMetricFamily("halogen_model_info", "What is served", labels=labels)
            values = (info.model_id, info.content_id[:12], info.backend, info.device, info.kv_dtype)
            about.add_metric([*values, __version__], 1)
            yield about
        if (stats := self.stats) is not None:
            yield from _engine_families(stats)


def _engine_families(stats: EngineStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("halogen_requests_running", "Sequences in steps", stats.running)
    yield GaugeMetricFamily("halogen_requests_waiting", "Sequences that wait", stats.waiting)
    blocks = GaugeMetricFamily("halogen_kv_blocks", "KV blocks by state", labels=["state"])
    for state in ("free", "active", "cached", "pinned"):
        blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
    yield blocks
    used = stats.blocks_active / stats.blocks_total if stats.blocks_total else 0.0
    for name in ("halogen_cache_usage", "halogen_kv_cache_usage_ratio"):
        yield GaugeMetricFamily(name, "KV blocks in use, 0 to 1", used)
    yield CounterMetricFamily("halogen_steps", "Steps done by the engine", stats.step)
    yield from _families(CounterMetricFamily, stats.counters)
    yield from _families(GaugeMetricFamily, stats.gauges)
    for name, (labels, members) in _by_name(stats.histograms).items():
        family = HistogramMetricFamily(name, "Of the engine", labels=labels)
        for values, histogram in members:
            sums = accumulate(histogram.counts)
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            family.add_metric(values, list(zip(bounds, sums, strict=True)), histogram.total)
        yield family


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], values: Mapping[str, float]
) -> Iterable[Metric]:
    for name, (labels, members) in _by_name(values).items():
        family = kind(name, "Of the engine", labels=labels)
        for label_values, value in members:
            family.add_metric(label_values, value)
        yield family


def _by_name(values: Mapping[str, T]) -> dict[str, tuple[list[str], list[tuple[list[str], T]]]]:
    """Metric name -> (label names, (label values, value) of each member)."""
    found: dict[str, tuple[list[str], list[tuple[list[str], T]]]] = {}
    for key, value in values.items():
        name, _, inside = key.partition("{")
        pairs = [pair.partition("=") for pair in inside.rstrip("}").split(",") if pair]
        labels, members = found.setdefault(engine_name(name), ([k for k, _, _ in pairs], []))
        if labels == [k for k, _, _ in pairs]:  # else a plugin's slip: no reason to lose the page
            members.append(([v for _, _, v in pairs], value))
    return found


def engine_name(name: str) -> str:
    """The metric name of an engine's own counter; those that the server counts too stay apart."""
    clean = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    clean = clean.removeprefix("halogen_").removesuffix("_total")
    return f"halogen_engine_{clean}" if clean in COUNTED_HERE else f"halogen_{clean}"


def _process_memory() -> Iterable[Metric]:
    memory = psutil.Process().memory_full_info()
    family = GaugeMetricFamily(
        "halogen_process_memory_bytes", "Memory of the server process", labels=["kind"]
    )
    for kind in ("rss", "uss", "swap"):
        family.add_metric([kind], getattr(memory, kind, 0))
    yield family


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...] = LATENCY
) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=registry)
