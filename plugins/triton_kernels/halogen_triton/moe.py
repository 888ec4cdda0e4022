"""Mixture of experts: routing, and tiles of rows that share an expert."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from halogen_core.spi import MoESpec, UnsupportedOp
from halogen_triton.linear import ExpertRows

_FEW = 64
"""Pairs up to which each gets a tile of its own: sorting would cost more than re-reading."""
_TILE = 16


def route(logits: Tensor, spec: MoESpec) -> tuple[Tensor, Tensor]:
    """Experts [T, k] int32 and their weights [T, k] float32; ties go to the lower expert.

    Raises `UnsupportedOp` for a routing that `supports` denies.
    """
    if not 1 <= spec.top_k <= spec.num_experts or spec.gating not in ("softmax", "sigmoid"):
        raise UnsupportedOp(
            f"routing takes {spec.top_k} of {spec.num_experts} experts by `{spec.gating}`; allowed "
            "are 1 to all of them by softmax or sigmoid"
        )
    logits = logits.float()
    scores = logits.sigmoid() if spec.gating == "sigmoid" else logits.softmax(-1)
    # a stable sort, because topk leaves the order of equals open
    ordered, experts = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, : spec.top_k], experts[:, : spec.top_k]
    if spec.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return experts.int(), weights * spec.weight_scale


def expert_rows(experts: Tensor, num_experts: int, *, tile: int = 64) -> ExpertRows:
    """Tiles for experts [T, k]; nothing here waits for the device, and shapes depend on T only."""
    pairs, top_k = experts.numel(), experts.shape[1]
    flat = experts.flatten()
    if pairs <= _FEW:
        ids = torch.full((pairs, _TILE), pairs, dtype=torch.int32, device=flat.device)
        ids[:, 0] = torch.arange(pairs, dtype=torch.int32, device=flat.device)
        return ExpertRows(
            row_ids=ids.flatten(), block_expert=flat, block_m=_TILE, pairs=pairs, top_k=top_k
        )
    blocks = triton.cdiv(pairs, tile) + num_experts
    ranked, order = torch.sort(flat, stable=True)
    ids = torch.arange(num_experts, dtype=ranked.dtype, device=flat.device)
    starts = torch.searchsorted(ranked, ids)
    ends = torch.searchsorted(ranked, ids, right=True)
    tiles = (ends - starts + tile - 1) // tile
    last = tiles.cumsum(0)
    first = (last - tiles)[ranked.long()] * tile
    place = first + torch.arange(pairs, device=flat.device) - starts[ranked.long()]
    rows = torch.full((blocks * tile,), pairs, dtype=torch.int32, device=flat.device)
    rows[place] = order.int()
    block = torch.arange(blocks, device=flat.device)
    owner = torch.searchsorted(last, block, right=True)
    owner = torch.where(block < last[-1], owner, -1).int()
    return ExpertRows(row_ids=rows, block_expert=owner, block_m=tile, pairs=pairs, top_k=top_k)
