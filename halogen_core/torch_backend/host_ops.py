"""Every op for a device whose arrays are opaque: down to the host, plain torch, up again.

A new device has a complete backend on its first day when it can move arrays; it becomes fast by
overriding one op after the other. What still goes through the host is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.arrays import Array
from halogen_core.spi.memory import (
    KVBlocks,
    KVCache,
)
from halogen_core.spi.operations import (
    Activation,
    AttentionSpec,
    MoESpec,
    PackedWeight,
    QuantTensor,
)
from halogen_core.spi.ops import Ops
from halogen_core.spi.step import Sampled, StepMeta
from halogen_core.torch_backend.backend import TorchBackend


class Wrapped(Protocol[Array]):
    """What the fallback needs of the device's backend (any `spi.Backend` has it)."""

    def upload(self, host: NDArray[Any]) -> Array: ...

    def download(self, array: Array) -> NDArray[Any]: ...

    def unpack(self, weight: PackedWeight[Array]) -> NDArray[Any]: ...

    def kv_export(self, kv: KVCache, blocks: Sequence[int]) -> KVBlocks: ...

    def kv_import(self, kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None: ...


@attrs.frozen(eq=False)
class OnHost:
    """Payload of a weight or KV pool that (still) lives on the host."""

    value: Any


class HostFallbackOps(Generic[Array]):
    """`spi.Ops[Array]` through the host; override what the device does itself.

    Weights and KV pools may be the device's own: they come over by `unpack` (kept) and by
    `kv_export` and `kv_import` of the blocks in question.
    """

    def __init__(self, backend: Wrapped[Array], host: TorchBackend) -> None:
        self.backend = backend
        self.host = host
        self.counts: Counter[str] = Counter()
        self._weights: WeakKeyDictionary[PackedWeight[Array], PackedWeight[Tensor]]
        self._weights = WeakKeyDictionary()
        self._metas: WeakKeyDictionary[StepMeta[Array], StepMeta[Tensor]] = WeakKeyDictionary()
        self._mirrors: WeakKeyDictionary[KVCache, KVCache] = WeakKeyDictionary()

    def embed(self, token_ids: Array, table: PackedWeight[Array], *, scale: float = 1.0) -> Array:
        ops = self._called("embed")
        return self._up(ops.embed(self._down(token_ids), self._weight(table), scale=scale))

    def rms_norm(self, x: Array, weight: PackedWeight[Array], *, eps: float) -> Array:
        ops = self._called("rms_norm")
        return self._up(ops.rms_norm(self._down(x), self._weight(weight), eps=eps))

    def add_rms_norm(
        self, x: Array, residual: Array, weight: PackedWeight[Array], *, eps: float
    ) -> tuple[Array, Array]:
        ops = self._called("add_rms_norm")
        normed, total = ops.add_rms_norm(
            self._down(x), self._down(residual), self._weight(weight), eps=eps
        )
        return self._up(normed), self._up(total)

    def add(self, x: Array, y: Array) -> Array:
        return self._up(self._called("add").add(self._down(x), self._down(y)))

    def linear(
        self, x: Array, weight: PackedWeight[Array], *, bias: PackedWeight[Array] | None = None
    ) -> Array:
        ops = self._called("linear")
        return self._up(ops.linear(self._down(x), self._weight(weight), bias=self._optional(bias)))

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
        ops = self._called("qkv_rope_store")
        written = np.unique(meta.host.slot_mapping // kv.layout.spec.block_size)
        with self._kv(kv, written, writes=True) as host_kv:
            q = ops.qkv_rope_store(
                self._down(qkv),
                host_kv,
                layer,
                self._meta(meta),
                spec,
                q_norm=self._optional(q_norm),
                k_norm=self._optional(k_norm),
            )
        return self._up(q)

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
        ops = self._called("attention")
        table = meta.host.block_tables
        with self._kv(kv, np.unique(table[table >= 0]), writes=False) as host_kv:
            host_meta, host_sinks = self._meta(meta), self._optional(sinks)
            out = ops.attention(self._down(q), host_kv, layer, host_meta, spec, sinks=host_sinks)
        return self._up(out)

    def gated_act(self, gate_up: Array, kind: Activation) -> Array:
        return self._up(self._called("gated_act").gated_act(self._down(gate_up), kind))

    def mlp(
        self, x: Array, gate_up: PackedWeight[Array], down: PackedWeight[Array], kind: Activation
    ) -> Array:
        ops = self._called("mlp")
        return self._up(ops.mlp(self._down(x), self._weight(gate_up), self._weight(down), kind))

    def moe(
        self,
        x: Array,
        router: PackedWeight[Array],
        gate_up: PackedWeight[Array],
        down: PackedWeight[Array],
        spec: MoESpec,
    ) -> Array:
        ops = self._called("moe")
        weights = self._weight(router), self._weight(gate_up), self._weight(down)
        return self._up(ops.moe(self._down(x), *weights, spec))

    def select_rows(self, x: Array, meta: StepMeta[Array]) -> Array:
        ops = self._called("select_rows")
        return self._up(ops.select_rows(self._down(x), self._meta(meta)))

    def logits(
        self,
        x: Array,
        weight: PackedWeight[Array],
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Array:
        ops = self._called("logits")
        out = ops.logits(self._down(x), self._weight(weight), scale=scale, softcap=softcap)
        return self._up(out)

    def sample(self, logits: Array, meta: StepMeta[Array]) -> Sampled[Array]:
        found = self._called("sample").sample(self._down(logits), self._meta(meta))

        def up(array: Tensor | None) -> Array | None:
            return None if array is None else self._up(array)

        return Sampled(
            token_ids=self._up(found.token_ids),
            logprobs=up(found.logprobs),
            top_ids=up(found.top_ids),
            top_logprobs=up(found.top_logprobs),
        )

    # -- moving things

    def _called(self, op: str) -> Ops[Tensor]:
        self.counts[f"fallback_calls_{op}"] += 1
        return self.host.ops

    def _down(self, array: Array) -> Tensor:
        host = self.backend.download(array)
        self.counts["fallback_bytes_down"] += host.nbytes
        return torch.from_numpy(np.ascontiguousarray(host))

    def _up(self, array: Tensor) -> Array:
        host = self.host.download(array)
        self.counts["fallback_bytes_up"] += host.nbytes
        return self.backend.upload(host)

    def _optional(self, weight: PackedWeight[Array] | None) -> PackedWeight[Tensor] | None:
        return None if weight is None else self._weight(weight)

    def _weight(self, weight: PackedWeight[Array]) -> PackedWeight[Tensor]:
        if isinstance(weight.payload, OnHost):
            packed: PackedWeight[Tensor] = weight.payload.value
            return packed
        if weight not in self._weights:
            values = np.ascontiguousarray(self.backend.unpack(weight), dtype=np.float32)
            data = values.reshape(-1).view(np.uint8)
            part = QuantTensor(format="F32", shape=values.shape, data=data)
            self._weights[weight] = self.host.pack([part], weight.role)
        return self._weights[weight]

    def _meta(self, meta: StepMeta[Array]) -> StepMeta[Tensor]:
        if meta not in self._metas:
            self._metas[meta] = self.host.upload_step(meta.host)
        return self._metas[meta]

    @contextmanager
    def _kv(self, kv: KVCache, blocks: NDArray[Any], *, writes: bool) -> Iterator[KVCache]:
        """The pool on the host: itself if it lives there, else a mirror with `blocks` current."""
        if isinstance(kv.payload, OnHost):
            yield kv.payload.value
            return
        if kv not in self._mirrors:
            layout = self.host.kv_layout(kv.layout.spec)
            self._mirrors[kv] = self.host.kv_alloc(layout, kv.num_blocks)
        mirror, wanted = self._mirrors[kv], blocks.tolist()
        self.host.kv_import(mirror, wanted, self.backend.kv_export(kv, wanted))
        yield mirror
        if writes:
            self.backend.kv_import(kv, wanted, self.host.kv_export(mirror, wanted))
