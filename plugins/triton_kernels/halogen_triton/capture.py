"""Captured decode steps: one CUDA or HIP graph per bucket, inputs updated in place.

All inputs of a bucket lie in one device buffer that one copy from pinned memory fills; then the
host makes one launch for the whole step, sampling included. Tokens that the step before picked are
taken from the device, so that step may still run. Rows that pad a batch to its bucket are one token
long and live in the trash block.
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
from halogen_triton.sampling import FIELDS, DrawTensors, is_plain

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RUNS = 3
"""How often capturing calls the step: to compile, to settle, to record."""
TABLE_WIDTHS = (32, 256, 2048, 16384, 131072)


@attrs.frozen
class CaptureKey:
    """What a captured step is good for."""

    rows: int
    table_width: int
    samples: bool
    """Some row is not greedy."""
    flash: bool


def capture_key(
    batch: StepBatch, flash_threshold: int, buckets: Sequence[int] = BUCKETS
) -> CaptureKey | None:
    """The bucket of a pure decode step; None: it must run eagerly."""
    rows, width = batch.num_sequences, batch.block_tables.shape[1]
    pure = (
        0 < rows <= buckets[-1]
        and batch.num_tokens == rows
        and len(batch.logit_rows) == rows
        and width <= TABLE_WIDTHS[-1]
        and is_plain(batch.sampling)
    )
    if not pure:
        return None
    return CaptureKey(
        rows=next(b for b in buckets if b >= rows),
        table_width=next(w for w in TABLE_WIDTHS if w >= width),
        samples=not batch.sampling.all_greedy,
        flash=batch.max_seq_len > flash_threshold,
    )


class StaticInputs:
    """Host and device views of one bucket's inputs, packed into one buffer each."""

    def __init__(
        self, key: CaptureKey, trash_slot: int, block_size: int, device: torch.device
    ) -> None:
        rows = key.rows
        fields: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "slot_mapping": (np.int64, (rows,)),
            "token_ids": (np.int32, (rows,)),
            "positions": (np.int32, (rows,)),
            "query_start_loc": (np.int32, (rows + 1,)),
            "seq_lens": (np.int32, (rows,)),
            "logit_rows": (np.int32, (rows,)),
            "carried": (np.int32, (rows,)),
            "block_tables": (np.int32, (rows, key.table_width)),
        }
        for name in FIELDS if key.samples else ():
            fields[name] = (np.int32 if name == "top_k" else np.float32, (rows,))
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
        self.host["query_start_loc"][:] = np.arange(rows + 1)
        self.host["logit_rows"][:] = np.arange(rows)

    def fill(self, batch: StepBatch) -> None:
        """Write a batch and its padding, and start the copy to the device."""
        n, width = batch.block_tables.shape
        host = self.host
        if self._copied is not None:
            # the copy before this one may still be reading; an event not yet recorded is done
            self._copied.synchronize()
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
            host[name][:n] = getattr(batch, name)
        host["block_tables"][:n, :width] = batch.block_tables
        host["token_ids"][n:], host["positions"][n:], host["seq_lens"][n:] = 0, 0, 1
        host["slot_mapping"][n:] = self._trash_slot
        host["block_tables"][n:, 0] = self._trash_block
        host["carried"][:] = -1
        if batch.carried is not None:
            host["carried"][:n] = batch.carried.rows
        for name in FIELDS:
            if name in host:
                host[name][:n] = getattr(batch.sampling, name)
                host[name][n:] = 0
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if batch.carried is not None:
            device = self.device
            TorchBackend.carry(device["token_ids"], device["carried"], batch.carried.tokens)

    def batch(self) -> StepBatch:
        """The padded batch on the host, as ops see it."""
        host, rows = self.host, len(self.host["token_ids"])
        return StepBatch(
            **{name: host[name] for name in host if name not in (*FIELDS, "carried")},
            sampling=_padded_sampling(host, rows),
        )


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
    draws = {name: device[name] for name in FIELDS if name in device}
    meta = upload(inputs.batch())
    fixed = {name: device[name] for name in device if name not in (*FIELDS, "carried")}
    if draws:
        fixed["sampling"] = DrawTensors(draws)
    return attrs.evolve(meta, **fixed)


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
