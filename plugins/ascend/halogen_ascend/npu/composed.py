"""Paged attention out of plain torch ops, for layers that the fused operator does not take."""

from __future__ import annotations

import torch
from torch import Tensor

from halogen_ascend.npu.kv import NpuKV
from halogen_core.spi import AttentionSpec, StepMeta


def composed_attention(
    query: Tensor,
    cache: NpuKV,
    layer: int,
    meta: StepMeta[Tensor],
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Query [T, Hq, D] over the cache, a sequence at a time, float32 inside: [T, Hq, D]."""
    host, tables, outs = meta.host, cache.tables(meta), []
    starts = host.query_start_loc.tolist()
    for sequence, length in enumerate(host.seq_lens.tolist()):
        a, b = starts[sequence], starts[sequence + 1]
        used = -(-length // cache.block_size)
        blocks = tables.select(0, sequence).narrow(0, 0, used)
        keys, values = (
            tensor[layer].index_select(0, blocks).flatten(0, 1).narrow(0, 0, length).float()
            for tensor in (cache.keys, cache.values)
        )
        rows = query.narrow(0, a, b - a).float()
        outs.append(_one(rows, keys, values, spec, sinks).to(query.dtype))
    return torch.cat(outs) if outs else torch.empty_like(query)


def _one(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    count, length, group = len(q), len(keys), spec.num_heads // spec.num_kv_heads
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    at = torch.arange(length, device=q.device)
    where = torch.arange(length - count, length, device=q.device).unsqueeze(1)
    hidden = at > where
    if spec.window is not None:
        hidden = hidden | (at <= where - spec.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(-1, 1, 1).expand(-1, count, 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1).narrow(-1, 0, length)
    return (weights @ values).transpose(0, 1)
