"""One step on a torch device: the uploaded batch, and what its layers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.step import StepBatch, StepMeta
from halogen_core.torch_backend.sampling import SamplingTensors

Value = TypeVar("Value")


@attrs.frozen(kw_only=True, eq=False)
class TorchStepMeta(StepMeta[Tensor]):
    """A step with a memo for values that every layer needs again (rope tables, KV row indices)."""

    memo: dict[Hashable, Any] = attrs.field(factory=dict)

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `make()`, made once per step and key."""
        if key not in self.memo:
            self.memo[key] = make()
        value: Value = self.memo[key]
        return value


def torch_meta(meta: StepMeta[Tensor]) -> TorchStepMeta:
    """The step as its backend uploaded it."""
    assert isinstance(meta, TorchStepMeta)
    return meta


def upload_arrays(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Device copies of host arrays in one transfer; on the host itself, views."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        # compilers of kernels make another one for pointers that are no multiples of 16
        size += -(-array.nbytes // 16) * 16
    buffer = np.empty(size, dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer[start : start + array.nbytes] = raw
    device_buffer = torch.from_numpy(buffer).to(device, non_blocking=True)
    return [
        device_buffer[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0].reshape(-1)).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def carry(token_ids: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Write `tokens[rows]` into `token_ids` [T] where a row is named; all int32 on the device."""
    picked = tokens.index_select(0, rows.clamp(min=0))
    token_ids.copy_(torch.where(rows < 0, token_ids, picked))


def upload_step(batch: StepBatch, device: torch.device) -> TorchStepMeta:
    """The step's arrays on the device, in one transfer."""
    sampling = SamplingTensors.host_arrays(batch.sampling)
    arrays: list[NDArray[Any]] = [
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        batch.logit_rows,
        *sampling.values(),
    ]
    carried = batch.carried
    tensors = upload_arrays([*arrays, carried.rows] if carried else arrays, device)
    tokens, positions, slots, starts, lengths, tables, rows = tensors[:7]
    if carried:
        carry(tokens, tensors.pop(), carried.tokens)
    return TorchStepMeta(
        host=batch,
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=lengths,
        block_tables=tables,
        logit_rows=rows,
        sampling=SamplingTensors(dict(zip(sampling, tensors[7:], strict=True))),
    )
