"""Tiny seeded models as checkpoints in memory, of every architecture and weight format."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.errors import ModelError
from halogen_core.spi import FORMATS, QuantTensor, RopeStyle


@attrs.frozen(kw_only=True, eq=False)
class MemoryCheckpoint:
    """`spi.Checkpoint` over arrays."""

    architecture: str
    hparams: Mapping[str, Any]
    tensors: Mapping[str, QuantTensor]
    rope_style: RopeStyle = RopeStyle.NEOX
    path: str = "memory"

    @property
    def content_id(self) -> str:
        digest = hashlib.sha256(repr(sorted(self.hparams.items())).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode() + self.tensors[name].data.tobytes())
        return digest.hexdigest()[:32]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def tensor(self, name: str) -> QuantTensor:
        if name not in self.tensors:
            raise ModelError(f"tensor `{name}` is missing from `{self.path}`", code="HRT-2404")
        return self.tensors[name]


def f32_tensor(name: str, values: NDArray[Any]) -> QuantTensor:
    """Values as an F32 tensor."""
    data = np.ascontiguousarray(values, dtype=np.float32)
    return QuantTensor(
        format="F32", shape=data.shape, data=data.reshape(-1).view(np.uint8), name=name
    )


def quantised(tensor: QuantTensor, format: str) -> QuantTensor:
    """An F32 tensor in another format, by the numpy package `gguf` (K formats: random blocks).

    The package cannot quantise to K formats; for those the bytes are random, seeded by the name,
    with scales that give values of about the same size.
    """
    if format == "F32" or tensor.shape[-1] % FORMATS[format].block:
        return tensor
    from gguf import GGMLQuantizationType, quants

    values = tensor.data.view(np.float32).reshape(tensor.shape)
    if format in _K_SCALES:
        data = _random_blocks(tensor.name, format, values.size)
    else:
        data = quants.quantize(values, GGMLQuantizationType[format])
    return attrs.evolve(
        tensor, format=format, data=np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    )


_K_SCALES = {"Q4_K": ((0, 2e-4), (2, 1e-3)), "Q5_K": ((0, 1e-4), (2, 1e-3)), "Q6_K": ((208, 5e-5),)}


def _random_blocks(name: str, format: str, elements: int) -> NDArray[np.uint8]:
    form = FORMATS[format]
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
    blocks = rng.integers(0, 256, (elements // form.block, form.bytes), dtype=np.uint8)
    for at, size in _K_SCALES[format]:
        scales = (size * (1 + rng.random(len(blocks)))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


# ---------------------------------------------------------------- tiny models


@attrs.frozen(kw_only=True)
class TinyModel:
    """The shape of a tiny seeded model; the defaults are a dense GQA Llama."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 80
    vocab: int = 97
    context: int = 256
    experts: int = 0
    experts_used: int = 2
    window: int = 0
    tied: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    sinks: bool = False
    rope_style: RopeStyle = RopeStyle.NEOX
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    """Further hyper-parameters."""


TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(),
    "llama-interleaved": TinyModel(rope_style=RopeStyle.INTERLEAVED, tied=False),
    "llama-mha": TinyModel(kv_heads=4, tied=False),
    "llama-window": TinyModel(window=9),
    "llama-sinks": TinyModel(sinks=True, window=9, output_bias=True, qkv_bias=True),
    "llama-moe": TinyModel(experts=6, inner=40),
    "qwen2": TinyModel(architecture="qwen2", qkv_bias=True),
    "qwen3": TinyModel(architecture="qwen3", qk_norm=True, head_dim=24, tied=False),
    "qwen3moe": TinyModel(
        architecture="qwen3moe", qk_norm=True, experts=8, experts_used=3, inner=40, tied=False
    ),
    "gemma3": TinyModel(
        architecture="gemma3",
        layers=4,
        qk_norm=True,
        post_norms=True,
        window=8,
        kv_heads=1,
        extra={"attention.sliding_window_pattern": 2, "rope.freq_base": 1_000_000.0},
    ),
}
"""Every architecture family the core has, by a name for tests."""


def tiny_checkpoint(
    model: str | TinyModel = "llama", *, seed: int = 0, quant: str | None = None, **changes: Any
) -> MemoryCheckpoint:
    """A seeded model of `TINY_MODELS` (or a shape of your own) with `changes` to its shape.

    `quant` stores the matrices in that format, where their rows are long enough (a multiple of
    its block): use `hidden=256, inner=256` for K formats.
    """
    shape = attrs.evolve(TINY_MODELS[model] if isinstance(model, str) else model, **changes)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, size in _tensor_shapes(shape).items():
        tensor = f32_tensor(name, _values(rng, name, size))
        is_matrix = len(size) > 1 and "gate_inp" not in name
        tensors[name] = quantised(tensor, quant) if quant and is_matrix else tensor
    return MemoryCheckpoint(
        architecture=shape.architecture,
        hparams=_hparams(shape),
        tensors=tensors,
        rope_style=shape.rope_style,
        path=f"tiny:{shape.architecture}",
    )


def _values(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(size).astype(np.float32)
    if "norm" in name:
        return 1 + 0.2 * values
    if len(size) == 1:
        return 0.3 * values
    return values * np.float32(0.8 if "embd" in name else 1.5 * size[-1] ** -0.5)


def _hparams(shape: TinyModel) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "vocab_size": shape.vocab,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 10000.0,
    }
    if shape.window:
        found["attention.sliding_window"] = shape.window
    if shape.experts:
        found |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.inner,
        }
    return found | dict(shape.extra)


def _tensor_shapes(shape: TinyModel) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        found |= {f"blk.{layer}.{k}": v for k, v in _layer_shapes(shape).items()}
    found["output_norm.weight"] = (shape.hidden,)
    if not shape.tied:
        found["output.weight"] = (shape.vocab, shape.hidden)
    return found


def _layer_shapes(shape: TinyModel) -> dict[str, tuple[int, ...]]:
    hidden, inner, q, kv = (
        shape.hidden,
        shape.inner,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    found: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
    }
    if shape.qkv_bias:
        found |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if shape.output_bias:
        found["attn_output.bias"] = (hidden,)
    if shape.qk_norm:
        found |= {f"attn_{x}_norm.weight": (shape.head_dim,) for x in "qk"}
    if shape.post_norms:
        found |= {f"post_{x}.weight": (hidden,) for x in ("attention_norm", "ffw_norm")}
    if shape.sinks:
        found["attn_sinks.weight"] = (shape.heads,)
    if not shape.experts:
        rows = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return found | {f"ffn_{name}.weight": size for name, size in rows.items()}
    experts = shape.experts
    return found | {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_exps.weight": (experts, inner, hidden),
        "ffn_up_exps.weight": (experts, inner, hidden),
        "ffn_down_exps.weight": (experts, hidden, inner),
    }
