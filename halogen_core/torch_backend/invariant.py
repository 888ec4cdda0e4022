"""Batch-invariant ops: a row's bits do not depend on what shares its step or how it is chunked.

What torch does on a CPU was found by test (tests/unit/compute): matrix products pick kernels by
shape, so rows go through in tiles of a fixed height; silu and gelu round their last few elements
differently from the rest, exp and tanh do not; attention runs per tile of queries at fixed
positions over fixed tiles of keys, so that neither chunking nor padding changes an order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.memory import KVCache
from halogen_core.spi.operations import Activation, AttentionSpec, PackedWeight, WeightRole
from halogen_core.spi.step import StepMeta
from halogen_core.torch_backend.kv import decode, torch_kv
from halogen_core.torch_backend.ops import TorchOps
from halogen_core.torch_backend.signatures import refuse_uneven_heads
from halogen_core.torch_backend.step import TorchStepMeta, torch_meta, upload_arrays

_ROWS = 8
"""Rows of a matrix product's tile."""
_QUERIES = 8
_KEYS = 128


class InvariantTorchOps(TorchOps):
    """`TorchOps` in fixed tiles. Slower; for tests, audits and reproducible runs."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = len(x)
        tiles = -(-rows // _ROWS)
        if rows % _ROWS:
            x = F.pad(x, (0, 0, 0, tiles * _ROWS - rows))
        out = torch.empty((tiles * _ROWS, weight.shape[0]), dtype=x.dtype, device=x.device)
        for start in range(0, tiles * _ROWS, _ROWS):
            out[start : start + _ROWS] = self.tile_product(x[start : start + _ROWS], weight, bias)
        return out[:rows]

    def tile_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product of one tile; its height never changes."""
        return F.linear(x, weight, bias)

    def silu(self, x: Tensor) -> Tensor:
        return x * self.sigmoid(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.neg().exp_().add_(1).reciprocal_()

    def gelu_tanh(self, x: Tensor) -> Tensor:
        inner = (x + x * x * x * 0.044715) * 0.7978845608028654
        return inner.tanh_().add_(1) * x * 0.5

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Tensor],
        spec: AttentionSpec,
        *,
        sinks: PackedWeight[Tensor] | None = None,
    ) -> Tensor:
        step = torch_meta(meta)
        refuse_uneven_heads(spec)
        plan = step.once(
            ("tiles", id(kv), spec.num_kv_heads), lambda: _plan(kv, step, spec.num_kv_heads)
        )
        q = self._activation(q)
        return _attend(q, kv, layer, plan, spec, sinks.payload if sinks else None)


def claim_holds(ops: TorchOps, device: torch.device) -> bool:
    """Whether rows are independent on this machine too: a few milliseconds of what ops are made of.

    Libraries choose kernels by processor and by shape (cuBLAS: by batch count too), so what was
    tested elsewhere is checked before it is said.
    """
    numbers = torch.sin(torch.arange(1 << 16, dtype=torch.float32, device=device) * 1.7)

    def same(function: Callable[[Tensor], Tensor], *shape: int) -> bool:
        values = numbers[: prod(shape)].view(shape)
        whole = function(values)
        parts = ((0, 1), (3, 4), (2, 9), (1, shape[0]))
        return all(torch.equal(function(values[a:b].clone()), whole[a:b]) for a, b in parts)

    def product(x: Tensor) -> Tensor:
        weight = numbers[: 96 * x.shape[1]].view(96, -1).to(ops.dtype)
        return ops.gated_act(ops.matmul(x.to(ops.dtype), weight), Activation.SILU)

    return (
        all(same(product, 11, inner) for inner in (64, 63, 576))
        and all(same(lambda x: _normed(x, ops), 11, *rest) for rest in ((576,), (1, 16), (4, 64)))
        and same(lambda q: torch.bmm(q, q.transpose(1, 2)), 11, 16, 64)
        and same(lambda w: torch.bmm(w, w.transpose(1, 2)), 11, 16, _KEYS)
        and same(lambda w: w.exp().sum(-1, keepdim=True), 11, 16, _KEYS)
    )


def _normed(x: Tensor, ops: TorchOps) -> Tensor:
    ones = torch.ones(x.shape[-1], device=x.device)
    weight: PackedWeight[Tensor] = PackedWeight(
        payload=ones, shape=(len(ones),), nbytes=0, format_id="", role=WeightRole.NORM
    )
    return ops.rms_norm(x, weight, eps=1e-6)


@attrs.frozen(eq=False)
class _Plan:
    """Tiles of queries; tile i holds query positions `first[i]` .. `first[i] + _QUERIES - 1`."""

    rows: Tensor
    """int64 [I Q] rows of T plus one zero row, for tile places without a query."""
    places: Tensor
    """int64 [T] where each row of T lies in [I Q]."""
    positions: Tensor
    """int64 [I, Q]"""
    lengths: Tensor
    """int64 [I] tokens of the tile's sequence."""
    slots: Tensor
    """int64 [tiles of keys, 2 I Hkv K] rows of the layer's pool."""


