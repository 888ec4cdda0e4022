"""One request inside the engine: what is checked first, remembered, and told at its end."""

from __future__ import annotations

import secrets

import attrs

from halogen_core.engine.batch import BatchItem
from halogen_core.engine.grammar import AnswerGrammar
from halogen_core.engine.protocol import EngineInfo, GenerateRequest, Timings, TokenLogprobs
from halogen_core.engine.sampler import RowSampler
from halogen_core.errors import RequestError
from halogen_core.kv.salt import cache_salt
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


def sequence_of(
    request: GenerateRequest,
    seq_id: int,
    *,
    grammar: AnswerGrammar | None,
    end_token_ids: tuple[int, ...],
    context_length: int,
    now: float,
) -> KVSequence:
    """The sequence of a checked request; `end_token_ids` are the model's."""
    ends = frozenset(() if request.ignore_eos else end_token_ids)
    ends |= frozenset(request.stop_token_ids)
    sampler = RowSampler.start(
        request.sampling,
        request.prompt_token_ids,
        seed=secrets.randbits(64),
        end_token_ids=ends,
        min_tokens=request.min_tokens,
        num_logprobs=request.num_logprobs,
        grammar=grammar,
    )
    prompt = list(request.prompt_token_ids)
    return KVSequence(
        seq_id=seq_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_new_tokens=min(request.max_tokens, context_length - len(prompt)),
        salt=cache_salt(tenant=request.cache_salt),
        priority=request.priority,
        session=request.session,
        arrival=now,
        # log-probabilities of the prompt need its logits, which cached blocks do not have
        use_prefix_cache=request.use_prefix_cache and not request.prompt_logprobs,
        payload=Generation(request, sampler, ends, now),
    )


def item_of(sequence: KVSequence, count: int, samples: bool, carried: int, now: float) -> BatchItem:
    """A sequence's share of a step that is launched now."""
    generation = generation_of(sequence)
    if generation.started is None:
        generation.started = now
    wants = generation.request.prompt_logprobs and not generation.reported
    return BatchItem(
        token_ids=sequence.token_ids,
        start=sequence.num_computed_tokens,
        count=count,
        block_table=sequence.block_table,
        sampler=generation.sampler,
        samples=samples,
        prompt_logprobs=sequence.num_prompt_tokens if wants else 0,
        carried=carried,
    )


def generation_of(sequence: KVSequence) -> Generation:
    assert isinstance(sequence.payload, Generation)
    return sequence.payload


def finish_reason(sequence: KVSequence, token: int) -> str | None:
    """Why the answer is over with `token`, which was recorded; None: it is not."""
    generation = generation_of(sequence)
    if token in generation.end_tokens or generation.sampler.complete:
        return "stop"
    return "length" if generation.sampler.num_generated >= sequence.max_new_tokens else None


def timings_of(generation: Generation, now: float) -> Timings:
    started = generation.started if generation.started is not None else now
    first = generation.first_token if generation.first_token is not None else now
    return Timings(
        queued_s=started - generation.arrived,
        ttft_s=first - generation.arrived,
        total_s=now - generation.arrived,
    )
