"""Mutants that lie about what they can do and where it runs."""

from __future__ import annotations

import attrs

from halogen_conformance.mutants.registry import mutant
from halogen_core.spi import Support, SupportLevel, Telemetry, UnsupportedOp


@mutant("L1/attention/heads-uneven@f32", "L1/moe/k-above-experts@f32")
def supports_says_yes_to_everything(backend):
    """`supports` promises calls that fail"""
    backend.supports = lambda signature: Support(level=SupportLevel.NATIVE)


@mutant("L1/attention/D96@f32")
def supports_says_no_to_what_works(backend):
    """`supports` denies head dims that work"""
    right = backend.supports

    def supports(signature):
        if signature.attention is not None and signature.attention.head_dim % 64:
            return Support(level=SupportLevel.NO, reasons=("head dim is not a multiple of 64",))
        return right(signature)

    backend.supports = supports


@mutant("L1/attention/D96@f32")
def refuses_without_having_said_so(backend):
    """A call that `supports` promised raises UnsupportedOp"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        if spec.head_dim % 64:
            raise UnsupportedOp(f"head dim is {spec.head_dim}, not a multiple of 64")
        return right(q, kv, layer, meta, spec, sinks=sinks)

    backend.ops.attention = attention


@mutant("L1/moe/k-above-experts@f32")
def refuses_without_reasons(backend):
    """`supports` says no and not why"""
    right = backend.supports

    def supports(signature):
        answer = right(signature)
        return attrs.evolve(answer, reasons=())

    backend.supports = supports


@mutant("L1/moe/k-above-experts@f32")
def wrong_calls_accepted(backend):
    """What `supports` denies is done all the same (met while building)"""
    right = backend.ops.moe

    def moe(x, router, gate_up, down, spec):
        k = min(spec.top_k, spec.num_experts)
        return right(x, router, gate_up, down, attrs.evolve(spec, top_k=k))

    backend.ops.moe = moe


@mutant("L1/attention/heads-uneven@f32")
def wrong_calls_fail_untyped(backend):
    """What `supports` denies fails somewhere inside, not as UnsupportedOp (met while building)"""

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        raise RuntimeError("shape '[1, 5, 2, 1, 64]' is invalid for input of size 960")

    backend.ops.attention = attention


@mutant("L1/linear/bias@f32")
def supports_changes_its_mind(backend):
    """The same question is answered differently the second time"""
    count = 0

    def supports(signature):
        nonlocal count
        count += 1
        level = SupportLevel.NATIVE if count % 2 else SupportLevel.FALLBACK
        return Support(level=level, reasons=("it depends",))

    backend.supports = supports


@mutant("L2/placement/complete")
def placement_forgets_an_op(backend):
    """The placement report leaves an op out"""
    right = backend.placement
    backend.placement = lambda: right()[1:]


@mutant("L2/placement/agrees")
def placement_hides_fallbacks(backend):
    """Everything is called native in the report while `supports` tells of fallbacks"""
    right = backend.supports

    def supports(signature):
        answer = right(signature)
        if answer.level is SupportLevel.NATIVE:
            return Support(level=SupportLevel.FALLBACK, reasons=("torch on the host",))
        return answer

    backend.supports = supports


@mutant("L2/placement/counted")
def silent_fallback(backend):
    """An op that is called native runs by fallback, and its own counter tells"""
    right, count = backend.ops.linear, 0

    def linear(x, weight, *, bias=None):
        nonlocal count
        count += 1
        return right(x, weight, bias=bias)

    backend.ops.linear = linear
    backend.counters = lambda: Telemetry(counters={"fallback_linear": float(count)})


@mutant("L2/telemetry/numbers")
def counters_not_numbers(backend):
    """A counter is NaN"""
    backend.counters = lambda: Telemetry(counters={"steps": float("nan")})
