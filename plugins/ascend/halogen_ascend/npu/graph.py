"""Captured decode steps on the real device: an NPUGraph with attention calls updated per replay.

Lengths are baked into a captured call. Each call with lengths is therefore a task group behind an
external event: a replay waits there until the call was made again with new lengths on a second
stream (graph_task_update), then goes on. Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from halogen_ascend.npu import calls
from halogen_ascend.padding import STEP_ARRAYS, TrashBlock, pad
from halogen_core.spi import Sampled, StepBatch, StepMeta

MakeCall = Callable[[StepBatch], calls.PagedCall]


@attrs.frozen(eq=False)
class Task:
    """One captured call: how to make it again, where it writes, what identifies it."""

    make: MakeCall
    workspace: Tensor
    out: tuple[Tensor, Tensor]
    event: Any
    handle: Any


@attrs.define(eq=False)
class TaskList:
    """The calls of one capture whose host arguments change; `runtime` is `torch.npu`."""

    runtime: Any
    tasks: list[Task] = attrs.field(factory=list)

    def launch(self, make: MakeCall, host: StepBatch) -> Tensor:
        """Capture one call as a task group; returns its output [T, Hq, D]."""
        call = make(host)
        workspace = calls.paged_attention_workspace(call)
        out = (torch.empty_like(call.query), call.query.new_empty(1, dtype=torch.float32))
        stream = self.runtime.current_stream()
        event = self.runtime.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        self.runtime.graph_task_group_begin(stream)
        calls.paged_attention_into(call, workspace, out)
        handle = self.runtime.graph_task_group_end(stream)
        self.tasks.append(Task(make, workspace, out, event, handle))
        return out[0]

    def update(self, host: StepBatch, stream: Any) -> None:
        """Make every call again with the lengths of `host`; each lets the replay go on."""
        with self.runtime.stream(stream):
            for task in self.tasks:
                self.runtime.graph_task_update_begin(stream, task.handle)
                calls.paged_attention_into(task.make(host), task.workspace, task.out)
                self.runtime.graph_task_update_end(stream)
                task.event.record(stream)


@attrs.define(eq=False)
class NpuReplay:
    """A captured step."""

    graph: Any
    tasks: TaskList
    meta: StepMeta[Tensor]
    made: Sampled[Tensor]
    size: int
    trash: TrashBlock
    stream: Any

    def __call__(self, batch: StepBatch) -> Sampled[Tensor]:
        padded = pad(batch, self.size, self.trash)
        refill(self.meta, padded)
        # the replay starts first and waits at each event: updating before it would deadlock
        self.graph.replay()
        self.tasks.update(padded, self.stream)
        return Sampled(token_ids=self.made.token_ids[: batch.num_sequences])


def refill(meta: StepMeta[Tensor], batch: StepBatch) -> None:
    """Copy a batch into the captured step's own input tensors."""
    for name in STEP_ARRAYS:
        getattr(meta, name).copy_(torch.from_numpy(getattr(batch, name)))


def plain_greedy(batch: StepBatch) -> bool:
    """Only steps that pick the most likely token are captured: no parameters to update."""
    sampling = batch.sampling
    return bool(
        sampling.all_greedy
        and sampling.mask is None
        and not sampling.history_ids.size
        and not sampling.bias_ids.size
        and (sampling.forced < 0).all()
        and sampling.num_logprobs < 0
    )
