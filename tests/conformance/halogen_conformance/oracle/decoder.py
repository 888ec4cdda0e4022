"""A decoder in numpy, read straight from a checkpoint's tensors: dense, no cache, no blocks.

Written from the model papers and GGUF's conventions, not from `halogen_core.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from halogen_conformance.oracle import operations as op
from halogen_conformance.oracle.formats import FLOATS, values_of
from halogen_conformance.oracle.numbers import EXACT, Arithmetic, Values, kv_bytes, kv_values
from halogen_core.spi import Activation, AttentionSpec, Checkpoint, MoESpec, RopeSpec

GEMMA_PERIOD = 6
"""Every sixth layer of Gemma 3 is global, unless the file says otherwise."""


@attrs.define(kw_only=True)
class OracleDecoder:
    """Logits of whole sequences."""

    checkpoint: Checkpoint
    a: Arithmetic = EXACT
    kv_dtype: str = ""
    """Keys and values are rounded to this on their way; empty: kept as they are."""
    _values: dict[str, Values] = attrs.field(factory=dict, init=False)

    def logits(self, tokens: Values) -> Values:
        """Of every position of one sequence [T]: [T, V]."""
        a, eps = self.a, self._number("attention.layer_norm_rms_epsilon")
        x = op.embed(tokens, self._raw("token_embd.weight"), self._embed_scale(), a)
        for layer in range(self._integer("block_count")):
            mixed = self._attention(
                op.rms_norm(x, self._raw(f"blk.{layer}.attn_norm.weight"), eps, a), layer
            )
            x = op.add(x, self._post(mixed, f"blk.{layer}.post_attention_norm.weight", eps), a)
            inner = self._feed_forward(
                op.rms_norm(x, self._raw(f"blk.{layer}.ffn_norm.weight"), eps, a), layer
            )
            x = op.add(x, self._post(inner, f"blk.{layer}.post_ffw_norm.weight", eps), a)
        x = op.rms_norm(x, self._raw("output_norm.weight"), eps, a)
        head = "output.weight" if self._has("output.weight") else "token_embd.weight"
        scale = float(self._h.get("logit_scale", 1.0))
        cap = self._h.get("final_logit_softcapping")
        return op.logits(x, self._matrix(head), scale, cap, self._met_by(head))

    # -- blocks

    def _attention(self, x: Values, layer: int) -> Values:
        spec, a = self._spec(layer), self.a
        parts = []
        for name in "qkv":
            parts.append(self._linear(x, f"blk.{layer}.attn_{name}"))
        norms = [self._maybe(f"blk.{layer}.attn_{n}_norm.weight") for n in "qk"]
        positions = np.arange(len(x))
        q, k, v = op.qkv_rope(np.concatenate(parts, axis=1), positions, spec, *norms, a)
        if self.kv_dtype:
            k, v = (kv_values(kv_bytes(x, self.kv_dtype), self.kv_dtype) for x in (k, v))
        sinks = self._maybe(f"blk.{layer}.attn_sinks.weight")
        out = op.attention_one(q, k, v, spec, sinks, a).reshape(len(x), -1)
        return self._linear(out, f"blk.{layer}.attn_output")

    def _linear(self, x: Values, name: str) -> Values:
        weight = f"{name}.weight"
        bias = self._maybe(f"{name}.bias")
        return op.linear(x, self._matrix(weight), bias, self._met_by(weight))

    def _feed_forward(self, x: Values, layer: int) -> Values:
        kind = Activation.GELU_TANH if self._gemma else Activation.SILU
        if not self._h.get("expert_count"):
            gate, up, down = (
                self._matrix(f"blk.{layer}.ffn_{n}.weight") for n in ("gate", "up", "down")
            )
            a = self._met_by(f"blk.{layer}.ffn_gate.weight")
            return op.mlp(x, np.concatenate([gate, up]), down, kind, a)
        gate, up, down = (
            self._matrix(f"blk.{layer}.ffn_{n}_exps.weight") for n in ("gate", "up", "down")
        )
        spec = MoESpec(
            num_experts=self._integer("expert_count"),
            top_k=self._integer("expert_used_count"),
            activation=kind,
        )
        router = self._matrix(f"blk.{layer}.ffn_gate_inp.weight")
        a = self._met_by(f"blk.{layer}.ffn_gate_exps.weight")
        return op.moe(x, router, np.concatenate([gate, up], axis=1), down, spec, a)

    def _post(self, x: Values, name: str, eps: float) -> Values:
        weight = self._maybe(name)
        return x if weight is None else op.rms_norm(x, weight, eps, self.a)

    def _spec(self, layer: int) -> AttentionSpec:
        heads, dim = self._integer("attention.head_count"), self._integer("attention.key_length")
        window = int(self._h.get("attention.sliding_window", 0)) or None
        base = self._number("rope.freq_base")
        if self._gemma:
            period = int(self._h.get("attention.sliding_window_pattern", GEMMA_PERIOD))
            window, base = (None, base) if (layer + 1) % period == 0 else (window, 1e4)
        frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        return AttentionSpec(
            num_heads=heads,
            num_kv_heads=self._integer("attention.head_count_kv"),
            head_dim=dim,
            scale=dim**-0.5,
            rope=RopeSpec(dim=dim, inv_freq=tuple(frequencies), style=self.checkpoint.rope_style),
            window=window,
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
        )

    # -- reading

    @property
    def _h(self) -> Mapping[str, Any]:
        return self.checkpoint.hparams

    @property
    def _gemma(self) -> bool:
        return self.checkpoint.architecture == "gemma3"

    def _embed_scale(self) -> float:
        return self._integer("embedding_length") ** 0.5 if self._gemma else 1.0

    def _integer(self, key: str) -> int:
        return int(self._h[key])

    def _number(self, key: str) -> float:
        return float(self._h[key])

    def _has(self, name: str) -> bool:
        return name in self.checkpoint.names()

    def _raw(self, name: str) -> Values:
        if name not in self._values:
            self._values[name] = values_of(self.checkpoint.tensor(name))
        return self._values[name]

    def _matrix(self, name: str) -> Values:
        """A weight as the arithmetic keeps it."""
        return self.a.weight(self._raw(name))

    def _met_by(self, name: str) -> Arithmetic:
        """How activations enter a product with that weight."""
        return self.a.dense if self.checkpoint.tensor(name).format in FLOATS else self.a

    def _maybe(self, name: str) -> Values | None:
        return self._raw(name) if self._has(name) else None
