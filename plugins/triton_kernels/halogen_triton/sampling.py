"""Host side of sampling on the device."""

from __future__ import annotations

import attrs
import numpy as np
import torch
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


def draw(logits: Tensor, fields: DrawTensors | None) -> Tensor:
    """Token ids [R] int32 of logits [R, V] float32; None: all greedy (lowest id wins a tie)."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    given = [out] * len(FIELDS) if fields is None else [fields.tensors[name] for name in FIELDS]
    block = 4096 if not active() else 256
    kernels.sample_rows[(rows,)](
        logits, *given, out, vocab, BLOCK=block, SAMPLE=fields is not None, num_warps=16
    )
    return out
