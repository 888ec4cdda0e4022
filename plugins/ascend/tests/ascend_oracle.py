"""A dense decoder in float64 numpy: no pages, no tiles, no code of the product."""

import numpy as np


def rms(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x, positions, inv_freq):
    """x [T, H, D] half-split over 2 * len(inv_freq) elements."""
    half = len(inv_freq)
    angle = positions[:, None] * np.asarray(inv_freq)[None]
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def attend(q, k, v, *, scale, start, window=None, softcap=None, sinks=None):
    """q [n, Hq, D] at positions from `start` over k, v [s, Hkv, D]: [n, Hq, D]."""
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.zeros((n, heads, v.shape[-1]))
    for h in range(heads):
        for i in range(n):
            p = start + i
            first = 0 if window is None else max(0, p - window + 1)
            scores = k[first : p + 1, h // group] @ q[i, h] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if sinks is not None:
                scores = np.append(scores, sinks[h])
            weights = softmax(scores)[: p + 1 - first]
            out[i, h] = weights @ v[first : p + 1, h // group]
    return out


class Model:
    """Weights of a tiny decoder and its logits for a whole token list."""

    def __init__(self, config, seed=0):
        self.c = config
        rng = np.random.default_rng(seed)

        def w(*shape):
            return (rng.standard_normal(shape) * 0.4 / np.sqrt(shape[-1])).astype(np.float32)

        c = config
        q, kv = c.heads * c.dim, c.kv_heads * c.dim
        self.embed = (rng.standard_normal((c.vocab, c.hidden)) * 0.7).astype(np.float32)
        self.layers = [
            {
                "norm1": 1 + 0.1 * w(c.hidden),
                "qkv": [2 * w(q, c.hidden), 2 * w(kv, c.hidden), w(kv, c.hidden)],
                "out": [w(c.hidden, q)],
                "norm2": 1 + 0.1 * w(c.hidden),
                "gate_up": [w(c.ffn, c.hidden), w(c.ffn, c.hidden)],
                "down": [w(c.hidden, c.ffn)],
            }
            for _ in range(c.layers)
        ]
        self.norm = np.ones(c.hidden, dtype=np.float32)
        self.head = w(c.vocab, c.hidden) * 4

    def logits(self, tokens):
        """[T, V] float64."""
        c = self.c
        x = self.embed[tokens].astype(np.float64)
        positions = np.arange(len(tokens))
        for index, layer in enumerate(self.layers):
            y = rms(x, layer["norm1"], c.eps)
            q, k, v = (
                (y @ w.T.astype(np.float64)).reshape(len(tokens), -1, c.dim) for w in layer["qkv"]
            )
            q, k = (rotate(p, positions, c.inv_freq) for p in (q, k))
            a = attend(q, k, v, scale=c.dim**-0.5, start=0, window=c.window(index))
            x = x + a.reshape(len(tokens), -1) @ layer["out"][0].T
            y = rms(x, layer["norm2"], c.eps)
            gate, up = (y @ w.T for w in layer["gate_up"])
            x = x + (silu(gate) * up) @ layer["down"][0].T
        return rms(x, self.norm, c.eps) @ self.head.T


def gated_reference(x):
    """SwiGLU of one vector, gate first."""
    gate, up = np.split(x, 2)
    return silu(gate) * up
