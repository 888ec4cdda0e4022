"""Request bodies of the OpenAI API as msgspec structs, with what others added to it.

Unknown fields are ignored, as every client sends some; known ones that we cannot honour are
refused in `validation.py`, never dropped. Null means: not given.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from halogen_core.engine.sampling_ranges import (
    MAX_LOGIT_BIAS,
    LogitBias,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)

MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_MESSAGES = 10_000
MAX_PROMPTS = 128
MAX_TOOLS = 128
MAX_TOKENS = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Key = Annotated[str, Meta(max_length=256)]
Schema = dict[str, Any]
StopText = Annotated[str, Meta(max_length=MAX_STOP_BYTES)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What to add to a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(msgspec.Struct, kw_only=True):
    """OpenAI's `response_format.json_schema`; always enforced, `strict` or not."""

    name: str | None = None
    schema: Schema | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What form an answer has to have; `schema` beside `json_object` is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's form of the same; one of them."""

    json: str | Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that chat and text completion share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Key | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | str | None = None
    user: Key | None = None
    session_id: Key | None = None

    response_format: ResponseFormat | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: str | Schema | None = None

    # known of vLLM and llama.cpp, and refused unless they ask for nothing (`validation.NOTHING`)
    allowed_token_ids: Any = None
    bad_words: Any = None
    dry_multiplier: Any = None
    include_stop_str_in_output: Any = None
    mirostat: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: Any = None
    use_beam_search: Any = None
    xtc_probability: Any = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message; only text is read."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(max_length=32)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """A function that a model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One tool of a conversation."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None

    # as above
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions; a prompt is text or token ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    suffix: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages to render first."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]
    model: str | None = None
