"""Sampling by our kernel, as the last node of a step's graph: rows in parallel, no interpreter."""

from __future__ import annotations

import ctypes as C
from typing import Any

import attrs
import numpy as np

from halogen_core.spi import SamplingBatch
from halogen_cpu_ggml import native, sampling
from halogen_cpu_ggml.inputs import StepInputs
from halogen_cpu_ggml.recorder import rows_address
from halogen_cpu_ggml.tape import Node, Tape, view_f32

FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
    "uniforms": "uniforms",
    "top_k": "top_k",
    "forced": "forced",
    "history_start": "history_start",
    "history_ids": "history_ids",
    "history_counts": "history_counts",
    "bias_start": "bias_start",
    "bias_ids": "bias_ids",
    "bias_values": "bias_values",
}
SCRATCH_ROWS = 3
"""Per thread: adjusted logits and candidates of 8 bytes."""


@attrs.define(eq=False)
class KernelPicker:
    """The sampling node's parameters and results."""

    params: Any
    logits: Node
    ids: Node
    kept: list[Any] = attrs.field(factory=list)

    def load(self, batch: SamplingBatch) -> None:
        """Point the kernel at this step's sampling arrays."""
        self.kept.clear()
        for field, name in FIELDS.items():
            array = getattr(batch, name)
            self.kept.append(array)
            setattr(self.params, field, array.ctypes.data)
        mask = batch.mask
        self.params.mask = None
        if mask is not None:
            mask = np.ascontiguousarray(mask)
            self.kept.append(mask)
            self.params.mask = mask.ctypes.data

    def result(self, batch: SamplingBatch) -> sampling.Choice:
        rows = batch.num_rows
        ids = view_f32(self.ids).view(np.int32)[:rows].copy()
        if batch.num_logprobs < 0:
            return sampling.Choice(ids)
        return sampling.with_logprobs(view_f32(self.logits)[:rows], ids, batch.num_logprobs)


def record(tape: Tape, kernel: int, logits: Node, inputs: StepInputs) -> KernelPicker:
    """Add the sampling node for logits [R, V]; the ids are int32 in a float32 node."""
    vocab = logits.shape[1]
    params = native.Sample(rows=rows_address(tape, logits), vocab=vocab)
    scratch = tape.scratch(tape.team.threads * SCRATCH_ROWS * vocab * C.sizeof(C.c_float))
    ids = tape.custom(
        kernel,
        params,
        shape=(logits.shape[0],),
        reads={"logits": logits},
        writes={"scratch": scratch},
    )
    picker = KernelPicker(params, logits, ids)
    tape.memo[sampling.PICKER] = picker
    return picker
