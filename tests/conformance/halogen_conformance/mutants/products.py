"""Mutants of linear, mlp, moe and logits."""

from __future__ import annotations

import attrs
import torch

from halogen_conformance.mutants.registry import mutant


@mutant("L1/linear/bias@f32")
def bias_lost(backend):
    """The bias is not added"""
    right = backend.ops.linear

    def linear(x, weight, *, bias=None):
        return right(x, weight)

    backend.ops.linear = linear


@mutant("L1/linear/F32-T1-K896-N128@f32")
def tail_of_k_lost(backend):
    """Only whole tiles of 512 inputs are summed"""

    def linear(x, weight, *, bias=None):
        k = max(x.shape[-1] // 512 * 512, min(512, x.shape[-1]))
        out = x[:, :k] @ weight.payload[:, :k].T
        return out if bias is None else out + bias.payload

    backend.ops.linear = linear


@mutant("L1/linear/F32-T17-K256-N100@f32")
def edge_of_n_lost(backend):
    """Outputs beyond the last whole tile of 32 are zero"""
    right = backend.ops.linear

    def linear(x, weight, *, bias=None):
        out = right(x, weight, bias=bias)
        whole = out.shape[-1] // 32 * 32
        out[:, whole:] = 0
        return out

    backend.ops.linear = linear


@mutant("L1/linear/F32-T17-K256-N100@f32")
def products_in_half_precision(backend):
    """float32 inputs are multiplied in float16"""

    def linear(x, weight, *, bias=None):
        out = (x.half() @ weight.payload.half().T).float()
        return out if bias is None else out + bias.payload

    backend.ops.linear = linear


@mutant("L1/linear/three-parts@f32")
def parts_in_another_order(backend):
    """Fused parts come out in reverse"""
    right = backend.pack

    def pack(parts, role):
        return right(parts[::-1], role)

    backend.pack = pack


@mutant("L1/linear/Q4_K-T1-K256@f32", "L1/linear/Q4_0-T1-K256@f32")
def one_token_takes_a_wrong_path(backend):
    """The path for a single token is off by a part in a thousand"""
    right = backend.ops.linear

    def linear(x, weight, *, bias=None):
        out = right(x, weight, bias=bias)
        return out * 1.001 if len(x) == 1 else out

    backend.ops.linear = linear


@mutant("L1/linear/nan@f32")
def linear_swallows_nan(backend):
    """NaN inputs become zero"""
    right = backend.ops.linear
    backend.ops.linear = lambda x, w, *, bias=None: right(x.nan_to_num(), w, bias=bias)


@mutant("L1/linear/F32-T17-K256-N100@f32")
def different_every_time(backend):
    """Sums in an order that changes from call to call, yet `deterministic` is claimed"""
    right = backend.ops.linear

    def linear(x, weight, *, bias=None):
        order = torch.randperm(x.shape[-1])
        shuffled = attrs.evolve(weight, payload=weight.payload[:, order])
        return right(x[:, order].contiguous(), shuffled, bias=bias)

    backend.ops.linear = linear


@mutant("L1/mlp/silu-T17@f32")
def mlp_gate_and_up_exchanged(backend):
    """The fused MLP exchanges gate and up"""

    def mlp(x, gate_up, down, kind):
        inner = backend.ops.linear(x, gate_up)
        return backend.ops.linear(
            backend.ops.gated_act(inner.roll(inner.shape[-1] // 2, -1), kind), down
        )

    backend.ops.mlp = mlp


def _with_routing(backend, change):
    right = backend.ops.moe

    def moe(x, router, gate_up, down, spec):
        return right(x, router, gate_up, down, change(spec))

    backend.ops.moe = moe


@mutant("L1/moe/E8-k2-T17@f32")
def experts_not_normalised(backend):
    """The weights of the chosen experts are not divided by their sum"""
    _with_routing(backend, lambda spec: attrs.evolve(spec, normalize_top_k=False))


@mutant("L1/moe/scaled@f32")
def expert_scale_lost(backend):
    """The factor on expert weights is ignored"""
    _with_routing(backend, lambda spec: attrs.evolve(spec, weight_scale=1.0))


@mutant("L1/moe/sigmoid@f32")
def gating_always_softmax(backend):
    """Sigmoid gating is taken for softmax"""
    _with_routing(backend, lambda spec: attrs.evolve(spec, gating="softmax"))


@mutant("L1/moe/E128-k8-T5@f32")
def one_expert_too_few(backend):
    """The k-th expert is dropped"""
    _with_routing(backend, lambda spec: attrs.evolve(spec, top_k=max(1, spec.top_k - 1)))


@mutant("L1/moe/ties@f32")
def ties_go_to_the_last_expert(backend):
    """Among equal scores the highest expert wins"""
    right = backend.ops.moe

    def moe(x, router, gate_up, down, spec):
        def flipped(weight):
            return attrs.evolve(weight, payload=weight.payload.flip(0))

        return right(x, flipped(router), flipped(gate_up), flipped(down), spec)

    backend.ops.moe = moe


@mutant("L1/logits/R7@f32")
def logits_rounded(backend):
    """Logits are rounded to float16 on their way (met while building)"""
    right = backend.ops.logits

    def logits(x, weight, *, scale=1.0, softcap=None):
        return right(x, weight, scale=scale, softcap=softcap).half().float()

    backend.ops.logits = logits


@mutant("L1/logits/scaled-softcap@f32")
def softcap_before_scale(backend):
    """The soft cap is applied before the scale"""
    right = backend.ops.logits

    def logits(x, weight, *, scale=1.0, softcap=None):
        return right(x, weight, softcap=softcap) * scale

    backend.ops.logits = logits


@mutant("L1/logits/softcap@f32")
def final_softcap_lost(backend):
    """The soft cap on logits is ignored"""
    right = backend.ops.logits
    backend.ops.logits = lambda x, w, *, scale=1.0, softcap=None: right(x, w, scale=scale)
