"""Our metrics again under vLLM's names, for dashboards and gateways that know only those."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric, Sample

NAMES = {
    "halogen_requests_running": "vllm:num_requests_running",
    "halogen_requests_waiting": "vllm:num_requests_waiting",
    "halogen_cache_usage": "vllm:kv_cache_usage_perc",
    "halogen_prompt_tokens": "vllm:prompt_tokens",
    "halogen_generation_tokens": "vllm:generation_tokens",
    "halogen_preemptions": "vllm:num_preemptions",
    "halogen_prefix_cache_queries": "vllm:prefix_cache_queries",
    "halogen_prefix_cache_hits": "vllm:prefix_cache_hits",
    "halogen_requests": "vllm:request_success",
    "halogen_requests_rejected": "vllm:admission_rejections",
    "halogen_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "halogen_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "halogen_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "halogen_queue_time_seconds": "vllm:request_queue_time_seconds",
    "halogen_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "halogen_decode_time_seconds": "vllm:request_decode_time_seconds",
}
LABELS = {"finish_reason": "finished_reason"}


@attrs.frozen
class WithVllmNames:
    """A registry whose families appear twice where vLLM has a name for them."""

    registry: CollectorRegistry
    model: str

    def collect(self) -> Iterator[Metric]:
        """Every family, and its alias."""
        for metric in self.registry.collect():
            yield metric
            if name := NAMES.get(metric.name):
                alias = Metric(name, metric.documentation, metric.type)
                alias.samples = [self._renamed(s, metric.name, name) for s in metric.samples]
                yield alias

    def _renamed(self, sample: Sample, old: str, new: str) -> Sample:
        labels = {LABELS.get(key, key): value for key, value in sample.labels.items()}
        return Sample(
            new + sample.name.removeprefix(old),
            {"model_name": self.model, "engine": "0"} | labels,
            sample.value,
        )
