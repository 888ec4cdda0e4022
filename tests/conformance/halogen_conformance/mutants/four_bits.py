"""Mutants that read INT4 or MXFP4 in a wrong way."""

from __future__ import annotations

import attrs
import numpy as np

from halogen_conformance.mutants.reading import with_aux, with_tensors
from halogen_conformance.mutants.registry import mutant


@mutant("L1/*/INT4-*@f32", "L2/weights/INT4-*", "L3/formats/*INT4")
def nibbles_exchanged(backend):
    """The first of two int4 codes is read from the high nibble"""
    with_tensors(
        backend, ("INT4",), lambda t: attrs.evolve(t, data=t.data // 16 | t.data % 16 * 16)
    )


@mutant("L1/linear/INT4-T1-K256@f32")
def int4_codes_signed(backend):
    """Int4 codes are read as two's complement, as some files have them"""
    with_tensors(backend, ("INT4",), lambda t: attrs.evolve(t, data=t.data ^ 0x88))


@mutant("L1/linear/INT4-T19-K512@f32")
def int4_zeros_ignored(backend):
    """8 is subtracted from int4 codes whatever zeros are stored"""
    with_aux(backend, ("INT4",), zero=lambda zero: np.full_like(zero, 8))


@mutant("L1/linear/INT4-T19-K512@f32")
def int4_zeros_one_more(backend):
    """Zeros are taken for GPTQ's first form, which stores them less one"""
    with_aux(backend, ("INT4",), zero=lambda zero: (zero + 1) % 16)


@mutant("L1/linear/INT4-symmetric@f32")
def int4_without_zeros_unsigned(backend):
    """Where no zeros are stored nothing is subtracted"""

    def change(tensor):
        zero = tensor.aux.get("zero", np.zeros(tensor.aux["scale"].shape, np.uint8))
        return attrs.evolve(tensor, aux={**tensor.aux, "zero": zero})

    with_tensors(backend, ("INT4",), change)


@mutant("L1/linear/INT4-symmetric@f32")
def int4_groups_always_32(backend):
    """Scales are looked up as if every group had 32 columns"""

    def change(tensor):
        blocks = tensor.shape[-1] // 32
        aux = dict(tensor.aux)
        for name in aux.keys() & {"scale", "zero"}:
            aux[name] = aux[name][..., np.arange(blocks) % aux[name].shape[-1]]
        return attrs.evolve(tensor, aux=aux)

    with_tensors(backend, ("INT4",), change)


@mutant("L1/linear/INT4-one-group@f32")
def int4_group_per_output_exchanged(backend):
    """With one group per output, outputs have their neighbour's scale"""

    def other(table):
        return np.roll(table, 1, 0) if table.shape[-1] == 1 else table

    with_aux(backend, ("INT4",), scale=other, zero=other)


@mutant("L1/linear/INT4-T1-K256@f32")
def int4_scale_of_the_group_before(backend):
    """Codes of a group are multiplied with the scale of the group before it"""
    with_aux(backend, ("INT4",), scale=lambda scale: np.roll(scale, 1, -1))


@mutant("L1/linear/INT4-float32-scales@f32")
def int4_scales_in_bf16(backend):
    """Scales of float32 are cut to bf16"""

    def short(scale):
        bits = np.asarray(scale, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32)

    with_aux(backend, ("INT4",), scale=short)


@mutant("L1/linear/INT4-act-order@f32")
def act_order_ignored(backend):
    """Columns are taken to be in the order of inputs"""

    def change(tensor):
        return attrs.evolve(tensor, aux={k: v for k, v in tensor.aux.items() if k != "perm"})

    with_tensors(backend, ("INT4",), change)


@mutant("L1/linear/INT4-act-order@f32")
def act_order_inverted(backend):
    """Stored column perm[j] multiplies input j"""
    with_aux(backend, ("INT4",), perm=lambda perm: np.argsort(perm).astype(np.int32))


@mutant("L1/linear/INT4-three-act-orders@f32")
def first_parts_act_order_for_all(backend):
    """Parts of one weight are all computed in the first one's order of columns"""
    right = backend.pack

    def pack(parts, role):
        first = parts[0].aux.get("perm")
        changed = [
            attrs.evolve(p, aux={**p.aux, "perm": first}) if "perm" in p.aux else p for p in parts
        ]
        return right(changed, role)

    backend.pack = pack


@mutant("L1/*/MXFP4-*@f32", "L2/weights/MXFP4-*", "L3/formats/*MXFP4")
def mxfp4_exponent_off_by_one(backend):
    """Exponents of MXFP4 count from 128"""

    def change(tensor):
        blocks = tensor.data.reshape(-1, 17).copy()
        blocks[:, 0] -= 1
        return attrs.evolve(tensor, data=blocks.reshape(-1))

    with_tensors(backend, ("MXFP4",), change)


@mutant("L1/linear/MXFP4-T1-K256@f32")
def mxfp4_neighbours_in_a_byte(backend):
    """The two elements of a byte are taken for neighbours, not 16 apart"""

    def change(tensor):
        blocks = tensor.data.reshape(-1, 17).copy()
        nibbles = np.stack([blocks[:, 1:] % 16, blocks[:, 1:] // 16], -1).reshape(-1, 32)
        blocks[:, 1:] = nibbles[:, :16] | nibbles[:, 16:] * 16
        return attrs.evolve(tensor, data=blocks.reshape(-1))

    with_tensors(backend, ("MXFP4",), change)
