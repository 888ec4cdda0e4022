"""A sound backend that rounds activations to 8 bits and says so, and what must not pass as that."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import attrs
import torch
from torch import Tensor

from halogen_conformance.mutants.registry import mutant
from halogen_conformance.oracle.formats import DENSE
from halogen_core.spi import TorchBackend, TorchOps

BLOCK = 32
CASES = ("L1/linear/Q8_0-T19-K512@f32", "L1/mlp/Q4_K-T3@f32", "L1/logits/Q6_K-R3@f32")


def rounded(x: Tensor, largest: int = 127, block: int = BLOCK) -> Tensor:
    """Each block of the last axis as scale times a whole number up to `largest`."""
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / largest
    return (torch.round(blocks / scale.clamp_min(1e-30)) * scale).flatten(-2)


class EightBitOps(TorchOps):
    """Products with quantised weights over rounded activations."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.quantised: WeakSet = WeakSet()
        self.rounded: Callable[[Tensor], Tensor] = rounded

    def linear(self, x, weight, *, bias=None):
        return super().linear(self._met(x, weight), weight, bias=bias)

    def logits(self, x, weight, *, scale=1.0, softcap=None):
        return super().logits(self._met(x, weight), weight, scale=scale, softcap=softcap)

    def _met(self, x, weight):
        return self.rounded(x) if weight in self.quantised else x


class SoundEightBit(TorchBackend):
    """What these mutants are made from."""

    torch_is_native = True
    ops_class = EightBitOps

    def capabilities(self):
        return attrs.evolve(super().capabilities(), quantized_activations=True)

    def pack(self, parts, role):
        weight = super().pack(parts, role)
        if any(part.format not in DENSE for part in parts):
            self.ops.quantised.add(weight)
        return weight


@mutant(*CASES, "L3/formats/Q8_0", eight_bit=True)
def activations_of_four_bits(backend):
    """8-bit activations are declared, 4-bit ones computed"""
    backend.ops.rounded = lambda x: rounded(x, largest=7)


@mutant(CASES[0], eight_bit=True)
def activations_of_seven_bits(backend):
    """8-bit activations are declared, but one of the bits is never used"""
    backend.ops.rounded = lambda x: rounded(x, largest=63)


@mutant("L1/linear/Q8_0-loud-block@f32", eight_bit=True)
def one_scale_for_a_row(backend):
    """Activations are rounded with one scale for the whole row"""
    backend.ops.rounded = lambda x: rounded(x, block=x.shape[-1])


@mutant(*CASES, eight_bit=True)
def scale_of_another_block(backend):
    """A block's 8-bit codes are read with the scale of the block before it"""

    def shifted(x):
        scale = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1, keepdim=True).clamp_min(1e-30)
        return (rounded(x).unflatten(-1, (-1, BLOCK)) * (scale.roll(1, -2) / scale)).flatten(-2)

    backend.ops.rounded = shifted


@mutant("L1/linear/Q8_0-T19-K512@f32", eight_bit=True)
def last_block_lost(backend):
    """The last block of rounded activations is not summed"""

    def shortened(x):
        out = rounded(x)
        out[..., -BLOCK:] = 0
        return out

    backend.ops.rounded = shortened


@mutant("L1/linear/F32-T17-K256-N100@f32", "L1/linear/F16-T19-K512@f32", eight_bit=True)
def float_weights_rounded_too(backend):
    """Activations are rounded before weights that are not quantised"""
    pack = backend.pack

    def packed(parts, role):
        weight = pack(parts, role)
        backend.ops.quantised.add(weight)
        return weight

    backend.pack = packed


@mutant(*CASES[:1])
def activations_rounded_unsaid(backend):
    """Activations are rounded to 8 bits and `quantized_activations` is not declared"""
    linear = backend.ops.linear
    backend.ops.linear = lambda x, w, *, bias=None: linear(rounded(x), w, bias=bias)
