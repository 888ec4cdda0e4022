"""Mutants that read 8-bit floats in a wrong way, or bytes that mean nothing at all."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from halogen_conformance.mutants.reading import (
    with_activations,
    with_aux,
    with_tensors,
    with_values,
)
from halogen_conformance.mutants.registry import mutant
from halogen_conformance.oracle.formats import stored
from halogen_conformance.oracle.scaled import (
    FLOAT8,
    LARGEST,
    SCALED,
    SUBNORMAL,
    float8_values,
)
from halogen_core.spi import HalogenError, OpSignature, QuantTensor, Support, SupportLevel


def _codes(tensor: QuantTensor) -> Any:
    return float8_values(tensor.data, tensor.format).reshape(tensor.shape)


def _widened(tensor: QuantTensor, height: int, width: int, *, last: bool = False) -> Any:
    """Scales of a matrix under blocks of this size; `last`: the cut ones have the one before."""
    scale, (n, k) = tensor.aux["scale"], tensor.shape[-2:]
    rows, columns = np.arange(n) // height, np.arange(k) // width
    most = (n // height - 1, k // width - 1) if last else (scale.shape[-2] - 1, scale.shape[-1] - 1)
    rows, columns = (np.minimum(i, max(m, 0)) for i, m in zip((rows, columns), most, strict=True))
    return scale[..., rows[:, None], columns[None, :]]


@mutant("L1/*/F8_*-[TR]*@f32", "L2/weights/F8_*", "L3/formats/F8_*")
def float8_biased_as_on_another_part(backend):
    """8-bit floats are read with an exponent that counts from one more (the `fnuz` kind)"""
    with_aux(backend, FLOAT8, scale=lambda scale: scale / 2)


@mutant("L1/linear/F8_E4M3-per-tensor@f32", "L1/linear/F8_E4M3-per-channel@f32")
def float8_scale_inverted(backend):
    """Codes are divided by their scale (files call it an inverse, and mean this one)"""
    with_aux(backend, FLOAT8, scale=lambda scale: 1 / scale)


@mutant("L1/linear/F8_E4M3-per-channel@f32", "L1/linear/F8_E5M2-per-channel@f32")
def float8_one_scale_for_all_outputs(backend):
    """The first output's scale is everybody's"""
    with_aux(backend, FLOAT8, scale=lambda scale: np.broadcast_to(scale[..., :1, :], scale.shape))


@mutant("L1/linear/F8_E4M3-ragged-blocks@f32")
def float8_sides_of_a_block_exchanged(backend):
    """Rows and columns under one scale are exchanged"""

    def values(tensor):
        height, width = (int(size) for size in tensor.aux["block"])
        return _codes(tensor) * _widened(tensor, width, height)

    with_values(backend, FLOAT8, values)


@mutant("L1/linear/F8_E4M3-ragged-blocks@f32")
def float8_cut_blocks_have_a_neighbours_scale(backend):
    """Blocks that are cut at the end have the scale of the whole one before them"""

    def values(tensor):
        height, width = (int(size) for size in tensor.aux["block"])
        return _codes(tensor) * _widened(tensor, height, width, last=True)

    with_values(backend, FLOAT8, values)


@mutant("L1/linear/F8_E4M3-no-scale@f32")
def float8_scale_demanded(backend):
    """A weight without scales is refused"""

    def change(tensor):
        if not tensor.aux:
            raise HalogenError(f"`{tensor.name}` has no scales", code="HRT-2411")
        return tensor

    with_tensors(backend, FLOAT8, change)


@mutant("L1/linear/F8_E4M3-subnormal@f32", "L1/linear/F8_E5M2-subnormal@f32")
def float8_subnormals_are_zero(backend):
    """Codes of exponent 0 are zero"""

    def change(tensor):
        small = (tensor.data & 127) <= SUBNORMAL[tensor.format]
        return attrs.evolve(tensor, data=np.where(small, tensor.data & 128, tensor.data))

    with_tensors(backend, FLOAT8, change)


@mutant("L1/linear/F8_E5M2-T19-K512@f32")
def float8_kinds_exchanged(backend):
    """Both kinds of 8-bit floats are read as e4m3"""

    def change(tensor):
        # no code may be one that this kind has no number for
        data = np.where((tensor.data & 127) == 127, tensor.data - 1, tensor.data)
        return attrs.evolve(tensor, format="F8_E4M3", data=data.astype(np.uint8))

    with_tensors(backend, ("F8_E5M2",), change)


@mutant("L1/linear/F8_E4M3-T19-K512@f32")
def activations_rounded_to_float8(backend):
    """Activations before 8-bit floats are rounded to e4m3, a scale per token"""

    def short(x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    with_activations(backend, "F8_E4M3", short)


# ---------------------------------------------------------------- bytes that mean nothing


@mutant("L2/weights/damaged-*")
def damaged_weights_are_made_up(backend):
    """What cannot be read is taken for zeros"""
    right = backend.pack

    def pack(parts, role):
        try:
            return right(parts, role)
        except HalogenError:
            return right([stored(np.zeros(p.shape), "F32") for p in parts], role)

    backend.pack = pack


@mutant(*(f"L2/weights/damaged-{form}" for form in FLOAT8))
def codes_that_are_no_numbers_pass(backend):
    """Codes for NaN are computed with, as their bits would go on"""

    def change(tensor):
        sign = tensor.data & 128
        size = np.minimum(tensor.data & 127, LARGEST[tensor.format])
        return attrs.evolve(tensor, data=sign | size)

    with_tensors(backend, FLOAT8, change)


@mutant("L2/weights/unclaimed")
def unclaimed_formats_are_read_all_the_same(backend):
    """Formats that `weight_formats` does not name are packed"""
    claims = backend.capabilities()
    own = {k: v for k, v in claims.weight_formats.items() if k not in SCALED}
    backend.capabilities = lambda: attrs.evolve(claims, weight_formats=own)


@mutant("L2/weights/unclaimed")
def unclaimed_formats_are_promised(backend):
    """`supports` says yes to a format that `weight_formats` does not name and `pack` refuses"""
    unclaimed_formats_are_read_all_the_same(backend)
    right, supports = backend.pack, backend.supports

    def pack(parts, role):
        if any(part.format in SCALED for part in parts):
            raise HalogenError("not here", code="HRT-2011")
        return right(parts, role)

    def promised(signature: OpSignature) -> Support:
        given = supports(signature)
        return (
            given if signature.weight_format not in SCALED else Support(level=SupportLevel.NATIVE)
        )

    backend.pack, backend.supports = pack, promised
