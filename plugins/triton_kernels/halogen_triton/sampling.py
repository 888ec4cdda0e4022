"""Host side of sampling on the device."""

from __future__ import annotations

import attrs
import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi import SamplingBatch
from halogen_triton import sampling_kernels as kernels
from halogen_triton.interpreter import active, repair

repair()

FIELDS = ("temperature", "top_k", "top_p", "min_p", "uniforms")


@attrs.frozen(eq=False)
class DrawTensors:
    """One row per logit row, by field of `SamplingBatch`."""

    tensors: dict[str, Tensor]


def is_plain(batch: SamplingBatch) -> bool:
    """Whether the kernel alone does it: no penalties, bias, mask, forced tokens,
    log-probabilities.
    """
    return (
        batch.num_logprobs < 0
        and not batch.history_ids.size
        and not batch.bias_ids.size
        and batch.mask is None
        and not (batch.forced >= 0).any()
    )


def draw_arrays(batch: SamplingBatch) -> dict[str, NDArray[np.generic]]:
    """The host arrays of a plain batch."""
    return {name: getattr(batch, name) for name in FIELDS}


def draw(
    logits: Tensor, fields: DrawTensors | None, *, joins: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """Token ids [R] int32 of logits [R, V] float32; None: all greedy (lowest id wins a tie).

    `joins` are counters as `attention` takes them.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    if logits.shape[0] == 0:
        return out
    block = 4096 if not active() else 256
    if fields is None:
        _greedy(logits, out, block, joins, pdl)
        return out
    kernels.sample_rows[(logits.shape[0],)](
        logits, *(fields.tensors[name] for name in FIELDS), out, logits.shape[1], BLOCK=block,
        num_warps=16,
    )  # fmt: skip
    return out


def _greedy(logits: Tensor, out: Tensor, block: int, joins: Tensor | None, pdl: bool) -> None:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, block)
    if joins is None or len(joins) < rows:
        joins = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    kernels.greedy_rows[(rows, blocks)](
        logits, values, torch.empty_like(values, dtype=torch.int32), joins, out, vocab,
        BLOCK=block, PARTS=triton.next_power_of_2(blocks), PDL=pdl, num_warps=8,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
