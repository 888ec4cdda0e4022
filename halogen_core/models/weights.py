"""A decoder's tensors: found by name, checked against the configuration, packed by the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic

import attrs

from halogen_core.models.hparams import HParams
from halogen_core.spi import (
    Array,
    Backend,
    Checkpoint,
    DecoderConfig,
    LayerConfig,
    PackedWeight,
    WeightRole,
)


@attrs.frozen(kw_only=True, eq=False)
class LayerWeights(Generic[Array]):
    """One layer, as the backend keeps it."""

    attn_norm: PackedWeight[Array]
    qkv: PackedWeight[Array]
    qkv_bias: PackedWeight[Array] | None
    q_norm: PackedWeight[Array] | None
    k_norm: PackedWeight[Array] | None
    sinks: PackedWeight[Array] | None
    output: PackedWeight[Array]
    output_bias: PackedWeight[Array] | None
    post_attn_norm: PackedWeight[Array] | None
    ffn_norm: PackedWeight[Array]
    router: PackedWeight[Array] | None
    gate_up: PackedWeight[Array]
    down: PackedWeight[Array]
    post_ffn_norm: PackedWeight[Array] | None


@attrs.frozen(kw_only=True, eq=False)
class DecoderWeights(Generic[Array]):
    """A whole decoder."""

    embedding: PackedWeight[Array]
    layers: tuple[LayerWeights[Array], ...]
    norm: PackedWeight[Array]
    head: PackedWeight[Array]

    @property
    def nbytes(self) -> int:
        """Bytes as packed; a payload that serves twice counts once."""
        own = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in attrs.fields(LayerWeights))
            own += [value for value in values if value is not None]
        return sum({id(weight.payload): weight.nbytes for weight in own}.values())


@attrs.frozen
class _Packer(Generic[Array]):
    hparams: HParams
    backend: Backend[Array]

    def __call__(
        self, role: WeightRole, parts: Mapping[str, tuple[int, ...]]
    ) -> PackedWeight[Array]:
        """One weight from parts by name and shape."""
        tensors = [self.hparams.tensor(name, shape) for name, shape in parts.items()]
        return self.backend.pack(tensors, role)

    def norm(self, name: str, size: int) -> PackedWeight[Array]:
        return self(WeightRole.NORM, {name: (size,)})


def pack_decoder(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    backend: Backend[Array],
    progress: Callable[[int, int], None],
) -> DecoderWeights[Array]:
    """All weights; raises `ModelError` naming the tensor that is missing or misshapen."""
    pack = _Packer(HParams(checkpoint), backend)
    table = (config.vocab_size, config.hidden_size)
    embedding = pack(WeightRole.EMBEDDING, {"token_embd.weight": table})
    layers = []
    for index, layer in enumerate(config.layers):
        layers.append(_pack_layer(pack, config, layer, f"blk.{index}."))
        progress(index + 1, config.num_layers)
    head = "token_embd.weight" if config.tied_embeddings else "output.weight"
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=pack.norm("output_norm.weight", config.hidden_size),
        head=pack(WeightRole.LINEAR, {head: table}),
    )


def _pack_layer(
    pack: _Packer[Array], config: DecoderConfig, layer: LayerConfig, at: str
) -> LayerWeights[Array]:
    hidden, spec = config.hidden_size, layer.attention
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = {"attn_q": q, "attn_k": kv, "attn_v": kv}
    weights = {f"{at}{name}.weight": (size, hidden) for name, size in sizes.items()}
    biases = {f"{at}{name}.bias": (size,) for name, size in sizes.items()}
    output = f"{at}attn_output"
    post = config.post_norms
    router, gate_up, down = _pack_feed_forward(pack, config, layer, at)
    return LayerWeights(
        attn_norm=pack.norm(f"{at}attn_norm.weight", hidden),
        qkv=pack(WeightRole.LINEAR, weights),
        qkv_bias=pack(WeightRole.BIAS, biases) if config.qkv_bias else None,
        q_norm=pack.norm(f"{at}attn_q_norm.weight", spec.head_dim) if config.qk_norm else None,
        k_norm=pack.norm(f"{at}attn_k_norm.weight", spec.head_dim) if config.qk_norm else None,
        sinks=pack(WeightRole.SINKS, {f"{at}attn_sinks.weight": (spec.num_heads,)})
        if layer.sinks
        else None,
        output=pack(WeightRole.LINEAR, {f"{output}.weight": (hidden, q)}),
        output_bias=pack(WeightRole.BIAS, {f"{output}.bias": (hidden,)})
        if config.output_bias
        else None,
        post_attn_norm=pack.norm(f"{at}post_attention_norm.weight", hidden) if post else None,
        ffn_norm=pack.norm(f"{at}ffn_norm.weight", hidden),
        router=router,
        gate_up=gate_up,
        down=down,
        post_ffn_norm=pack.norm(f"{at}post_ffw_norm.weight", hidden) if post else None,
    )


def _pack_feed_forward(
    pack: _Packer[Array], config: DecoderConfig, layer: LayerConfig, at: str
) -> tuple[PackedWeight[Array] | None, PackedWeight[Array], PackedWeight[Array]]:
    """Router (None: dense), gate and up in one, down."""
    hidden, inner = config.hidden_size, config.intermediate_size
    if layer.moe is None:
        gate_up = {f"{at}ffn_{name}.weight": (inner, hidden) for name in ("gate", "up")}
        down = pack(WeightRole.LINEAR, {f"{at}ffn_down.weight": (hidden, inner)})
        return None, pack(WeightRole.LINEAR, gate_up), down
    experts = layer.moe.num_experts
    router = pack(WeightRole.LINEAR, {f"{at}ffn_gate_inp.weight": (experts, hidden)})
    stacked = {f"{at}ffn_{name}_exps.weight": (experts, inner, hidden) for name in ("gate", "up")}
    down = pack(WeightRole.EXPERTS, {f"{at}ffn_down_exps.weight": (experts, hidden, inner)})
    return router, pack(WeightRole.EXPERTS, stacked), down
