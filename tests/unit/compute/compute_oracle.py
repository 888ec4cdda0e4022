"""Float64 truth in numpy, dense and token by token, sharing no code with the backend."""

import math

import numpy as np

from halogen_core.spi import RopeStyle


def rms_norm(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(head, position, rope):
    """One head [D] at one position."""
    out = np.array(head, np.float64)
    half = rope.dim // 2
    for pair in range(half):
        a, b = (pair, pair + half) if rope.style is RopeStyle.NEOX else (2 * pair, 2 * pair + 1)
        angle = position * rope.inv_freq[pair]
        c, s = math.cos(angle) * rope.attention_factor, math.sin(angle) * rope.attention_factor
        out[a], out[b] = head[a] * c - head[b] * s, head[a] * s + head[b] * c
    return out


def attention(q, keys, values, spec, first_position, sinks=None):
    """q [n, Hq, D] at first_position.. over keys, values [L, Hkv, D]: [n, Hq, D]."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    out = np.zeros_like(q)
    group = spec.num_heads // spec.num_kv_heads
    for i in range(len(q)):
        position = first_position + i
        start = max(0, position - spec.window + 1) if spec.window else 0
        for head in range(spec.num_heads):
            seen = keys[start : position + 1, head // group]
            scores = seen @ q[i, head] * spec.scale
            if spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[head]) - top))
            out[i, head] = weights @ values[start : position + 1, head // group] / total
    return out


def act(x, kind):
    x = np.asarray(x, np.float64)
    gate, up = np.split(x, 2, axis=-1)
    if kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def moe(x, router, gate_up, down, spec):
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = router.astype(np.float64) @ row
        if spec.gating == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max())
            scores /= scores.sum()
        chosen = sorted(range(spec.num_experts), key=lambda e: (-scores[e], e))[: spec.top_k]
        weights = np.array([scores[e] for e in chosen])
        if spec.normalize_top_k:
            weights /= weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            inner = act(gate_up[expert].astype(np.float64) @ row, spec.activation)
            out[t] += weight * spec.weight_scale * (down[expert].astype(np.float64) @ inner)
    return out


def picks(logits, batch, row):
    """The tokens one row may pick: one, unless the number or top-p falls on a float32 boundary."""
    x = adjusted(logits, batch, row)
    if batch.temperature[row] == 0:
        return {int(x.argmax())}
    near = (-2e-6, 0, 2e-6)
    return {_drawn(x, batch, row, number, share) for number in near for share in near}


def pick(logits, batch, row):
    x = adjusted(logits, batch, row)
    return int(x.argmax()) if batch.temperature[row] == 0 else _drawn(x, batch, row, 0, 0)


def adjusted(logits, batch, row):
    """Logits after penalties, bias and mask, by looping as the docs say."""
    x = np.asarray(logits, np.float32).copy()
    for at in range(batch.history_start[row], batch.history_start[row + 1]):
        token, count = batch.history_ids[at], batch.history_counts[at]
        repetition = batch.repetition_penalty[row]
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= batch.frequency_penalty[row] * count
        x[token] -= batch.presence_penalty[row] * (count > 0)
    for at in range(batch.bias_start[row], batch.bias_start[row + 1]):
        x[batch.bias_ids[at]] += batch.bias_values[at]
    if batch.mask is not None:
        for token in range(len(x)):
            if not int(batch.mask[row, token // 32]) >> (token % 32) & 1:
                x[token] = -np.inf
    return x


def _drawn(x, batch, row, number, share):
    p = truncated(x / batch.temperature[row], batch, row, share)
    target = max(0.0, float(batch.uniforms[row]) + number) * p.sum()
    above = np.flatnonzero(np.cumsum(p) > target)
    return int(above[0]) if len(above) else int(np.flatnonzero(p)[-1])


def truncated(x, batch, row, share):
    """Probabilities after top-k, top-p (moved by `share`) and min-p, each on what is left."""
    p = np.exp(x.astype(np.float64) - x.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if batch.top_k[row] > 0:
        order = order[: batch.top_k[row]]
    top_p = float(batch.top_p[row])
    mass, kept, before = p[order].sum(), [], 0.0
    for token in order:
        if kept and top_p < 1 and before >= (top_p + share) * mass:
            break
        kept.append(token)
        before += p[token]
    best = p.max()
    kept = [token for token in kept if p[token] >= best * batch.min_p[row]]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out
