"""Mixture of experts: routing on the vector cores, then a grouped product per chosen expert."""

from __future__ import annotations

import torch

from halogen_ascend.sim.cube import matmul
from halogen_ascend.sim.device import SimDevice
from halogen_ascend.sim.tasks import MicroTask, Program
from halogen_ascend.sim.vector import by_rows, gated
from halogen_ascend.sim.weights import Experts
from halogen_core.spi import MoESpec


def route(logits: torch.Tensor, spec: MoESpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [T, k] and experts int64 [T, k]; ties go to the lower expert."""
    scores = logits.softmax(-1) if spec.gating == "softmax" else logits.sigmoid()
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, chosen = order.values[:, : spec.top_k], order.indices[:, : spec.top_k]
    if spec.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * spec.weight_scale, chosen


def grouped_mlp(
    device: SimDevice,
    x: torch.Tensor,
    chosen: torch.Tensor,
    experts: tuple[Experts, Experts],
    spec: MoESpec,
) -> tuple[Program, torch.Tensor]:
    """One launch of every chosen expert on its tokens, and [T, k, H] float32 that it fills."""
    gate_up, down = experts
    out = torch.zeros(*chosen.shape, down.each[0].n)
    graph = Program("moe")
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inner = torch.zeros(len(rows), gate_up.each[expert].n, dtype=x.dtype)
        acted = torch.zeros(len(rows), down.each[expert].k, dtype=x.dtype)
        made = torch.zeros(len(rows), down.each[expert].n, dtype=x.dtype)
        one = matmul(f"expert {expert} up", x[rows], gate_up.each[expert], inner, part=device.part)
        one.then(_activate(device, inner, acted, spec))
        one.then(matmul(f"expert {expert} down", acted, down.each[expert], made, part=device.part))
        one.add(_deliver(expert, made, out, (rows, place), one.sinks()))
        graph.beside(one)
    return graph, out


def _activate(
    device: SimDevice, inner: torch.Tensor, acted: torch.Tensor, spec: MoESpec
) -> Program:
    def work(start: int, stop: int) -> None:
        acted[start:stop] = gated(inner[start:stop], spec.activation)

    return by_rows("act", len(inner), inner.shape[1] * 4, work, part=device.part)


def _deliver(
    expert: int,
    made: torch.Tensor,
    out: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor],
    after: tuple[int, ...],
) -> MicroTask:
    def run() -> None:
        out[where] = made.float()

    size = made.numel() * 4
    return MicroTask(
        unit="vector",
        label=f"expert {expert} scatter",
        vector_bytes=size,
        l2_bytes=size,
        after=after,
        run=run,
    )
