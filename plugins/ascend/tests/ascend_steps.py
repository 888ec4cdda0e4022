"""Building steps and running a tiny decoder over the ops, as the core does."""

import attrs
import numpy as np
from ascend_oracle import Model

from halogen_ascend.backend import create
from halogen_core.spi import (
    Activation,
    AttentionSpec,
    BackendOptions,
    KVSpec,
    QuantTensor,
    RopeSpec,
    SamplingBatch,
    StepBatch,
    WeightRole,
)

BLOCK = 128


@attrs.frozen(kw_only=True)
class Config:
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    ffn: int = 96
    vocab: int = 97
    eps: float = 1e-5
    alternate_window: int | None = None

    @property
    def inv_freq(self):
        return tuple(float(10000.0 ** (-i / (self.dim // 2))) for i in range(self.dim // 2))

    def window(self, layer):
        return self.alternate_window if layer % 2 else None


def open_sim(profile="tiny", **extra):
    device = f"ascend:sim:{profile}"
    return create(BackendOptions(device=device, extra={k: str(v) for k, v in extra.items()}))


def f32(values, name="w"):
    values = np.ascontiguousarray(values, dtype=np.float32)
    return QuantTensor(
        format="F32", shape=values.shape, data=values.reshape(-1).view(np.uint8), name=name
    )


def sampling(rows, **fields):
    def full(value, dtype):
        return np.full(rows, value, dtype=dtype)

    made = {
        "temperature": full(0, np.float32),
        "top_k": full(0, np.int32),
        "top_p": full(1, np.float32),
        "min_p": full(0, np.float32),
        "repetition_penalty": full(1, np.float32),
        "presence_penalty": full(0, np.float32),
        "frequency_penalty": full(0, np.float32),
        "uniforms": full(0.5, np.float32),
        "forced": full(-1, np.int32),
        "history_start": np.zeros(rows + 1, np.int32),
        "history_ids": np.zeros(0, np.int32),
        "history_counts": np.zeros(0, np.int32),
        "bias_start": np.zeros(rows + 1, np.int32),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
    }
    made.update(fields)
    return SamplingBatch(**made)


def step(items, *, block=BLOCK, all_logits=False, **sampling_fields):
    """items: (tokens computed now, tokens before, block table) per sequence."""
    counts = [len(tokens) for tokens, _, _ in items]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    width = max((len(t) for *_, t in items), default=0)
    tables = np.full((len(items), width), -1, np.int32)
    positions, slots, tokens = [], [], []
    for row, (now, before, table) in enumerate(items):
        tables[row, : len(table)] = table
        for offset, token in enumerate(now):
            p = before + offset
            tokens.append(token)
            positions.append(p)
            slots.append(table[p // block] * block + p % block)
    rows = np.arange(starts[-1]) if all_logits else starts[1:] - 1
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int64),
        query_start_loc=starts,
        seq_lens=np.array([before + len(now) for now, before, _ in items], np.int32),
        block_tables=tables,
        logit_rows=rows.astype(np.int32),
        sampling=sampling(len(rows), **sampling_fields),
    )


class Decoder:
    """A tiny model on a backend."""

    def __init__(self, backend, config=None, *, blocks=16, kv_dtype="f16", seed=0, quantize=None):
        self.backend, self.config = backend, config or Config()
        self.model = Model(self.config, seed)
        c = self.config
        pack = quantize or (lambda parts: [f32(p) for p in parts])
        put = backend.pack
        self.embed = put([f32(self.model.embed)], WeightRole.EMBEDDING)
        self.layers = [
            {
                "norm1": put([f32(layer["norm1"])], WeightRole.NORM),
                "norm2": put([f32(layer["norm2"])], WeightRole.NORM),
                **{
                    name: put(pack(layer[name]), WeightRole.LINEAR)
                    for name in ("qkv", "out", "gate_up", "down")
                },
            }
            for layer in self.model.layers
        ]
        self.norm = put([f32(self.model.norm)], WeightRole.NORM)
        self.head = put([f32(self.model.head)], WeightRole.LINEAR)
        spec = KVSpec(
            num_layers=c.layers,
            num_kv_heads=c.kv_heads,
            head_dim=c.dim,
            dtype=kv_dtype,
            block_size=BLOCK,
        )
        self.kv = backend.kv_alloc(backend.kv_layout(spec), blocks)

    def spec(self, layer):
        c = self.config
        return AttentionSpec(
            num_heads=c.heads,
            num_kv_heads=c.kv_heads,
            head_dim=c.dim,
            scale=c.dim**-0.5,
            rope=RopeSpec(dim=c.dim, inv_freq=c.inv_freq),
            window=c.window(layer),
        )

    def forward(self, meta):
        ops, eps = self.backend.ops, self.config.eps
        x = ops.embed(meta.token_ids, self.embed)
        for index, w in enumerate(self.layers):
            y = ops.rms_norm(x, w["norm1"], eps=eps)
            q = ops.qkv_rope_store(ops.linear(y, w["qkv"]), self.kv, index, meta, self.spec(index))
            a = ops.linear(ops.attention(q, self.kv, index, meta, self.spec(index)), w["out"])
            y, x = ops.add_rms_norm(a, x, w["norm2"], eps=eps)
            x = ops.add(x, ops.mlp(y, w["gate_up"], w["down"], Activation.SILU))
        x = ops.rms_norm(ops.select_rows(x, meta), self.norm, eps=eps)
        return ops.logits(x, self.head)

    def run(self, meta):
        return self.backend.ops.sample(self.forward(meta), meta)

    def logits(self, batch):
        return self.backend.download(self.forward(self.backend.upload_step(batch)))

    def tokens(self, batch):
        return self.backend.download(self.run(self.backend.upload_step(batch)).token_ids)
