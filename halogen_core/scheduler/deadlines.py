"""What is given up or moved aside because it takes too long, with the reason."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from halogen_core.errors import RequestError
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.queue import WaitingQueue
from halogen_core.scheduler.sequence import Lane, Sequence, Status

PREFILL_TIMEOUT_CODE = "HRT-4104"
QUEUE_TIMEOUT_CODE = "HRT-4105"


@attrs.define(eq=False)
class Deadlines:
    """`prefill_timeout_s` and `queue_timeout_s`, and who ran into them in this step."""

    config: SchedulerConfig
    expired: list[tuple[Sequence, RequestError]] = attrs.field(factory=list, init=False)
    num_prefill: int = attrs.field(default=0, init=False)
    num_queue: int = attrs.field(default=0, init=False)

    def prefill_over(self, seq: Sequence, now: float) -> bool:
        """Whether the first prefill of `seq` took too long: to the long lane or out with it."""
        timeout, began = self.config.prefill_timeout_s, seq.prefill_began
        if timeout is None or began is None or now - began <= timeout:
            return False
        if seq.lane is Lane.LONG or seq.num_generated or seq.status is not Status.RUNNING:
            return False
        self.num_prefill += 1
        if self.config.fail_on_prefill_timeout:
            self.expired.append((seq, _prefill_error(seq, now - began, timeout)))
        else:
            seq.lane = Lane.LONG
        return True

    def waited_too_long(self, queues: Iterable[WaitingQueue], now: float) -> list[Sequence]:
        """Those that waited longer than `queue_timeout_s`; linear in their number."""
        timeout = self.config.queue_timeout_s
        found: list[Sequence] = []
        for queue in queues if timeout is not None else ():
            for seq in queue.by_age():
                if timeout is None or now - seq.arrival <= timeout:
                    break
                if seq.started is None:
                    found.append(seq)
        self.num_queue += len(found)
        self.expired += [(seq, _queue_error(seq, now)) for seq in found]
        return found


def _prefill_error(seq: Sequence, elapsed: float, timeout: float) -> RequestError:
    return RequestError(
        f"after {elapsed * 1e3:.0f} ms {seq.num_computed_tokens} of {seq.num_prompt_tokens} prompt"
        f" tokens are computed; `prefill_timeout_ms` is {timeout * 1e3:g}",
        code=PREFILL_TIMEOUT_CODE,
        fix="shorten the prompt, raise --prefill-timeout-ms or use the long lane",
    )


def _queue_error(seq: Sequence, now: float) -> RequestError:
    return RequestError(
        f"the request waited {now - seq.arrival:.1f} s for a place among the running sequences",
        code=QUEUE_TIMEOUT_CODE,
        fix="retry later, or give the server more memory or a larger --max-batch",
    )
