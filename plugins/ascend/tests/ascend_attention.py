"""One attention layer on the device and in float64."""

import numpy as np
from ascend_oracle import attend
from ascend_steps import BLOCK, f32, step

from halogen_core.spi import AttentionSpec, KVSpec, WeightRole


def one_layer(backend, dim, heads, kv_heads, *, window=None, softcap=None, sinks=False, length=200):
    """A sequence of `length`, its last 9 tokens as queries in a second step: (got, want)."""
    rng = np.random.default_rng(dim + heads)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
    )
    kv_spec = KVSpec(num_layers=1, num_kv_heads=kv_heads, head_dim=dim, block_size=BLOCK)
    kv = backend.kv_alloc(backend.kv_layout(kv_spec), 4)
    half = rng.standard_normal((length, (heads + 2 * kv_heads) * dim)).astype(np.float16)
    qkv, table, outputs = half.astype(np.float32), [3, 1], []
    extra = rng.standard_normal(heads).astype(np.float32) if sinks else None
    packed = backend.pack([f32(extra)], WeightRole.SINKS) if sinks else None
    for a, b in ((0, length - 9), (length - 9, length)):
        meta = backend.upload_step(step([([0] * (b - a), a, table)]))
        q = backend.ops.qkv_rope_store(backend.upload(qkv[a:b]), kv, 0, meta, spec)
        outputs.append(backend.download(backend.ops.attention(q, kv, 0, meta, spec, sinks=packed)))
    heads_of = qkv.astype(np.float64).reshape(length, -1, dim)
    q, k, v = np.split(heads_of, [heads, heads + kv_heads], 1)
    want = attend(q, k, v, scale=spec.scale, start=0, window=window, softcap=softcap, sinks=extra)
    return np.concatenate(outputs).reshape(length, heads, dim), want
