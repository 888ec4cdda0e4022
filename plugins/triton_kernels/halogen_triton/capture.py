"""Captured steps: one CUDA or HIP graph per bucket, inputs updated in place.

A bucket holds steps that decode, a token for each sequence, or steps that compute the last tokens
of one short prompt, whose many launches would take the host longer than the device.

All inputs of a bucket lie in one device buffer that one copy from pinned memory fills; then the
host makes one launch for the whole step, sampling included. Tokens that the step before picked are
taken from the device, so that step may still run. What pads a step to its bucket lives in the trash
block: sequences of one token, or one sequence of all the tokens that a prompt leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi import Sampled, SamplingBatch, StepBatch, StepMeta, TorchBackend
from halogen_triton.sampling import FIELDS, draw_tensors, is_plain

PROMPTS = (32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Tokens of a captured step that computes a prompt."""
PROMPT_USES = 2
"""A prompt's bucket is captured when it was met so often before: capturing takes three steps."""
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RUNS = 3
"""How often capturing calls the step: to compile, to settle, to record."""
_APART = (*FIELDS, "mask", "carried")
"""Inputs that are no fields of `StepBatch`."""
TABLE_WIDTHS = (32, 256, 2048, 16384, 131072)


@attrs.frozen
class CaptureKey:
    """What a captured step is good for."""

    rows: int
    """Sequences, those that pad included."""
    table_width: int
    samples: bool
    """Some row is not greedy."""
    flash: bool
    mask_words: int = 0
    """Of 32 bits each, which tokens grammars allow; 0: all are allowed."""
    prompt: int = 0
    """Tokens of one prompt, those that pad included; 0: every sequence decodes one."""

    @property
    def tokens(self) -> int:
        return self.prompt or self.rows

    @property
    def picks(self) -> int:
        """Tokens that the step picks."""
        return 1 if self.prompt else self.rows


def capture_key(
    batch: StepBatch, flash_threshold: int, buckets: Sequence[int] = BUCKETS
) -> CaptureKey | None:
    """The bucket of a step that only decodes or ends one short prompt; None: run it eagerly."""
    rows, width = batch.num_sequences, batch.block_tables.shape[1]
    if width > TABLE_WIDTHS[-1] or not is_plain(batch.sampling):
        return None
    if 0 < rows <= buckets[-1] and batch.num_tokens == rows == len(batch.logit_rows):
        sequences, prompt = next(b for b in buckets if b >= rows), 0
    elif rows == len(batch.logit_rows) == 1 and (prompt := _prompt_bucket(batch.num_tokens)):
        sequences = 2
    else:
        return None
    return CaptureKey(
        rows=sequences,
        table_width=next(w for w in TABLE_WIDTHS if w >= width),
        samples=not batch.sampling.all_greedy,
        flash=batch.max_seq_len > flash_threshold,
        mask_words=0 if batch.sampling.mask is None else batch.sampling.mask.shape[1],
        prompt=prompt,
    )


def _prompt_bucket(tokens: int) -> int:
    """0: there is none. A padding sequence of one token would be one that decodes, so none has."""
    return next((n for n in PROMPTS if n == tokens or n >= tokens + 2), 0)


