"""Mutants of embed, norms, add, gated_act and select_rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from halogen_conformance.mutants.registry import mutant
from halogen_core.spi import Activation


@mutant("L1/rms_norm/tiny@f32")
def norm_without_eps(backend):
    """eps is left out of the norm"""
    right = backend.ops.rms_norm
    backend.ops.rms_norm = lambda x, weight, *, eps: right(x, weight, eps=0.0)


@mutant("L1/rms_norm/tiny@f32")
def norm_eps_outside_the_root(backend):
    """eps is added to the root mean square instead of the mean square"""

    def rms_norm(x, weight, *, eps):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight.payload

    backend.ops.rms_norm = rms_norm


@mutant("L1/rms_norm/large@f16", dtype="f16")
def norm_sums_in_half_precision(backend):
    """Squares are summed in float16 and overflow"""

    def rms_norm(x, weight, *, eps):
        x = x.half()
        mean = (x * x).mean(-1, keepdim=True)
        return (x / (mean + eps).sqrt() * weight.payload).half()

    backend.ops.rms_norm = rms_norm


@mutant("L1/rms_norm/nan@f32")
def norm_swallows_nan(backend):
    """NaN becomes zero"""
    right = backend.ops.rms_norm
    backend.ops.rms_norm = lambda x, weight, *, eps: right(x.nan_to_num(), weight, eps=eps)


@mutant("L1/rms_norm/T130-H64@f32")
def norm_over_the_batch(backend):
    """The mean runs over all rows of the step: results depend on who shares it"""

    def rms_norm(x, weight, *, eps):
        return x / (x.square().mean() + eps).sqrt() * weight.payload

    backend.ops.rms_norm = rms_norm


@mutant("L1/add_rms_norm/T17-H64@f32")
def fused_norm_forgets_the_sum(backend):
    """add_rms_norm returns the residual it was given, not the sum"""
    right = backend.ops.add_rms_norm

    def add_rms_norm(x, residual, weight, *, eps):
        kept = residual.clone()
        return right(x, residual, weight, eps=eps)[0], kept

    backend.ops.add_rms_norm = add_rms_norm


@mutant("L1/add/T17-H100@f32")
def residual_added_twice(backend):
    """`x + 2y`"""
    right = backend.ops.add
    backend.ops.add = lambda x, y: right(right(x, y), y)


@mutant("L1/embed/scaled@f32")
def embedding_scale_lost(backend):
    """Gemma's scale on embeddings is ignored"""
    right = backend.ops.embed

    def embed(ids, table, *, scale=1.0):
        return right(ids, table)

    backend.ops.embed = embed


@mutant("L1/embed/vocab151936@f32")
def ids_of_16_bits(backend):
    """Token ids wrap at 65,536"""
    right = backend.ops.embed
    backend.ops.embed = lambda ids, table, *, scale=1.0: right(ids % 65536, table, scale=scale)


@mutant("L1/gated_act/silu-T17-F100@f32")
def gate_and_up_exchanged(backend):
    """The activation is applied to the second half"""
    right = backend.ops.gated_act
    backend.ops.gated_act = lambda x, kind: right(x.roll(x.shape[-1] // 2, -1), kind)


@mutant("L1/gated_act/gelu_tanh-T17-F100@f32")
def gelu_by_erf(backend):
    """The exact GELU instead of the tanh approximation that the models were trained with"""
    right = backend.ops.gated_act

    def gated_act(x, kind):
        if kind is not Activation.GELU_TANH:
            return right(x, kind)
        gate, up = x.chunk(2, -1)
        return F.gelu(gate) * up

    backend.ops.gated_act = gated_act


@mutant("L1/gated_act/swiglu_oai-large@f32")
def swiglu_unclamped(backend):
    """gpt-oss's clamp to 7 is missing"""
    right = backend.ops.gated_act

    def gated_act(x, kind):
        if kind is not Activation.SWIGLU_OAI:
            return right(x, kind)
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    backend.ops.gated_act = gated_act


@mutant("L1/select_rows/some@f32")
def rows_counted_from_the_end(backend):
    """Rows are taken from the end of the step"""
    backend.ops.select_rows = lambda x, meta: x.flip(0).index_select(0, meta.logit_rows)


@mutant("L1/gated_act/silu-T17-F100@f32")
def input_overwritten(backend):
    """gated_act writes into its input, which it must leave alone"""
    right = backend.ops.gated_act

    def gated_act(x, kind):
        out = right(x, kind)
        x[:, : out.shape[-1]] = out
        return out

    backend.ops.gated_act = gated_act


@mutant("L1/rms_norm/T17-H896@f32")
def output_left_from_before(backend):
    """Rows after the 16th are not written: memory of somebody else's shows"""
    right = backend.ops.rms_norm

    def rms_norm(x, weight, *, eps):
        out = torch.empty_like(x)
        out[:16] = right(x[:16], weight, eps=eps)
        return out

    backend.ops.rms_norm = rms_norm