def _plan(kv: KVCache, meta: TorchStepMeta, kv_heads: int) -> _Plan:
    host, block_size = meta.host, kv.layout.spec.block_size
    counts = np.diff(host.query_start_loc)
    owner = np.repeat(np.arange(len(counts)), counts)
    tile, place = np.divmod(host.positions.astype(np.int64), _QUERIES)
    keys = owner * (1 << 40) + tile
    unique, item = np.unique(keys, return_inverse=True)
    owners, first = unique >> 40, (unique & ((1 << 40) - 1)) * _QUERIES
    places = item * _QUERIES + place
    rows = np.full(len(unique) * _QUERIES, host.num_tokens, dtype=np.int64)
    rows[places] = np.arange(host.num_tokens)
    lengths = host.seq_lens[owners].astype(np.int64)
    key_tiles = -(-int(lengths.max(initial=0)) // _KEYS)
    tokens = np.arange(key_tiles * _KEYS)
    column = np.minimum(tokens // block_size, max(host.block_tables.shape[1] - 1, 0))
    block = host.block_tables[owners][:, column].astype(np.int64)
    block[(tokens >= lengths[:, None]) | (block < 0)] = kv.num_blocks
    slots = _slots(block, tokens % block_size, kv_heads, block_size)
    positions = first[:, None] + np.arange(_QUERIES)
    arrays = [rows, places, positions, lengths, slots]
    return _Plan(*upload_arrays(arrays, meta.positions.device))


def _slots(
    block: NDArray[np.int64], offset: NDArray[np.int64], kv_heads: int, block_size: int
) -> NDArray[np.int64]:
    """Pool rows for blocks [I, tokens] as [key tiles, 2 I Hkv K]."""
    kinds, heads = np.arange(2)[:, None, None, None], np.arange(kv_heads)[None, None, :, None]
    rows = ((block[None, :, None] * 2 + kinds) * kv_heads + heads) * block_size + offset
    tiles = len(offset) // _KEYS
    ordered = rows.reshape(2, len(block), kv_heads, tiles, _KEYS).transpose(3, 0, 1, 2, 4)
    return ordered.reshape(tiles, 2 * len(block) * kv_heads * _KEYS)


def _attend(
    q: Tensor, kv: KVCache, layer: int, plan: _Plan, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Online softmax (Milakov and Gimelshein, 2018) over tiles of keys at fixed positions."""
    tiles, per_kv = len(plan.lengths), spec.num_heads // spec.num_kv_heads
    padded = F.pad(q.float(), (0, 0, 0, 1)).index_select(0, plan.rows)
    heads = padded.view(tiles, _QUERIES, spec.num_kv_heads, per_kv, spec.head_dim)
    heads = heads.permute(0, 2, 3, 1, 4).reshape(
        tiles * spec.num_kv_heads, per_kv * _QUERIES, spec.head_dim
    )
    peak = torch.full((*heads.shape[:2], 1), -torch.inf, device=q.device)
    total, out = torch.zeros_like(peak), torch.zeros_like(heads)
    if sinks is not None:
        sink = sinks.view(1, spec.num_kv_heads, per_kv, 1).expand(tiles, -1, -1, _QUERIES)
        peak, total = sink.reshape(peak.shape).clone(), torch.ones_like(total)
    for index in range(len(plan.slots)):
        keys, values = _read(kv, layer, plan, index, spec)
        scores = _scores(heads, keys, plan, index, spec)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # a query that sees no key yet keeps peak -inf: exp(-inf - 0) is 0, not NaN
        base = torch.where(higher == -torch.inf, 0, higher)
        weights, decay = (scores - base).exp_(), (peak - base).exp_()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + torch.bmm(weights, values)
        peak = higher
    out = out / torch.where(total == 0, 1, total)
    out = out.view(tiles, spec.num_kv_heads, per_kv, _QUERIES, spec.head_dim)
    flat = out.permute(0, 3, 1, 2, 4).reshape(tiles * _QUERIES, q.shape[1])
    return flat.index_select(0, plan.places).to(q.dtype)


def _read(
    kv: KVCache, layer: int, plan: _Plan, index: int, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Keys and values of one tile, [I Hkv, K, D] float32, zero past the sequence's end."""
    payload = torch_kv(kv)
    rows = payload.layers[layer].index_select(0, plan.slots[index])
    both = decode(rows, payload.dtype).float()
    both = both.view(2, len(plan.lengths), spec.num_kv_heads, _KEYS, spec.head_dim)
    tokens = torch.arange(index * _KEYS, (index + 1) * _KEYS, device=both.device)
    past = tokens >= plan.lengths.unsqueeze(1)
    keys, values = both.masked_fill(past[None, :, None, :, None], 0).flatten(1, 2)
    return keys, values


def _scores(heads: Tensor, keys: Tensor, plan: _Plan, index: int, spec: AttentionSpec) -> Tensor:
    """Masked scores [I Hkv, G Q, K]."""
    scores = torch.bmm(heads, keys.transpose(1, 2)).mul_(spec.scale)
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    tokens = torch.arange(index * _KEYS, (index + 1) * _KEYS, device=keys.device)
    distance = plan.positions.unsqueeze(2) - tokens
    hidden = distance < 0
    if spec.window:
        hidden = hidden | (distance >= spec.window)
    shape = (len(plan.lengths), spec.num_kv_heads, -1, _QUERIES, _KEYS)
    return scores.view(shape).masked_fill_(hidden[:, None, None], -torch.inf).view(scores.shape)
