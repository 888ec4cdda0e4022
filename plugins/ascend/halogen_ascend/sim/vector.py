"""Element-wise and row-wise work on the vector cores, rows divided evenly among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from halogen_ascend.sim.profiles import Profile
from halogen_ascend.sim.tasks import MicroTask, Program, split
from halogen_core.spi import Activation

RowWork = Callable[[int, int], None]


def by_rows(
    op: str, rows: int, row_bytes: int, work: RowWork, *, part: Profile, hbm_bytes: int = 0
) -> Program:
    """`work(start, stop)` over ranges of rows, one task each; `row_bytes` read and written per row.

    Activations are counted as L2 traffic; `hbm_bytes` per row only where a row comes from HBM.
    """
    program = Program(op)
    for start, stop in split(rows, part.vector_cores):
        program.add(
            MicroTask(
                unit="vector",
                label=f"{op} rows {start}:{stop}",
                vector_bytes=(stop - start) * row_bytes,
                l2_bytes=(stop - start) * row_bytes,
                hbm_bytes=(stop - start) * hbm_bytes,
                run=partial(work, start, stop),
            )
        )
    return program


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def gated(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """`act(gate) * up`, gate in the first half, float32."""
    gate, up = gate_up.float().chunk(2, -1)
    if kind is Activation.SILU:
        return torch.nn.functional.silu(gate) * up
    if kind is Activation.GELU_TANH:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
