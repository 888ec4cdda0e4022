"""Limits and targets of the scheduler, checked once at start."""

from __future__ import annotations

import attrs

from halogen_core.errors import ConfigError

LIMITS_CODE = "HRT-4101"


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """What the scheduler keeps to. Times in seconds; None: no limit."""

    max_batch: int = 64
    """Sequences in one step (A8)."""
    max_batch_tokens: int = 2048
    """Tokens in one step (B4)."""
    max_queue: int = 256
    """Waiting sequences; more are refused."""
    max_prompt_len: int | None = None
    """Longest prompt in tokens (A9)."""
    max_decode_len: int | None = None
    """Longest answer in tokens; longer wishes are cut to it (A10)."""
    max_total_tokens: int | None = None
    """Tokens in the KV cache of all running sequences together (D3)."""
    tpot_target_s: float | None = None
    """Time per output token that prompts must not push running sequences beyond."""
    min_window_s: float = 0.0
    """Waits at least this long for company before a step (C9)."""
    max_window_s: float = 0.0
    """Waits at most this long while the device is busy with others (C10)."""
    prefill_timeout_s: float | None = None
    """A prompt that takes longer goes to the long lane (A13)."""
    fail_on_prefill_timeout: bool = False
    """Refuse such a prompt instead."""
    queue_timeout_s: float | None = None
    """A request that waits longer is given up with a reason."""
    long_prompt_tokens: int | None = None
    """Prompts longer than this take the long lane (A14)."""
    long_lane_share: float = 0.5
    """Share of the steps that the long lane gets while others have work."""
    long_patience_s: float = 2.0
    """A long prompt that blocks are kept from for longer stops others from taking more."""
    max_preemptions: int = 3
    """After so many, a sequence is let in again only with all the blocks it can ever need."""
    headroom: float = 0.01
    """Share of the pool left free when a sequence is let in, for those that run to grow."""

    def __attrs_post_init__(self) -> None:
        for name in ("max_batch", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; it must be at least 1")
        if self.max_batch_tokens < self.max_batch:
            raise ConfigError(
                f"`max_batch_tokens` is {self.max_batch_tokens} and `max_batch` is"
                f" {self.max_batch}; each running sequence needs a token in every step",
                code=LIMITS_CODE,
                fix=f"raise --max-batch-tokens to {self.max_batch} or lower --max-batch",
            )
        if self.min_window_s > self.max_window_s > 0:
            raise ConfigError(
                f"`min_batch_window_ms` is {self.min_window_s * 1e3:g} and"
                f" `max_batch_window_ms` is {self.max_window_s * 1e3:g}; the floor exceeds the cap",
                code=LIMITS_CODE,
                fix="lower --min-batch-window-ms or raise --max-batch-window-ms",
            )
        self._check_lengths()

    def _check_lengths(self) -> None:
        total, prompt = self.max_total_tokens, self.max_prompt_len
        if total is not None and prompt is not None and prompt >= total:
            raise ConfigError(
                f"`max_prompt_len` is {prompt} and `max_total_tokens` is {total}; the longest"
                " prompt would leave no token for an answer",
                code=LIMITS_CODE,
                fix=f"raise --max-total-tokens above {prompt} or lower --max-prompt-len",
            )
        if self.fail_on_prefill_timeout and self.prefill_timeout_s is None:
            raise ConfigError(
                "`fail_on_prefill_timeout` is on without a `prefill_timeout_ms` to exceed",
                code=LIMITS_CODE,
                fix="set --prefill-timeout-ms, or leave --fail-on-prefill-timeout off",
            )
        if not 0 < self.long_lane_share <= 1:
            raise ConfigError(
                f"`long_lane_share` is {self.long_lane_share:g}; it must be above 0 and at most 1",
                code=LIMITS_CODE,
            )
