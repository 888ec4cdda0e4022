"""One request inside the engine: what is checked first, remembered, and told at its end."""

from __future__ import annotations

import attrs

from halogen_core.engine.protocol import EngineInfo, GenerateRequest, Timings, TokenLogprobs
from halogen_core.engine.sampler import RowSampler
from halogen_core.errors import RequestError
from halogen_core.scheduler.sequence import Sequence as KVSequence


@attrs.define(eq=False)
class Generation:
    """What the engine remembers of one request beside its sequence."""

    request: GenerateRequest
    sampler: RowSampler
    end_tokens: frozenset[int]
    arrived: float
    started: float | None = None
    first_token: float | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = attrs.field(factory=dict)
    reported: bool = False


def check(request: GenerateRequest, info: EngineInfo) -> None:
    """Raises `RequestError` for what no engine with `info` could answer."""
    prompt, context = len(request.prompt_token_ids), info.context_length
    if not prompt:
        raise RequestError("the prompt has no tokens", param="prompt", code="HRT-4003")
    if prompt >= context:
        raise RequestError(
            f"the prompt has {prompt} tokens; this model's context holds {context}, answer"
            " included",
            param="prompt",
            code="HRT-4004",
            fix="shorten the prompt or raise --max-context",
        )
    worst = max(request.prompt_token_ids), min(request.prompt_token_ids)
    if worst[0] >= info.vocab_size or worst[1] < 0:
        raise RequestError(
            f"prompt holds a token outside 0 .. {info.vocab_size - 1}",
            param="prompt",
            code="HRT-4005",
        )


def generation_of(sequence: KVSequence) -> Generation:
    assert isinstance(sequence.payload, Generation)
    return sequence.payload


def timings_of(generation: Generation, now: float) -> Timings:
    started = generation.started if generation.started is not None else now
    first = generation.first_token if generation.first_token is not None else now
    return Timings(
        queued_s=started - generation.arrived,
        ttft_s=first - generation.arrived,
        total_s=now - generation.arrived,
    )
