"""From stored tensors to one weight on the device: what is checked, and how parts are joined."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from halogen_core.spi import FORMATS, ModelError, QuantTensor
from halogen_triton.linear import Stacked
from halogen_triton.planes import Planes, concatenate


def check(part: QuantTensor) -> None:
    """Raises `ModelError` when the bytes do not fit format and shape."""
    form = FORMATS.get(part.format)
    wrong = form is None or part.shape[-1] % form.block
    if form is not None and not wrong:
        wrong = part.data.size != form.nbytes(prod(part.shape))
    if wrong:
        raise ModelError(
            f"tensor `{part.name}` of format `{part.format}` and shape {part.shape} has "
            f"{part.data.size} bytes, which do not fit each other",
            code="HRT-2411",
            fix="the file is damaged or was converted wrongly; fetch or convert it again",
        )


def join(parts: list[Tensor | Planes]) -> Tensor | Planes | Stacked:
    """One weight of several parts: runs of one format become one weight."""
    runs: list[list[Tensor | Planes]] = []
    for part in parts:
        if runs and _kind(runs[-1][0]) == _kind(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined = tuple(_concatenate(run) for run in runs)
    return joined[0] if len(joined) == 1 else Stacked(joined)


def _kind(part: Tensor | Planes) -> str:
    return part.format.name if isinstance(part, Planes) else "dense"


def _concatenate(run: list[Tensor | Planes]) -> Tensor | Planes:
    if len(run) == 1:
        return run[0]
    planes = [part for part in run if isinstance(part, Planes)]
    if planes:
        return concatenate(planes)
    return torch.cat([part for part in run if isinstance(part, Tensor)], -2)
