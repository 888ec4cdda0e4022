"""Mixture of experts: routing, and each expert over the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halogen_core.errors import UnsupportedOp
from halogen_core.spi.operations import MoESpec


def route(router_logits: Tensor, spec: MoESpec) -> tuple[Tensor, Tensor]:
    """Experts [T, k] int64 and their weights [T, k] float32; ties go to the lower expert."""
    if not 1 <= spec.top_k <= spec.num_experts:
        raise UnsupportedOp(f"top_k is {spec.top_k}; allowed are 1 to {spec.num_experts} experts")
    logits = router_logits.float()
    scores = logits.sigmoid() if spec.gating == "sigmoid" else logits.softmax(-1)
    # a stable sort, because topk leaves the order of equals open
    ordered, experts = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, : spec.top_k], experts[:, : spec.top_k]
    if spec.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return experts, weights * spec.weight_scale


def apply_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Sum over each token's experts of weight times `expert(e, tokens of e)`: [T, H].

    Contributions are added in the order of the token's own ranking, so a token's sum does not
    depend on who else is in the step.
    """
    tokens, k = experts.shape
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    outputs = torch.empty((tokens * k, x.shape[1]), dtype=x.dtype, device=x.device)
    inputs = x.index_select(0, order // k)
    start = 0
    for index, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            outputs.index_copy_(0, order[rows], expert(index, inputs[rows]))
            start += count
    ranked = outputs.view(tokens, k, x.shape[1]).float() * weights.unsqueeze(-1)
    total = ranked[:, 0]
    for rank in range(1, k):
        total = total + ranked[:, rank]
    return total.to(x.dtype)
