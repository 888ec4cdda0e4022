"""A whole step recorded into one graph, replayed for every batch that fits its bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np

from halogen_core.spi import Sampled, StepBatch, StepMeta
from halogen_cpu_ggml.inputs import StepInputs
from halogen_cpu_ggml.ops import sampled_nodes
from halogen_cpu_ggml.sampling import PICKER, Picker
from halogen_cpu_ggml.tape import MAX_TENSORS, Node, Tape, host_node

if TYPE_CHECKING:
    from halogen_cpu_ggml.backend import GgmlBackend


def bucket(n: int) -> int:
    """The capacity for n: itself up to 4, then the next of 6, 8, 12, 16, 24, 32, ..."""
    if n <= 4:
        return n
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


@attrs.define(eq=False)
class Captured:
    """The replay of one bucket."""

    backend: GgmlBackend
    tape: Tape
    inputs: StepInputs
    picker: Picker | None
    """None: a step without rows."""

    def __call__(self, batch: StepBatch) -> Sampled[Node]:
        backend = self.backend
        self.inputs.fill(batch)
        backend.mode.before(self.inputs)
        if self.picker is None:
            self.tape.compute()
            backend.tables.give_back()
            return Sampled(token_ids=host_node(np.zeros(0, np.int32)))
        self.picker.load(batch.sampling)
        self.tape.compute()
        backend.tables.give_back()
        backend.tally["replays"] += 1
        return sampled_nodes(self.picker.result(batch.sampling))

    def close(self) -> None:
        self.tape.close()


def record(
    backend: GgmlBackend,
    step: Callable[[StepMeta[Node]], Sampled[Node]],
    inputs: StepInputs,
    meta: StepMeta[Node],
) -> Captured:
    """Call `step` once with recording handles and plan its graph."""
    recorder = backend.recorder
    tape = Tape(recorder.lib, recorder.team, MAX_TENSORS, recording=True)
    recorder.current = tape
    try:
        sampled = step(meta)
        picker = tape.memo.get(PICKER)
        for node in {sampled.token_ids, getattr(picker, "logits", sampled.token_ids)}:
            tape.point_last(node)
        tape.finish(backend.arena)
    except BaseException:
        tape.close()
        raise
    finally:
        recorder.current = None
    return Captured(backend, tape, inputs, picker)
