"""Host side of sampling on the device."""

from __future__ import annotations

from collections.abc import Mapping

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
_BINS, _MOST = kernels.BINS.value, kernels.MOST.value


@attrs.frozen(eq=False)
class DrawTensors:
    """What draws of tokens ask, one row per logit row, as in `SamplingBatch`."""

    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    """By field; empty: all greedy."""
    mask: Tensor | None = None
    """int32 [R, ceil(V / 32)] allowed tokens; None: all."""


def is_plain(batch: SamplingBatch) -> bool:
    """Whether the kernel alone does it: no penalties, bias, forced tokens, log-probabilities."""
    return (
        batch.num_logprobs < 0
        and not batch.history_ids.size
        and not batch.bias_ids.size
        and not (batch.forced >= 0).any()
    )


def draw_arrays(batch: SamplingBatch) -> dict[str, NDArray[np.generic]]:
    """The host arrays of a plain batch that a draw needs; `mask` as int32."""
    arrays = {} if batch.all_greedy else {name: getattr(batch, name) for name in FIELDS}
    return arrays if batch.mask is None else {**arrays, "mask": batch.mask.view(np.int32)}


def draw_tensors(tensors: Mapping[str, Tensor]) -> DrawTensors:
    """`draw_arrays` on the device; what else is there is left out."""
    fields = {name: tensors[name] for name in FIELDS if name in tensors}
    return DrawTensors(fields, tensors.get("mask"))


def draw(
    logits: Tensor,
    fields: DrawTensors,
    *,
    joins: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Token ids [R] int32 of logits [R, V] float32; among greedy ties the lowest id wins. A row
    whose top is not finite gives -1.

    `joins` are counters as `attention` takes them, of which this needs R * 1025 + 64.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    block = 4096 if not active() else 256
    blocks, samples = triton.cdiv(vocab, block), bool(fields.tensors)
    padded = -(-rows // 64) * 64
    if joins is None or len(joins) < padded + rows * _BINS:
        size = padded + (rows * _BINS if samples else 0)
        joins = torch.zeros(size, dtype=torch.int32, device=logits.device)
    wide = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tops = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    given, mask = fields.tensors, fields.mask
    common = {"BLOCK": block, "PDL": pdl, "num_warps": 8, **({"launch_pdl": True} if pdl else {})}
    parts = triton.next_power_of_2(blocks)
    allowed = logits if mask is None or not samples else torch.empty_like(logits)
    kernels.top_rows[(rows, blocks)](
        logits, logits if mask is None else mask, allowed, given.get("temperature", logits),
        wide[0], ids, wide[1], joins, tops, out, vocab, PARTS=parts, SAMPLES=samples,
        MASKED=mask is not None, **common,
    )  # fmt: skip
    if not samples:
        return out
    levels = torch.empty(rows, dtype=torch.int32, device=logits.device)
    kernels.level_rows[(rows, blocks)](
        allowed, given["temperature"], given["top_k"], given["top_p"], tops, joins[padded:],
        joins, out, levels, vocab, **common,
    )  # fmt: skip
    picks = torch.empty(rows, blocks, block, dtype=torch.int16, device=logits.device)
    sums = torch.empty(rows, 2 * parts, dtype=torch.float32, device=logits.device)
    few = torch.empty(rows, _MOST * block, dtype=torch.float32, device=logits.device)
    kernels.pick_rows[(rows, blocks)](
        allowed, *(given[name] for name in FIELDS[:4]), tops, levels, out, picks, sums, vocab,
        PARTS=parts, **common,
    )  # fmt: skip
    kernels.draw_rows[(rows,)](
        allowed, *(given[name] for name in FIELDS), tops, levels, picks, sums, few,
        torch.empty_like(few, dtype=torch.int32), out, vocab, blocks, PARTS=parts,
        **common | {"num_warps": 16},
    )  # fmt: skip
    return out
