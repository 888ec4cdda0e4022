"""What one step brought to one request, as messages to its client."""

from __future__ import annotations

from halogen_core.engine.generation import generation_of
from halogen_core.engine.protocol import GenerateRequest, TokenLogprobs, TokenOutput
from halogen_core.engine.runner import StepResult
from halogen_core.errors import HalogenError
from halogen_core.scheduler.sequence import Sequence as KVSequence


def refused(request: GenerateRequest, error: HalogenError) -> TokenOutput:
    """The only output of a request that was not taken."""
    text = f"{error.message} — {error.fix}" if error.fix else error.message
    return failed(request, error.code, text)


def failed(request: GenerateRequest, code: str, text: str) -> TokenOutput:
    """The last output of a request that cannot go on."""
    return TokenOutput(
        request_id=request.request_id, finish_reason="error", error_code=code, error=text
    )


def logprobs_of(result: StepResult, row: int, wanted: int) -> TokenLogprobs | None:
    """Log-probabilities of a row, with the `wanted` most likely tokens; None if none are wanted."""
    if wanted < 0 or result.logprobs is None:
        return None
    top_ids: list[int] = []
    top: list[float] = []
    if wanted and result.top_ids is not None and result.top_logprobs is not None:
        top_ids = result.top_ids[row, :wanted].tolist()
        top = result.top_logprobs[row, :wanted].tolist()
    return TokenLogprobs(
        token_id=int(result.token_ids[row]),
        logprob=float(result.logprobs[row]),
        top_ids=top_ids,
        top_logprobs=top,
    )


def prompt_logprobs(sequence: KVSequence) -> list[TokenLogprobs | None]:
    """Of every prompt token in order, with the first output if asked for; the first has none."""
    generation = generation_of(sequence)
    if not generation.request.prompt_logprobs or generation.reported:
        return []
    return [generation.prompt_logprobs.get(i) for i in range(sequence.num_prompt_tokens)]
