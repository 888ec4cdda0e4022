"""The decoder that every architecture parametrises: composes ops, computes nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import attrs

from halogen_core.spi import (
    Array,
    Backend,
    Checkpoint,
    DecoderConfig,
    KVCache,
    LayerConfig,
    Ops,
    PackedWeight,
    StepMeta,
    WeightRole,
)


@attrs.frozen(kw_only=True, eq=False)
class LayerWeights(Generic[Array]):
    """One layer's weights as the backend packed them; Q, K, V and gate, up are one each."""

    attn_norm: PackedWeight[Array]
    qkv: PackedWeight[Array]
    qkv_bias: PackedWeight[Array] | None
    q_norm: PackedWeight[Array] | None
    k_norm: PackedWeight[Array] | None
    sinks: PackedWeight[Array] | None
    output: PackedWeight[Array]
    output_bias: PackedWeight[Array] | None
    post_attention_norm: PackedWeight[Array] | None
    ffn_norm: PackedWeight[Array]
    router: PackedWeight[Array] | None
    gate_up: PackedWeight[Array]
    down: PackedWeight[Array]
    post_ffn_norm: PackedWeight[Array] | None


@attrs.frozen(eq=False)
class Decoder(Generic[Array]):
    """Weights on a device and the order of ops over them."""

    config: DecoderConfig
    embedding: PackedWeight[Array]
    layers: tuple[LayerWeights[Array], ...]
    output_norm: PackedWeight[Array]
    head: PackedWeight[Array]

    @classmethod
    def load(
        cls,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        backend: Backend[Array],
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Decoder[Array]:
        """Pack all weights; `progress` hears of layers done and in all. Raises `ModelError`."""
        packer = _Packer(checkpoint, backend)
        embedding = packer.pack(WeightRole.EMBEDDING, "token_embd.weight")
        layers = []
        for i, layer in enumerate(config.layers):
            layers.append(packer.layer(i, layer, config))
            progress(i + 1, config.num_layers)
        head = "token_embd.weight" if config.tied_embeddings else "output.weight"
        return cls(
            config,
            embedding,
            tuple(layers),
            packer.pack(WeightRole.NORM, "output_norm.weight"),
            packer.pack(WeightRole.LINEAR, head),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as packed."""
        packed = [self.embedding, self.output_norm, self.head]
        for layer in self.layers:
            packed += [w for w in attrs.astuple(layer, recurse=False) if w is not None]
        return sum(weight.nbytes for weight in packed)

    def logits(self, ops: Ops[Array], meta: StepMeta[Array], kv: KVCache) -> Array:
        """Logits [R, V] of the step's `logit_rows`; writes the step's KV."""
        x = self.hidden(ops, meta, kv)
        config = self.config
        return ops.logits(x, self.head, scale=config.logit_scale, softcap=config.final_softcap)

    def hidden(self, ops: Ops[Array], meta: StepMeta[Array], kv: KVCache) -> Array:
        """Final normed hidden states [R, H] of `logit_rows`."""
        eps = self.config.norm_eps
        residual = ops.embed(meta.token_ids, self.embedding, scale=self.config.embed_scale)
        h = ops.rms_norm(residual, self.layers[0].attn_norm, eps=eps)
        for i, layer in enumerate(self.layers):
            x = self._attention(ops, h, i, meta, kv)
            if i == len(self.layers) - 1:
                # nothing after the last attention mixes tokens: go on with the rows asked for
                x, residual = ops.select_rows(x, meta), ops.select_rows(residual, meta)
            h, residual = ops.add_rms_norm(x, residual, layer.ffn_norm, eps=eps)
            x = self._feed_forward(ops, h, i)
            norm = self.output_norm if i == len(self.layers) - 1 else self.layers[i + 1].attn_norm
            h, residual = ops.add_rms_norm(x, residual, norm, eps=eps)
        return h

    def _attention(
        self, ops: Ops[Array], h: Array, index: int, meta: StepMeta[Array], kv: KVCache
    ) -> Array:
        weights, spec = self.layers[index], self.config.layers[index].attention
        qkv = ops.linear(h, weights.qkv, bias=weights.qkv_bias)
        q = ops.qkv_rope_store(
            qkv, kv, index, meta, spec, q_norm=weights.q_norm, k_norm=weights.k_norm
        )
        x = ops.attention(q, kv, index, meta, spec, sinks=weights.sinks)
        x = ops.linear(x, weights.output, bias=weights.output_bias)
        if weights.post_attention_norm is not None:
            x = ops.rms_norm(x, weights.post_attention_norm, eps=self.config.norm_eps)
        return x

    def _feed_forward(self, ops: Ops[Array], h: Array, index: int) -> Array:
        weights, moe = self.layers[index], self.config.layers[index].moe
        if moe is not None and weights.router is not None:
            x = ops.moe(h, weights.router, weights.gate_up, weights.down, moe)
        else:
            x = ops.mlp(h, weights.gate_up, weights.down, self.config.activation)
        if weights.post_ffn_norm is not None:
            x = ops.rms_norm(x, weights.post_ffn_norm, eps=self.config.norm_eps)
        return x


@attrs.frozen(eq=False)
class _Packer(Generic[Array]):
    checkpoint: Checkpoint
    backend: Backend[Array]

    def pack(self, role: WeightRole, *names: str) -> PackedWeight[Array]:
        return self.backend.pack([self.checkpoint.tensor(name) for name in names], role)

    def layer(self, i: int, layer: LayerConfig, config: DecoderConfig) -> LayerWeights[Array]:
        def pack(role: WeightRole, *parts: str) -> PackedWeight[Array]:
            return self.pack(role, *(f"blk.{i}.{part}" for part in parts))

        def optional(wanted: bool, role: WeightRole, *parts: str) -> PackedWeight[Array] | None:
            return pack(role, *parts) if wanted else None

        norm, bias, linear = WeightRole.NORM, WeightRole.BIAS, WeightRole.LINEAR
        matrices, suffix = (WeightRole.EXPERTS, "_exps") if layer.moe else (linear, "")
        qkv = ("attn_q", "attn_k", "attn_v")
        return LayerWeights(
            attn_norm=pack(norm, "attn_norm.weight"),
            qkv=pack(linear, *(f"{part}.weight" for part in qkv)),
            qkv_bias=optional(config.qkv_bias, bias, *(f"{part}.bias" for part in qkv)),
            q_norm=optional(config.qk_norm, norm, "attn_q_norm.weight"),
            k_norm=optional(config.qk_norm, norm, "attn_k_norm.weight"),
            sinks=optional(layer.sinks, WeightRole.SINKS, "attn_sinks.weight"),
            output=pack(linear, "attn_output.weight"),
            output_bias=optional(config.output_bias, bias, "attn_output.bias"),
            post_attention_norm=optional(config.post_norms, norm, "post_attention_norm.weight"),
            ffn_norm=pack(norm, "ffn_norm.weight"),
            router=optional(layer.moe is not None, linear, "ffn_gate_inp.weight"),
            gate_up=pack(matrices, f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight"),
            down=pack(matrices, f"ffn_down{suffix}.weight"),
            post_ffn_norm=optional(config.post_norms, norm, "post_ffw_norm.weight"),
        )
