"""Prompts as token ids, and the lengths that a request may have."""

from __future__ import annotations

import attrs

from halogen_core.errors import RequestError
from halogen_core.server.service import Service

LONGEST_TOKEN_BYTES = 128
"""No vocabulary has longer entries for text; bounds a prompt before it is tokenised."""


@attrs.frozen(kw_only=True)
class Prompt:
    """One prompt; `text` is what `echo` gives back."""

    token_ids: list[int]
    text: str


def encode_text(service: Service, text: str) -> Prompt:
    """Text as a prompt; runs in a worker thread."""
    refuse_huge_text(service, text, "prompt")
    return Prompt(token_ids=service.tokenizer.encode_prompt(text), text=text)


def refuse_huge_text(service: Service, text: str, param: str) -> None:
    """Raise for text that cannot fit however it is split, before any work is done on it."""
    limit = service.engine.info.context_length
    at_least = len(text) // LONGEST_TOKEN_BYTES
    if at_least > limit:
        raise context_exceeded(f"at least {at_least}", limit, param)


def context_exceeded(tokens: object, limit: int, param: str) -> RequestError:
    """The error for a prompt that does not fit; it is never cut.

    It begins with OpenAI's words, by which LiteLLM and others know it.
    """
    return RequestError(
        f"this model's maximum context length is {limit} tokens including at least one of the"
        f" answer; the prompt has {tokens}",
        param=param,
        code="HRT-4004",
        fix="shorten the prompt",
    )


def answer_length(service: Service, prompt_tokens: int, asked: int | None, param: str) -> int:
    """Tokens the answer may have: what was asked, cut at the end of the context.

    Raises `RequestError` (HRT-4004) when the prompt leaves no room for one token.
    """
    limit = service.engine.info.context_length
    longest_prompt = min(limit - 1, service.config.engine.max_prompt_len or limit)
    if prompt_tokens > longest_prompt:
        raise context_exceeded(prompt_tokens, longest_prompt + 1, param)
    if prompt_tokens == 0:
        raise RequestError("the prompt has no tokens", param=param, code="HRT-4003")
    room = limit - prompt_tokens
    bounds = [room if asked is None else min(asked, room), service.config.engine.max_decode_len]
    return min(bound for bound in bounds if bound is not None)