class StaticInputs:
    """Host and device views of one bucket's inputs, packed into one buffer each."""

    def __init__(
        self, key: CaptureKey, trash_slot: int, block_size: int, device: torch.device
    ) -> None:
        self._key = key
        tokens, rows, picks = (key.tokens,), (key.rows,), (key.picks,)
        fields: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "slot_mapping": (np.int64, tokens),
            "token_ids": (np.int32, tokens),
            "positions": (np.int32, tokens),
            "carried": (np.int32, tokens),
            "query_start_loc": (np.int32, (key.rows + 1,)),
            "seq_lens": (np.int32, rows),
            "block_tables": (np.int32, (*rows, key.table_width)),
            "logit_rows": (np.int32, picks),
        }
        for name in FIELDS if key.samples else ():
            fields[name] = (np.int32 if name == "top_k" else np.float32, picks)
        if key.mask_words:
            fields["mask"] = (np.int32, (*picks, key.mask_words))
        starts, size = {}, 0
        for name, (kind, shape) in fields.items():
            starts[name] = size
            # kernels were compiled for pointers that are multiples of 16
            size += -(-np.dtype(kind).itemsize * prod(shape) // 16) * 16
        pinned = device.type not in ("cpu", "meta")
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None
        raw = self._host.numpy()
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (kind, shape) in fields.items():
            end = starts[name] + np.dtype(kind).itemsize * prod(shape)
            self.host[name] = raw[starts[name] : end].view(kind).reshape(shape)
            same = torch.from_numpy(self.host[name]).dtype
            self.device[name] = self._device[starts[name] : end].view(same).view(shape)
        self._trash_slot, self._trash_block = trash_slot, trash_slot // block_size

    def fill(self, batch: StepBatch) -> None:
        """Write a batch and its padding, and start the copy to the device."""
        tokens, (n, width), picks = (
            batch.num_tokens,
            batch.block_tables.shape,
            len(batch.logit_rows),
        )
        host, key = self.host, self._key
        if self._copied is not None:
            # the copy before this one may still be reading; an event not yet recorded is done
            self._copied.synchronize()
        for name in ("token_ids", "positions", "slot_mapping"):
            host[name][:tokens], host[name][tokens:] = getattr(batch, name), 0
        host["slot_mapping"][tokens:] = self._trash_slot
        host["carried"][:] = -1
        if batch.carried is not None:
            host["carried"][:tokens] = batch.carried.rows
        host["seq_lens"][:n], host["block_tables"][:n, :width] = batch.seq_lens, batch.block_tables
        host["logit_rows"][:picks] = batch.logit_rows
        self._pad_sequences(batch)
        for name in FIELDS if key.samples else ():
            host[name][:picks], host[name][picks:] = getattr(batch.sampling, name), 0
        if batch.sampling.mask is not None:
            host["mask"][:picks], host["mask"][picks:] = batch.sampling.mask.view(np.int32), -1
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if batch.carried is not None:
            device = self.device
            TorchBackend.carry(device["token_ids"], device["carried"], batch.carried.tokens)

    def _pad_sequences(self, batch: StepBatch) -> None:
        host, key, n = self.host, self._key, batch.num_sequences
        starts, spare = host["query_start_loc"], key.tokens - batch.num_tokens
        starts[: n + 1] = batch.query_start_loc
        if key.prompt:
            starts[n + 1], host["seq_lens"][n] = key.prompt, max(1, spare)
            host["block_tables"][n] = self._trash_block
        else:
            starts[n + 1 :], host["seq_lens"][n:] = np.arange(n + 1, key.rows + 1), 1
            host["block_tables"][n:, 0] = self._trash_block
            host["logit_rows"][n:] = np.arange(n, key.rows)

    def batch(self) -> StepBatch:
        """The padded batch on the host, as ops see it."""
        host, key = self.host, self._key
        fields = {name: host[name] for name in host if name not in _APART}
        if key.prompt:  # launches must not depend on how much of it is padding
            fields["query_start_loc"] = np.array([0, key.prompt - 2, key.prompt], np.int32)
        return StepBatch(**fields, sampling=_padded_sampling(host, key.picks))


def _padded_sampling(host: dict[str, NDArray[Any]], rows: int) -> SamplingBatch:
    zeros, none = np.zeros(rows, np.float32), np.zeros(0, np.int32)
    starts = np.zeros(rows + 1, np.int32)
    plain = {"temperature": zeros, "top_k": starts[1:], "top_p": zeros + 1, "min_p": zeros,
             "uniforms": zeros}  # fmt: skip
    return SamplingBatch(
        **{name: host.get(name, plain[name]) for name in FIELDS},
        repetition_penalty=zeros + 1,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        forced=starts[1:] - 1,
        history_start=starts,
        history_ids=none,
        history_counts=none,
        bias_start=starts,
        bias_ids=none,
        bias_values=zeros[:0],
    )


@attrs.frozen(eq=False)
class GraphReplay:
    """A captured step; calling it updates the inputs and launches the graph."""

    inputs: StaticInputs
    graph: Any
    """`torch.cuda.CUDAGraph`"""
    token_ids: Tensor
    replayed: Callable[[], None] = lambda: None
    """Told of every launch."""

    def __call__(self, batch: StepBatch) -> Sampled[Tensor]:
        self.inputs.fill(batch)
        self.graph.replay()
        self.replayed()
        return Sampled(token_ids=self.token_ids[: batch.num_sequences])


def static_meta(
    upload: Callable[[StepBatch], StepMeta[Tensor]], inputs: StaticInputs
) -> StepMeta[Tensor]:
    """A step's meta over the static device tensors."""
    device = inputs.device
    meta = upload(inputs.batch())
    fixed = {name: device[name] for name in device if name not in _APART}
    return attrs.evolve(meta, **fixed, sampling=draw_tensors(device))


def capture(
    step: Callable[[StepMeta[Tensor]], Sampled[Tensor]],
    meta: StepMeta[Tensor],
    inputs: StaticInputs,
    pool: Any,
) -> GraphReplay:
    """Run the step to compile and settle, then record it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(RUNS - 1):
            step(meta)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        sampled = step(meta)
    return GraphReplay(inputs, graph, sampled.token_ids)


def fetch(sampled: Sampled[Tensor]) -> Callable[[], Sampled[NDArray[Any]]]:
    """Queue the copy of a step's results to the host; the call returned waits and gives them."""
    pinned = sampled.token_ids.device.type not in ("cpu", "meta")

    def copied(array: Tensor | None) -> Tensor | None:
        if array is None:
            return None
        host = torch.empty_like(array, device="cpu", pin_memory=pinned)
        return host.copy_(array, non_blocking=pinned)

    host = {name: copied(value) for name, value in attrs.asdict(sampled, recurse=False).items()}
    done = torch.cuda.Event() if pinned else None
    if done is not None:
        done.record()

    def wait() -> Sampled[NDArray[Any]]:
        if done is not None:
            done.synchronize()
        arrays = {n: None if array is None else array.numpy() for n, array in host.items()}
        return Sampled(**arrays)

    return wait
