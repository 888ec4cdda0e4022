"""Mutants that read int8 weights, or round what meets them, in a wrong way."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from halogen_conformance.mutants.eight_bit import rounded
from halogen_conformance.mutants.reading import (
    with_activations,
    with_aux,
    with_tensors,
    with_values,
)
from halogen_conformance.mutants.registry import mutant

INT8 = ("W8A16", "W8A8")


@mutant("L1/*/W8A*@f32", "L2/weights/W8A*", "L3/formats/W8A*")
def int8_scale_of_another_output(backend):
    """Int8 outputs have their neighbour's scale"""
    with_aux(backend, INT8, scale=lambda scale: np.roll(scale, 1, -1))


@mutant("L1/linear/W8A16-T19-K512@f32")
def int8_codes_unsigned(backend):
    """Int8 codes are read as 0 to 255"""

    def values(tensor):
        codes = tensor.data.reshape(tensor.shape).astype(np.float64)
        return codes * tensor.aux["scale"][..., None]

    with_values(backend, INT8, values)


@mutant("L1/linear/W8A16-T1-K256@f32")
def int8_lowest_code_cut(backend):
    """Code -128 becomes -127"""
    with_tensors(
        backend,
        INT8,
        lambda t: attrs.evolve(t, data=np.where(t.data == 128, 129, t.data).astype(np.uint8)),
    )


@mutant("L1/linear/W8A8-loud-and-silent-tokens@f32")
def one_activation_scale_for_all_tokens(backend):
    """Activations before W8A8 are rounded with one scale for the whole step"""
    with_activations(backend, "W8A8", lambda x: rounded(x.flatten(), 127, x.numel()).view_as(x))


@mutant("L1/linear/W8A8-loud-and-silent-tokens@f32")
def silent_token_divides_by_zero(backend):
    """A token of zeros has a scale of zero, and what is divided by it is NaN"""

    def divided(x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch.round(x / scale) * scale

    with_activations(backend, "W8A8", divided)


@mutant("L1/linear/W8A8-T19-K512@f32")
def token_rounding_of_seven_bits(backend):
    """Activations before W8A8 are rounded to 7 bits"""
    with_activations(backend, "W8A8", lambda x: rounded(x, 63, x.shape[-1]))
