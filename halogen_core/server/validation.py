"""From a body to what the engine understands; everything wrong is a `RequestError` with a name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from halogen_core.engine.protocol import SamplingParams
from halogen_core.errors import ConfigError, RequestError
from halogen_core.scheduler.policies import priority_of
from halogen_core.server.openai_models import (
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
)

Body = TypeVar("Body")

NOTHING: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "dry_multiplier": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Fields that ask for what this version does not do, and their values that ask for nothing."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_AT = re.compile(r" - at (?:`\w+` in )?`\$\.?(.*?)`$")
_FIELD = re.compile(r"field `(\w+)`")


def decode(kind: type[Body], raw: bytes) -> Body:
    """A body of a kind; raises `RequestError` with the field at fault."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        text = str(exc)
        place, field = _AT.search(text), _FIELD.search(text)
        path = place[1] if place else ""
        param = path.partition("[")[0].partition(".")[0] or (field[1] if field else None)
        where = f"`{path}`: " if path else ""
        raise RequestError(where + _AT.sub("", text), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the body is not valid JSON: {exc}", code="HRT-4006") from None


def refuse_unsupported(body: GenerationBody) -> None:
    """Raise for a field that asks for what this version does not do."""
    for name, nothing in NOTHING.items():
        value = getattr(body, name, None)
        if value is not None and value not in nothing:
            raise RequestError(
                f"`{name}` is not supported by this version",
                param=name,
                code="HRT-4008",
                fix="leave it out",
            )


def sampling_params(body: GenerationBody, vocab_size: int, choice: int) -> SamplingParams:
    """How choice number `choice` of a request picks its tokens."""
    bias = body.logit_bias or {}
    for token in bias:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"`logit_bias` names token {token}, the vocabulary has {vocab_size}",
                param="logit_bias",
            )
    seed = None if body.seed is None else (body.seed + choice) % 2**63
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        seed=seed,
    )


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """The stop strings; empty ones stop nothing."""
    stop = body.stop or ()
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s)


def priority(body: GenerationBody) -> int:
    """A number or a label (C7); raises `RequestError` with the labels there are."""
    value = 0 if body.priority is None else body.priority
    try:
        return priority_of(value if isinstance(value, int) else value[:32])
    except ConfigError as exc:
        raise RequestError(exc.message, param="priority", code=exc.code) from None


def num_logprobs(body: ChatBody | CompletionBody) -> int:
    """-1: none, 0: of the chosen token, n: also the n most likely."""
    if isinstance(body, CompletionBody):
        return -1 if body.logprobs is None else body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else -1


def engine_fields(body: GenerationBody) -> dict[str, Any]:
    """Fields of a `GenerateRequest` that a body sets as they are."""
    return {
        "min_tokens": body.min_tokens or 0,
        "stop_token_ids": body.stop_token_ids or [],
        "ignore_eos": bool(body.ignore_eos),
        "priority": priority(body),
        "session": body.session_id or body.user or "",
        "cache_salt": body.cache_salt or "",
        "use_prefix_cache": body.cache_prompt is not False,
    }


def chunk_usage(body: GenerationBody, usage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The `usage` field of a chunk before the last: null, or running where asked for."""
    options = body.stream_options
    if not options or not (options.include_usage or options.continuous_usage_stats):
        return {}
    return {"usage": usage() if options.continuous_usage_stats else None}


def template_messages(messages: list[Message], template: str) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content is text, `developer` is `system`.

    Raises `RequestError` for a role that neither OpenAI nor the model's template knows: many
    templates would take a misspelt one silently.
    """
    found = []
    for message in messages:
        _check_role(message.role, template)
        row: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content(message),
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                row[name] = value
        if message.tool_calls:
            row["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
        found.append(row)
    return found


def _check_role(role: str, template: str) -> None:
    if role in ROLES or f'"{role}"' in template or f"'{role}'" in template:
        return
    raise RequestError(
        f"`role` is `{role}`; allowed are {', '.join(ROLES)}, and what the model's template names",
        param="messages",
    )


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call of an earlier turn as templates want it: arguments are data, not JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(
            "`messages` holds a tool call whose `arguments` are no JSON", param="messages"
        ) from None
    return call | {"function": function | {"arguments": arguments}}


def _content(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text"):
            raise RequestError(
                f"content of type `{part.type[:32]}` is not supported, only text",
                param="messages",
                code="HRT-4008",
            )
    return "".join(part.text or "" for part in message.content)


def split_prompts(prompt: str | list[Any], vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completion request, each text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(item) is int for item in prompt):
        prompts: list[Any] = [prompt]
    else:
        prompts = prompt
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(
            f"`prompt` holds {len(prompts)} prompts, at least 1 and at most {MAX_PROMPTS} may be",
            param="prompt",
        )
    return [_checked_prompt(item, vocab_size) for item in prompts]


def _checked_prompt(prompt: Any, vocab_size: int) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        check_tokens(prompt, vocab_size, "prompt")
        return prompt
    raise RequestError(
        "`prompt` must be text, a list of token ids, or a list of either", param="prompt"
    )


def check_tokens(tokens: list[int], vocab_size: int, param: str) -> None:
    """Raise for a token id outside of the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"`{param}` has token id {token}, the vocabulary has {vocab_size}",
                param=param,
                code="HRT-4005",
            )
