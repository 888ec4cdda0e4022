"""The decoder that every architecture is a configuration of, composed of ops.

Nothing here computes on a device array; the type checker proves it, for `Array` is a bare type
variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import attrs

from halogen_core.models.weights import DecoderWeights, LayerWeights, pack_decoder
from halogen_core.spi import (
    Array,
    Backend,
    Checkpoint,
    DecoderConfig,
    KVCache,
    LayerConfig,
    Ops,
    PackedWeight,
    Sampled,
    StepMeta,
)


@attrs.frozen(eq=False)
class Decoder(Generic[Array]):
    """A loaded model: what it is and its packed weights."""

    config: DecoderConfig
    weights: DecoderWeights[Array]

    @classmethod
    def load(
        cls,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        backend: Backend[Array],
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Decoder[Array]:
        """Pack all weights on `backend`; `progress` hears of layers done and in all.

        Raises `ModelError` for a tensor that is missing or misshapen.
        """
        return cls(config, pack_decoder(config, checkpoint, backend, progress))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as packed."""
        return self.weights.nbytes

    def step(self, ops: Ops[Array], meta: StepMeta[Array], kv: KVCache) -> Sampled[Array]:
        """One step: a token for each of `meta.logit_rows`."""
        return ops.sample(self.logits(ops, meta, kv), meta)

    def logits(self, ops: Ops[Array], meta: StepMeta[Array], kv: KVCache) -> Array:
        """Logits [R, V] float32 of `meta.logit_rows`; writes the step's KV."""
        x, config = self.forward(ops, meta, kv), self.config
        head = self.weights.head
        return ops.logits(x, head, scale=config.logit_scale, softcap=config.final_softcap)

    def forward(self, ops: Ops[Array], meta: StepMeta[Array], kv: KVCache) -> Array:
        """Final normed hidden states [R, H] of `meta.logit_rows`; writes the step's KV."""
        config, weights = self.config, self.weights
        residual = ops.embed(meta.token_ids, weights.embedding, scale=config.embed_scale)
        x = ops.rms_norm(residual, weights.layers[0].attn_norm, eps=config.norm_eps)
        norms = [*(layer.attn_norm for layer in weights.layers[1:]), weights.norm]
        for index, (own, norm) in enumerate(zip(weights.layers, norms, strict=True)):
            x = self._attention(ops, x, kv, index, meta)
            if index == config.num_layers - 1 and not _all_rows(meta):
                # nothing after the last attention mixes tokens: go on with the rows asked for
                x, residual = ops.select_rows(x, meta), ops.select_rows(residual, meta)
            x, residual = self._add_norm(ops, x, residual, own.post_attn_norm, own.ffn_norm)
            x = _feed_forward(ops, x, config, config.layers[index], own)
            x, residual = self._add_norm(ops, x, residual, own.post_ffn_norm, norm)
        return x

    def _attention(
        self, ops: Ops[Array], x: Array, kv: KVCache, index: int, meta: StepMeta[Array]
    ) -> Array:
        spec, own = self.config.layers[index].attention, self.weights.layers[index]
        qkv = ops.linear(x, own.qkv, bias=own.qkv_bias)
        q = ops.qkv_rope_store(qkv, kv, index, meta, spec, q_norm=own.q_norm, k_norm=own.k_norm)
        x = ops.attention(q, kv, index, meta, spec, sinks=own.sinks)
        return ops.linear(x, own.output, bias=own.output_bias)

    def _add_norm(
        self,
        ops: Ops[Array],
        x: Array,
        residual: Array,
        post: PackedWeight[Array] | None,
        norm: PackedWeight[Array],
    ) -> tuple[Array, Array]:
        """The next block's input and the residual stream."""
        eps = self.config.norm_eps
        if post is not None:
            x = ops.rms_norm(x, post, eps=eps)
        return ops.add_rms_norm(x, residual, norm, eps=eps)


def _feed_forward(
    ops: Ops[Array], x: Array, config: DecoderConfig, layer: LayerConfig, own: LayerWeights[Array]
) -> Array:
    if layer.moe is None or own.router is None:
        return ops.mlp(x, own.gate_up, own.down, config.activation)
    return ops.moe(x, own.router, own.gate_up, own.down, layer.moe)


def _all_rows(meta: StepMeta[Array]) -> bool:
    return len(meta.host.logit_rows) == meta.host.num_tokens
