"""Whether a stored weight is whole: bytes, scales and order against format and shape."""

from __future__ import annotations

from math import prod

import numpy as np

from halogen_core.errors import ModelError
from halogen_core.spi.float8 import FLOAT8, check_float8
from halogen_core.spi.formats import FORMATS, WeightFormat
from halogen_core.spi.operations import QuantTensor, misfit

_SCALED = {
    "INT4": WeightFormat("INT4", 2, 1),
    "W8A16": WeightFormat("W8A16", 1, 1),
    "W8A8": WeightFormat("W8A8", 1, 1),
    "MXFP4": WeightFormat("MXFP4", 32, 17),
}
"""What codes take where scales lie beside them (MXFP4: within); 8-bit floats have a check apart."""


def check_weight(tensor: QuantTensor) -> None:
    """Raises `ModelError`: HRT-2410 for an unknown format, HRT-2411 for what does not fit it."""
    if tensor.format in FLOAT8:
        check_float8(tensor)
        return
    form = _SCALED.get(tensor.format) or FORMATS.get(tensor.format)
    if form is None:
        raise ModelError(
            f"tensor `{tensor.name}` has format `{tensor.format}`; known are "
            f"{', '.join((*FORMATS, *_SCALED, *FLOAT8))}",
            code="HRT-2410",
            fix="convert the model to one of these formats",
        )
    expected = form.nbytes(prod(tensor.shape))
    if tensor.shape[-1] % form.block or tensor.data.size != expected:
        raise misfit(tensor, f"expected {expected}, rows of a multiple of {form.block}")
    if tensor.format == "INT4":
        _check_groups(tensor)
    elif tensor.format in ("W8A16", "W8A8"):
        _check_scale(tensor, tensor.shape[:-1])


def _check_groups(tensor: QuantTensor) -> None:
    *lead, k = tensor.shape
    scale = tensor.aux.get("scale", np.zeros(0))
    groups = scale.shape[-1] if scale.ndim else 0
    if groups == 0 or k % groups:
        raise misfit(tensor, f"rows of {k} in equal groups need a scale each")
    _check_scale(tensor, (*lead, groups))
    zero, perm = tensor.aux.get("zero"), tensor.aux.get("perm")
    if zero is not None and zero.shape != scale.shape:
        raise misfit(tensor, f"expected zeros {scale.shape}, one for each scale")
    if perm is not None and not np.array_equal(np.sort(perm), np.arange(k)):
        raise misfit(tensor, f"`perm` is no order of {k} columns")


def _check_scale(tensor: QuantTensor, expected: tuple[int, ...]) -> None:
    if tensor.aux.get("scale", np.zeros(0)).shape != expected:
        raise misfit(tensor, f"expected scales {expected}")
