"""Runs steps: captured where the backend can, eager where it cannot; one synchronisation each."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Generic

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.models import Decoder
from halogen_core.spi import (
    Array,
    Backend,
    KVCache,
    Replay,
    RunsAhead,
    Sampled,
    StepBatch,
    StepMeta,
    StepShape,
)


@attrs.frozen(kw_only=True, eq=False)
class StepResult:
    """What a step picked, on the host; rows as in `StepBatch.logit_rows`."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    seconds: float = 0.0
    """From its launch, or from the end of the step before it if that was later."""


@attrs.frozen(kw_only=True, eq=False)
class Launched(Generic[Array]):
    """A step that was given to the device."""

    shape: StepShape
    began: float
    sampled: Sampled[Array]
    """On the device."""
    fetch: Callable[[], Sampled[NDArray[Any]]]
    """Waits for it."""


class Runner(Generic[Array]):
    """A decoder on a backend with its KV cache."""

    def __init__(self, backend: Backend[Array], decoder: Decoder[Array], kv: KVCache) -> None:
        self.backend = backend
        self.decoder = decoder
        self.kv = kv
        self._replays: dict[Hashable, Replay[Array] | None] = {}
        self.captured_steps = 0
        self.eager_steps = 0
        self._last_end = 0.0

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it was waited for."""
        return isinstance(self.backend, RunsAhead)

    def step(self, batch: StepBatch, shape: StepShape) -> StepResult:
        """Run one step and wait for its tokens."""
        return self.wait(self.launch(batch, shape))

    def launch(self, batch: StepBatch, shape: StepShape) -> Launched[Array]:
        """Give a step to the device. Who launches another before waiting asks `runs_ahead`."""
        began = time.perf_counter()
        replay = self._replay(batch)
        if replay is None:
            self.eager_steps += 1
            sampled = self._forward(self.backend.upload_step(batch))
        else:
            self.captured_steps += 1
            sampled = replay(batch)
        return Launched(shape=shape, began=began, sampled=sampled, fetch=self._fetch(sampled))

    def wait(self, launched: Launched[Array]) -> StepResult:
        """The tokens of a step; its time teaches the backend's cost model."""
        host = launched.fetch()
        now = time.perf_counter()
        seconds = now - max(launched.began, self._last_end)
        self._last_end = now
        self.backend.observe(launched.shape, seconds)
        return StepResult(
            token_ids=host.token_ids,
            logprobs=host.logprobs,
            top_ids=host.top_ids,
            top_logprobs=host.top_logprobs,
            seconds=seconds,
        )

    def logits(self, batch: StepBatch) -> NDArray[Any]:
        """The logits [R, V] float32 of a step, run eagerly; for evaluation and tests."""
        return self.backend.download(
            self.decoder.logits(self.backend.ops, self.backend.upload_step(batch), self.kv)
        )

    def close(self) -> None:
        """Let go of captured steps and the device."""
        self._replays.clear()
        self.backend.close()

    def _forward(self, meta: StepMeta[Array]) -> Sampled[Array]:
        ops = self.backend.ops
        return ops.sample(self.decoder.logits(ops, meta, self.kv), meta)

    def _replay(self, batch: StepBatch) -> Replay[Array] | None:
        key = self.backend.capture_key(batch)
        if key is None:
            return None
        if key not in self._replays:
            self._replays[key] = self.backend.capture(self._forward, batch)
        return self._replays[key]

    def _fetch(self, sampled: Sampled[Array]) -> Callable[[], Sampled[NDArray[Any]]]:
        backend = self.backend
        if isinstance(backend, RunsAhead):
            return backend.fetch(sampled)

        def host(array: Array | None) -> Any:
            return None if array is None else backend.download(array)

        return lambda: Sampled(
            token_ids=backend.download(sampled.token_ids),
            logprobs=host(sampled.logprobs),
            top_ids=host(sampled.top_ids),
            top_logprobs=host(sampled.top_logprobs),
        )
