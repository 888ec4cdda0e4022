"""What crosses between a server and its engine process: msgpack structs, never pickle."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request picks tokens, neutral by default; checked where it comes in."""

    temperature: float = 0.0
    """0: greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: drawn by the engine, reported nowhere."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. Stop strings are the client's business (it sees text)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 16
    min_tokens: int = 0
    """End tokens are not sampled before this many."""
    stop_token_ids: list[int] = []
    """Beside the model's own end tokens."""
    ignore_eos: bool = False
    num_logprobs: int = -1
    """-1: none, 0: of the chosen token, n: also the n most likely."""
    grammar: str = ""
    """What the answer must match, in llguidance's notation; empty: anything."""
    prompt_logprobs: bool = False
    """Also report log-probabilities of the prompt's tokens (`echo`)."""
    priority: int = 0
    """Higher is sooner."""
    session: str = ""
    """Pin and fairness key (`user`, `session_id`)."""
    cache_salt: str = ""
    """Requests share cached prefixes only within a salt."""
    use_prefix_cache: bool = True


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one finished request, seconds since it arrived (monotonic clock)."""

    queued_s: float
    ttft_s: float
    total_s: float


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request; the last one carries `finish_reason`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    """Once, with the first output; the first prompt token has none."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_token_id: int | None = None
    error_code: str = ""
    error: str = ""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    timings: Timings | None = None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How many values were at most each bound, and more than the one before it."""

    bounds: list[float]
    counts: list[int]
    """One more than `bounds`: the last counts what exceeds all."""
    total: float
    """Sum of the values."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for `/ready`, `/metrics` and `halogen run --json`."""

    step: int
    """Steps done; an engine with work whose step stands still hangs."""
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_active: int
    blocks_cached: int
    blocks_pinned: int = 0
    counters: dict[str, float] = {}
    """By metric name without prefix and suffix; labels follow in braces: `name{key=value}`."""
    gauges: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, said once when it is ready."""

    model_id: str
    architecture: str
    model_path: str
    content_id: str
    vocab_size: int
    context_length: int
    """Tokens a sequence may hold, prompt and answer."""
    backend: str
    device: str
    block_size: int
    num_blocks: int
    kv_dtype: str
    placement: dict[str, str] = {}
    """Op -> `native`/`fallback` and by what."""
    reasons: list[str] = []
    """The memory plan's arithmetic and notable choices."""
