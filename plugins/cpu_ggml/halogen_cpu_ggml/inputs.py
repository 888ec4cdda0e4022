"""One step's host arrays where graphs and kernels look for them."""

from __future__ import annotations

import ctypes as C

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import SamplingBatch, StepBatch
from halogen_cpu_ggml.native import Step
from halogen_cpu_ggml.tape import Node, host_node


@attrs.frozen
class Capacity:
    """Sizes that a graph is built for: tokens, rows with logits, gathered KV rows."""

    tokens: int
    rows: int
    kv: int = 0
    every: bool = False
    """Every token is a row with logits: models record such a step without selecting rows."""


@attrs.define(eq=False)
class StepInputs:
    """Buffers at a graph's capacity, refilled for every step. Padding is token 0 at position 0,
    its KV goes to the reserved block.
    """

    capacity: Capacity
    reserved_slot: int = 0
    """Set by the first op that sees the KV pool."""
    token_ids: NDArray[np.int32] = attrs.field(init=False)
    positions: NDArray[np.int32] = attrs.field(init=False)
    slots: NDArray[np.int64] = attrs.field(init=False)
    logit_rows: NDArray[np.int32] = attrs.field(init=False)
    step: Step = attrs.field(factory=Step)
    batch: StepBatch | None = None
    gathered: dict[int, NDArray[np.int32]] = attrs.field(factory=dict)
    """KV slots of every sequence, one after another, by block size (ggml's own attention)."""
    scratch: object = None
    """Memory that the step points into, kept while it does."""
    masks: dict[tuple[int, int | None], NDArray[np.float32]] = attrs.field(factory=dict)
    """Additive masks [T, kv] by (block size, window)."""

    def __attrs_post_init__(self) -> None:
        tokens, rows = self.capacity.tokens, self.capacity.rows
        self.token_ids = np.zeros(tokens, np.int32)
        self.positions = np.zeros(tokens, np.int32)
        self.slots = np.full(tokens, self.reserved_slot, np.int64)
        self.logit_rows = np.zeros(rows, np.int32)

    @property
    def sampling(self) -> SamplingBatch:
        """Of the step that is loaded."""
        assert self.batch is not None
        return self.batch.sampling

    def rows_address(self, field: str) -> int:
        """Where a live count (`tokens` or `rows`) lies."""
        return C.addressof(self.step) + int(getattr(Step, field).offset)

    def node(self, name: str, count: str) -> Node:
        """An input buffer as a device array."""
        node = host_node(getattr(self, name))
        node.rows = self.rows_address(count)
        return node

    def fill(self, batch: StepBatch) -> None:
        """Load a step; arrays that only kernels read are pointed at, not copied."""
        t, r = batch.num_tokens, len(batch.logit_rows)
        self.batch = batch
        _refill(self.token_ids, batch.token_ids, t, 0)
        _refill(self.positions, batch.positions, t, 0)
        _refill(self.slots, batch.slot_mapping, t, self.reserved_slot)
        _refill(self.logit_rows, batch.logit_rows, r, 0)
        self._point(batch, t, r)
        for block_size, target in self.gathered.items():
            self._gather(batch, block_size, target)
        for (_, window), mask in self.masks.items():
            _fill_mask(batch, window, mask)

    def _point(self, batch: StepBatch, t: int, r: int) -> None:
        step = self.step
        step.tokens, step.rows, step.sequences = t, r, batch.num_sequences
        tables = np.ascontiguousarray(batch.block_tables, np.int32)
        starts = np.ascontiguousarray(batch.query_start_loc, np.int32)
        lens = np.ascontiguousarray(batch.seq_lens, np.int32)
        self._kept = (tables, starts, lens)
        step.table_stride = tables.shape[1]
        step.block_tables, step.query_start = tables.ctypes.data, starts.ctypes.data
        step.seq_lens = lens.ctypes.data
        step.positions = self.positions.ctypes.data
        step.slots = self.slots.ctypes.data
        step.logit_rows = self.logit_rows.ctypes.data

    _kept: tuple[NDArray[np.int32], ...] = ()

    # -- only for attention in ggml's own ops

    def gather_node(self, block_size: int) -> Node:
        """Slots [kv] to gather; padding reads a slot that stays zero."""
        if block_size not in self.gathered:
            self.gathered[block_size] = np.zeros(self.capacity.kv, np.int32)
            if self.batch is not None:
                self._gather(self.batch, block_size, self.gathered[block_size])
        return host_node(self.gathered[block_size])

    def mask_node(self, block_size: int, window: int | None) -> Node:
        """The additive mask [T, kv]."""
        key = (block_size, window)
        if key not in self.masks:
            shape = (self.capacity.tokens, self.capacity.kv)
            self.masks[key] = np.full(shape, -np.inf, np.float32)
            if self.batch is not None:
                _fill_mask(self.batch, window, self.masks[key])
        return host_node(self.masks[key])

    def _gather(self, batch: StepBatch, block_size: int, target: NDArray[np.int32]) -> None:
        target[:] = self.reserved_slot + 1
        at = 0
        for table, length in zip(batch.block_tables, batch.seq_lens, strict=True):
            token = np.arange(length)
            target[at : at + length] = table[token // block_size] * block_size + token % block_size
            at += int(length)


def _refill(target: NDArray[np.generic], source: NDArray[np.generic], n: int, pad: int) -> None:
    target[:n] = source
    target[n:] = pad


def _fill_mask(batch: StepBatch, window: int | None, mask: NDArray[np.float32]) -> None:
    mask[:] = -np.inf
    at = 0
    for s, length in enumerate(batch.seq_lens):
        lo, hi = batch.query_start_loc[s], batch.query_start_loc[s + 1]
        position = np.arange(length - (hi - lo), length)[:, None]
        key = np.arange(length)[None, :]
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        mask[lo:hi, at : at + length] = np.where(seen, 0.0, -np.inf)
        at += int(length)
    # a row that sees nothing would be NaN; padding sees a zero
    mask[batch.num_tokens :, 0] = 0.0
