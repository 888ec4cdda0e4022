"""The ops a model is composed of. The core calls these and nothing else on device arrays.

Letters as in `records.py`. Activations are [T, ...] arrays of the backend's compute dtype;
results are new arrays unless said. Every op accepts T = 0. A backend implements what it
accelerates and inherits the rest from `TorchBackend` (or falls back through the host).
"""

from __future__ import annotations

from typing import Protocol

from halogen_core.spi.arrays import Array
from halogen_core.spi.memory import KVCache
from halogen_core.spi.operations import Activation, AttentionSpec, MoESpec, PackedWeight
from halogen_core.spi.step import Sampled, StepMeta

OPS = (
    "embed",
    "rms_norm",
    "add_rms_norm",
    "add",
    "linear",
    "qkv_rope_store",
    "attention",
    "gated_act",
    "mlp",
    "moe",
    "select_rows",
    "logits",
    "sample",
)
"""Every op by name; the conformance suite and the placement report cover exactly these."""

FUSED_OPS = ("add_rms_norm", "mlp")
"""Ops with a default composition of others, so that fused can be tested against composed."""


class Ops(Protocol[Array]):
    """Device arithmetic. Raises `UnsupportedOp` for what `supports` denies."""

    def embed(self, token_ids: Array, table: PackedWeight[Array], *, scale: float = 1.0) -> Array:
        """Rows of `table` [V, H] for token_ids [T], times `scale` (Gemma): [T, H]."""
        ...

    def rms_norm(self, x: Array, weight: PackedWeight[Array], *, eps: float) -> Array:
        """`x / sqrt(mean(x²) + eps) * weight` over the last axis of x [T, H], float32 inside."""
        ...

    def add_rms_norm(
        self, x: Array, residual: Array, weight: PackedWeight[Array], *, eps: float
    ) -> tuple[Array, Array]:
        """`s = x + residual`; returns (`rms_norm(s)`, `s`), both [T, H]. Inputs are consumed."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """`x + y`, both [T, H]. Inputs are consumed."""
        ...

    def linear(
        self, x: Array, weight: PackedWeight[Array], *, bias: PackedWeight[Array] | None = None
    ) -> Array:
        """`x @ weight.T + bias` for x [T, K], weight [N, K], bias [N]: [T, N].

        A weight packed from several parts gives their outputs side by side.
        """
        ...

    def qkv_rope_store(
        self,
        qkv: Array,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Array],
        spec: AttentionSpec,
        *,
        q_norm: PackedWeight[Array] | None = None,
        k_norm: PackedWeight[Array] | None = None,
    ) -> Array:
        """Split qkv [T, (Hq + 2 Hkv) D]; norm Q and K per head (weights [D]) where given; rotate
        Q and K by position; write K and V to `meta.slot_mapping` of `layer`. Returns Q [T, Hq D].
        """
        ...

    def attention(
        self,
        q: Array,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Array],
        spec: AttentionSpec,
        *,
        sinks: PackedWeight[Array] | None = None,
    ) -> Array:
        """Causal paged attention (Kwon et al., SOSP 2023) for prefill, decode and mixed steps.

        q [T, Hq D] attends to its sequence's KV by block table, own step included: query j of a
        sequence with n queries and length s is at position s - n + j. Query head h reads KV head
        h // (Hq / Hkv). `sinks` [Hq] are extra softmax logits with no value (gpt-oss). [T, Hq D].
        """
        ...

    def gated_act(self, gate_up: Array, kind: Activation) -> Array:
        """`act(gate) * up` for gate_up [T, 2F], gate in the first half: [T, F]."""
        ...

    def mlp(
        self,
        x: Array,
        gate_up: PackedWeight[Array],
        down: PackedWeight[Array],
        kind: Activation,
    ) -> Array:
        """`linear(gated_act(linear(x, gate_up)), down)`: [T, H]."""
        ...

    def moe(
        self,
        x: Array,
        router: PackedWeight[Array],
        gate_up: PackedWeight[Array],
        down: PackedWeight[Array],
        spec: MoESpec,
    ) -> Array:
        """Mixture of experts: route x [T, H] by router [E, H], each token through its top-k of
        gate_up [E, 2F, H] and down [E, H, F], weighted sum: [T, H]. Ties go to the lower expert.
        """
        ...

    def select_rows(self, x: Array, meta: StepMeta[Array]) -> Array:
        """Rows `meta.logit_rows` of x [T, H]: [R, H]."""
        ...

    def logits(
        self,
        x: Array,
        weight: PackedWeight[Array],
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Array:
        """`x @ weight.T * scale` in float32, then softcap: x [R, H], weight [V, H], [R, V]."""
        ...

    def sample(self, logits: Array, meta: StepMeta[Array]) -> Sampled[Array]:
        """A token per row of logits [R, V] as `meta.host.sampling` says; does not synchronise."""
        ...
