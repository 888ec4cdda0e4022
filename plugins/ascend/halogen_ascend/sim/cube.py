"""Matrix products on the cubes: x [T, K] by a packed weight, cut into tiles, one tile a task.

Rows are padded to whole 16-row fractals as the cube does. That makes a row's result independent of
how many rows share the launch, so batches and chunks cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from halogen_ascend.sim.nz import ROWS, c0
from halogen_ascend.sim.profiles import Profile
from halogen_ascend.sim.tasks import MicroTask, Program, split
from halogen_ascend.sim.weights import Weight

ROW_TILE = 256
Epilogue = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Given a tile and its columns n0, n1; returns what to store."""


def gemm_costs(
    m: int, k: int, n: int, *, itemsize: int, blocks: int, label: str = "gemm"
) -> list[MicroTask]:
    """The cost side of [m, k] by [k, n] over `blocks` column tiles, without a computation."""
    return [
        _task(m, k, b - a, itemsize=itemsize, weight_bytes=k * (b - a) * itemsize, label=label)
        for a, b in split(n, blocks, c0(itemsize))
    ]


def matmul(
    op: str,
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor,
    *,
    part: Profile,
    epilogue: Epilogue | None = None,
    accumulate: torch.dtype | None = None,
) -> Program:
    """`out = epilogue(x @ weight.T)`: x [T, K] float, out [T, N]."""
    program = Program(op)
    m = -(-x.shape[0] // ROWS) * ROWS
    operands, wide = _Operands(x, weight), accumulate or weight.accumulate
    for n0, n1 in split(weight.n, part.cube_cores, weight.column_unit):
        for index, (m0, m1) in enumerate(split(m, -(-m // ROW_TILE), ROWS)):
            cost = _task(
                m1 - m0,
                weight.k,
                n1 - n0,
                itemsize=weight.itemsize,
                # later row tiles find the weight tile in L2
                weight_bytes=weight.tile_bytes(n0, n1) if index == 0 else 0,
                label=f"{op} rows {m0}:{m1} cols {n0}:{n1}",
            )

            def run(m0: int = m0, m1: int = m1, n0: int = n0, n1: int = n1) -> None:
                rows, scales = operands.get()
                tile = rows[m0:m1].to(wide) @ weight.tile(n0, n1).to(wide)
                tile = weight.rescale(tile, n0, n1, scales[m0:m1] if scales is not None else None)
                tile = tile[: max(out.shape[0] - m0, 0)]
                out[m0:m1, n0:n1] = epilogue(tile, n0, n1) if epilogue else tile

            program.add(attrs.evolve(cost, run=run))
    return program


class _Operands:
    """Activations as the cube reads them, made when the first tile runs and not before."""

    def __init__(self, x: torch.Tensor, weight: Weight) -> None:
        self._x, self._weight = x, weight
        self._made: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def get(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [T padded, K] and a scale per row where they are int8."""
        if self._made is None:
            self._made = self._weight.activations(pad_rows(self._x))
        return self._made


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """X [T, K] with zero rows up to a whole fractal, float32."""
    short = -x.shape[0] % ROWS
    return torch.nn.functional.pad(x.float(), (0, 0, 0, short)) if short else x.float()


def _task(m: int, k: int, n: int, *, itemsize: int, weight_bytes: int, label: str) -> MicroTask:
    rows = -(-m // ROWS) * ROWS
    return MicroTask(
        unit="cube",
        label=label,
        macs=rows * (-(-k // 16) * 16) * (-(-n // 16) * 16),
        itemsize=itemsize,
        hbm_bytes=weight_bytes + m * n * max(itemsize, 2),
        l2_bytes=m * k * itemsize,
    )
