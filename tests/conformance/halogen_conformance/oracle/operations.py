"""Every op in numpy, dense and unpaged; with another `Arithmetic`, the same-dtype reference.

Shape letters as in `halogen_core.spi`. Inputs and results are numpy arrays of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from halogen_conformance.oracle.numbers import EXACT, Arithmetic, Values
from halogen_core.spi import Activation, AttentionSpec, MoESpec, RopeSpec, RopeStyle


def embed(ids: Values, table: Values, scale: float = 1.0, a: Arithmetic = EXACT) -> Values:
    """Rows of table [V, H] for ids [T], times scale."""
    return a.store(a.take(table)[ids] * a.take(np.float64(scale)))


def rms_norm(x: Values, weight: Values, eps: float, a: Arithmetic = EXACT) -> Values:
    """Over the last axis (Zhang and Sennrich, 2019)."""
    x = a.take(x)
    square = np.mean(x * x, axis=-1, keepdims=True)
    return a.store(x / np.sqrt(square + a.take(np.float64(eps))) * a.take(weight))


def add(x: Values, y: Values, a: Arithmetic = EXACT) -> Values:
    """`x + y`."""
    return a.store(a.take(x) + a.take(y))


def linear(x: Values, weight: Values, bias: Values | None = None, a: Arithmetic = EXACT) -> Values:
    """`x @ weight.T + bias`."""
    out = a.meet(x) @ a.take(weight).T
    return a.store(out if bias is None else out + a.take(bias))


def rope(x: Values, positions: Values, spec: RopeSpec, a: Arithmetic = EXACT) -> Values:
    """Rotate x [T, heads, D] as complex numbers (Su et al., RoFormer, 2021)."""
    half = spec.dim // 2
    angle = positions.astype(np.float64)[:, None] * np.asarray(spec.inv_freq, np.float64)
    turn = np.exp(1j * angle)[:, None, :] * spec.attention_factor
    out = a.take(x).astype(np.float64).copy()
    if spec.style is RopeStyle.NEOX:
        first, second = slice(0, half), slice(half, spec.dim)
    else:
        first, second = slice(0, spec.dim, 2), slice(1, spec.dim, 2)
    turned = (out[..., first] + 1j * out[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return a.store(out)


def qkv_rope(
    qkv: Values,
    positions: Values,
    spec: AttentionSpec,
    q_norm: Values | None = None,
    k_norm: Values | None = None,
    a: Arithmetic = EXACT,
) -> tuple[Values, Values, Values]:
    """Q [T, Hq, D], K and V [T, Hkv, D] as they enter attention and the cache."""
    heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    parts = a.take(qkv).reshape(len(qkv), heads + 2 * kv, dim)
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv], parts[:, heads + kv :]
    if q_norm is not None:
        q = rms_norm(q, q_norm, spec.norm_eps, a)
    if k_norm is not None:
        k = rms_norm(k, k_norm, spec.norm_eps, a)
    if spec.rope is not None:
        q, k = rope(q, positions, spec.rope, a), rope(k, positions, spec.rope, a)
    return q, k, a.take(v)


def attention_one(
    q: Values,
    keys: Values,
    values: Values,
    spec: AttentionSpec,
    sinks: Values | None = None,
    a: Arithmetic = EXACT,
) -> Values:
    """q [n, Hq, D] at the end of a sequence of s keys and values [s, Hkv, D]: [n, Hq, D]."""
    n, s = len(q), len(keys)
    if n == 0:
        return a.take(q)
    group = spec.num_heads // spec.num_kv_heads
    k = np.repeat(a.operand(keys), group, axis=1).transpose(1, 2, 0)
    v = np.repeat(a.operand(values), group, axis=1).transpose(1, 0, 2)
    logits = a.between(a.take(q).transpose(1, 0, 2) @ k * a.take(np.float64(spec.scale)))
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    query, key = np.arange(s - n, s)[:, None], np.arange(s)[None, :]
    seen = key <= query
    if spec.window is not None:
        seen &= key > query - spec.window
    logits = np.where(seen, logits, -np.inf)
    peak = logits.max(-1, keepdims=True)
    if sinks is not None:
        sink = a.take(sinks)[:, None, None]
        peak = np.maximum(peak, sink)
    weights = np.exp(logits - peak)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - peak)
    weights = a.store(weights / total)
    return a.store((weights @ v).transpose(1, 0, 2))


def attention(
    q: Values,
    keys: Sequence[Values],
    values: Sequence[Values],
    spec: AttentionSpec,
    sinks: Values | None = None,
    a: Arithmetic = EXACT,
    *,
    starts: Sequence[int],
) -> Values:
    """Sequence s owns rows starts[s] to starts[s + 1] of q [T, Hq D]: [T, Hq D]."""
    heads = np.asarray(q).reshape(len(q), spec.num_heads, spec.head_dim)
    parts = [
        attention_one(heads[starts[s] : starts[s + 1]], keys[s], values[s], spec, sinks, a)
        for s in range(len(keys))
    ]
    return np.concatenate(parts).reshape(len(q), -1) if parts else a.take(q)


def gated_act(gate_up: Values, kind: Activation, a: Arithmetic = EXACT) -> Values:
    """`act(gate) * up` over [..., 2F]."""
    gate, up = np.split(a.take(gate_up), 2, axis=-1)
    if kind is Activation.SILU:
        return a.store(gate * _sigmoid(gate) * up)
    if kind is Activation.GELU_TANH:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return a.store(0.5 * gate * (1 + np.tanh(inner)) * up)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return a.store(gate * _sigmoid(1.702 * gate) * (up + 1))


def mlp(
    x: Values, gate_up: Values, down: Values, kind: Activation, a: Arithmetic = EXACT
) -> Values:
    """`linear(gated_act(linear(x, gate_up)), down)`."""
    return linear(gated_act(linear(x, gate_up, a=a), kind, a), down, a=a)


def route(logits: Values, spec: MoESpec) -> tuple[Values, Values]:
    """Experts [T, k] and weights [T, k]; ties go to the lower expert."""
    logits = np.asarray(logits, np.float64)
    scores = _sigmoid(logits) if spec.gating == "sigmoid" else _softmax(logits)
    order = np.argsort(-scores, axis=-1, kind="stable")[:, : spec.top_k]
    weights = np.take_along_axis(scores, order, -1)
    if spec.normalize_top_k:
        weights = weights / weights.sum(-1, keepdims=True)
    return order, weights * spec.weight_scale


def moe(
    x: Values,
    router: Values,
    gate_up: Values,
    down: Values,
    spec: MoESpec,
    a: Arithmetic = EXACT,
) -> Values:
    """x [T, H], router [E, H] (never quantised), gate_up [E, 2F, H], down [E, H, F]: [T, H]."""
    experts, weights = route(linear(x, router, a=a.dense), spec)
    out = np.zeros_like(a.take(x))
    for token, (chosen, share) in enumerate(zip(experts, weights, strict=True)):
        for expert, weight in zip(chosen, share, strict=True):
            part = mlp(x[token : token + 1], gate_up[expert], down[expert], spec.activation, a)
            out[token] += a.take(weight) * part[0]
    return a.store(out)


def logits(
    x: Values,
    weight: Values,
    scale: float = 1.0,
    softcap: float | None = None,
    a: Arithmetic = EXACT,
) -> Values:
    """`x @ weight.T * scale`, then softcap; kept in float32, never rounded below."""
    out = a.meet(x) @ a.take(weight).T * scale
    if softcap is not None:
        out = softcap * np.tanh(out / softcap)
    return np.asarray(out, np.float64)


def log_softmax(values: Values) -> Values:
    """Over the last axis."""
    peak = values.max(-1, keepdims=True)
    return values - peak - np.log(np.exp(values - peak).sum(-1, keepdims=True))


def _softmax(values: Values) -> Values:
    weights = np.exp(values - values.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _sigmoid(values: Values) -> Values:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-values))
