"""Refusals at the door, with the arithmetic: what can never run is not queued."""

from __future__ import annotations

import attrs

from halogen_core.errors import Overloaded, RequestError
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.sequence import Sequence

TOO_LONG_CODE = "HRT-4102"
NEVER_FITS_CODE = "HRT-4103"


@attrs.frozen
class Door:
    """Checks a sequence against the limits; constant time, whatever waits."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int

    def check(self, seq: Sequence, num_waiting: int, max_context: int | None) -> None:
        """Refuse `seq`, or cut its answer to `max_decode_len`; `max_context` is the device's.

        Raises `Overloaded` if the queue is full, `RequestError` if it can never run.
        """
        config = self.config
        if num_waiting >= config.max_queue:
            raise Overloaded(f"{num_waiting} requests wait; at most {config.max_queue} may")
        prompt = seq.num_prompt_tokens
        if config.max_prompt_len is not None and prompt > config.max_prompt_len:
            raise self._too_long(
                f"the prompt has {prompt} tokens; at most {config.max_prompt_len} are allowed",
                "shorten the prompt or raise --max-prompt-len",
            )
        if config.max_decode_len is not None:
            seq.max_new_tokens = min(seq.max_new_tokens, config.max_decode_len)
        self._check_capacity(seq, max_context)

    def _check_capacity(self, seq: Sequence, max_context: int | None) -> None:
        total, sum_text = seq.max_tokens, f"{seq.num_prompt_tokens} + {seq.max_new_tokens}"
        if max_context is not None and total > max_context:
            raise self._too_long(
                f"prompt and answer may come to {sum_text} = {total} tokens; the context holds"
                f" {max_context}",
                "shorten the prompt or ask for fewer tokens",
            )
        cap = self.config.max_total_tokens
        if cap is not None and total > cap:
            raise self._never_fits(
                f"prompt and answer may come to {sum_text} = {total} tokens;"
                f" `max_total_tokens` is {cap}",
                "ask for fewer tokens or raise --max-total-tokens",
            )
        blocks = -(-total // self.block_size)
        if blocks > self.num_blocks:
            raise self._never_fits(
                f"prompt and answer may come to {sum_text} = {total} tokens, that is {blocks}"
                f" blocks of {self.block_size}; the KV pool has {self.num_blocks}",
                "ask for fewer tokens or give the KV pool more memory",
            )

    def _too_long(self, message: str, fix: str) -> RequestError:
        return RequestError(message, param="messages", code=TOO_LONG_CODE, fix=fix)

    def _never_fits(self, message: str, fix: str) -> RequestError:
        return RequestError(message, param="max_tokens", code=NEVER_FITS_CODE, fix=fix)
