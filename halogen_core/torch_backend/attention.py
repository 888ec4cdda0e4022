"""Paged attention (Kwon et al., SOSP 2023) in plain torch, without a loop over tokens.

Sequences with one query are read together, padded to similar lengths; longer prompts one by one.
KV is gathered by one indexed read per group and layer; the row indices are shared by all layers.
Scores and softmax are float32.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.memory import KVCache
from halogen_core.spi.operations import AttentionSpec
from halogen_core.spi.step import StepBatch
from halogen_core.torch_backend.kv import decode, torch_kv
from halogen_core.torch_backend.step import TorchStepMeta, upload_arrays

_SCORE_ELEMENTS = 1 << 24
"""Largest score matrix made at once (64 MiB of float32)."""


@attrs.frozen(eq=False)
class _Group:
    """Sequences that are attended together: C sequences of n queries over L keys."""

    query_rows: Tensor | None
    """int64 [C n] rows of T; None: all rows in order."""
    block_rows: Tensor
    """int64 [2 C Hkv M] rows of the layer seen as [(N + 1) 2 Hkv, B row]."""
    hidden: Tensor
    """bool [C, n, L] true where a query must not look."""
    stale: Tensor
    """int64 rows of [2 C Hkv L] that hold no token of this sequence."""
    sequences: int
    queries: int
    blocks: Tensor
    """Storage for the blocks read, used by every layer in turn: fresh memory costs page faults."""
    values: Tensor
    """float32 [2 C Hkv L, D], `blocks` itself where that is float32."""


def attend(
    q: Tensor,
    kv: KVCache,
    layer: int,
    meta: TorchStepMeta,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Q [T, Hq D] over the paged cache: [T, Hq D]."""
    groups = meta.once(
        ("groups", id(kv), spec.window, spec.num_kv_heads), lambda: _groups(kv, meta, spec)
    )
    if len(groups) == 1 and groups[0].query_rows is None:
        return _attend_group(q, kv, layer, groups[0], spec, sinks)
    out = torch.empty_like(q)
    for group in groups:
        assert group.query_rows is not None
        part = _attend_group(q[group.query_rows], kv, layer, group, spec, sinks)
        out.index_copy_(0, group.query_rows, part)
    return out


def _attend_group(
    q: Tensor, kv: KVCache, layer: int, group: _Group, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Q [C n, Hq D] of one group; queries of one KV head are rows of one matrix product."""
    sequences, n, kv_heads = group.sequences, group.queries, spec.num_kv_heads
    per_kv = spec.num_heads // kv_heads
    keys, values = _read(kv, layer, group, spec)
    heads = q.view(sequences, n, kv_heads, per_kv, spec.head_dim).float()
    rows = max(1, _SCORE_ELEMENTS // (sequences * spec.num_heads * keys.shape[1]))
    parts = []
    for start in range(0, n, rows):
        some = heads[:, start : start + rows].permute(0, 2, 3, 1, 4)
        hidden = group.hidden[:, start : start + rows]
        out = _attend_rows(some, keys, values, hidden, spec, sinks)
        parts.append(out.permute(0, 3, 1, 2, 4))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.reshape(q.shape).to(q.dtype)


def _attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Q [C, Hkv, G, n, D] over keys and values [C Hkv, L, D]; hidden [C, n, L]."""
    sequences, kv_heads, per_kv, n, dim = q.shape
    flat = (q * spec.scale).reshape(sequences * kv_heads, per_kv * n, dim)
    scores = torch.bmm(flat, keys.transpose(1, 2))
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    grid = scores.view(sequences, kv_heads, per_kv, n, -1)
    grid.masked_fill_(hidden[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    if sinks is not None:
        # softmax with one more logit of no value is softmax times 1 / (1 + exp(sink - lse))
        share = torch.sigmoid(grid.logsumexp(-1) - sinks.view(1, kv_heads, per_kv, 1))
        weights = weights * share.view(sequences * kv_heads, per_kv * n, 1)
    return torch.bmm(weights, values).view(q.shape)


def _read(kv: KVCache, layer: int, group: _Group, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Keys and values of a group, float32 [C Hkv, L, D] each."""
    payload = torch_kv(kv)
    rows, both = payload.layers[layer], group.values
    blocks = rows.view(-1, group.blocks.shape[1])
    torch.index_select(blocks, 0, group.block_rows, out=group.blocks)
    if both.data_ptr() != group.blocks.data_ptr():
        both.copy_(decode(group.blocks.view(-1, rows.shape[1]), payload.dtype))
    if group.stale.numel():
        # stale slots weigh 0, but 0 times a NaN left by someone else is NaN
        both.index_fill_(0, group.stale, 0)
    keys, values = both.view(2, group.sequences * spec.num_kv_heads, -1, spec.head_dim)
    return keys, values


# ---------------------------------------------------------------- plans, once per step


def _groups(kv: KVCache, meta: TorchStepMeta, spec: AttentionSpec) -> list[_Group]:
    """Which sequences are attended together in this step."""
    host = meta.host
    lengths = np.diff(host.query_start_loc)
    members: dict[tuple[int, int], list[int]] = {}
    for sequence, (queries, tokens) in enumerate(zip(lengths, host.seq_lens, strict=True)):
        if queries == 1:
            visible = min(tokens, spec.window) if spec.window else tokens
            # within a power of two, so that padding at most doubles the reading
            members.setdefault((1, int(visible).bit_length()), []).append(sequence)
        elif queries > 1:
            members[int(queries), -1 - sequence] = [sequence]
    alone = len(members) == 1
    return [
        _group(kv, meta, spec, np.array(sequences), whole=alone) for sequences in members.values()
    ]


def _group(
    kv: KVCache, meta: TorchStepMeta, spec: AttentionSpec, members: NDArray[np.intp], *, whole: bool
) -> _Group:
    host, block_size = meta.host, kv.layout.spec.block_size
    starts, tokens = host.query_start_loc[members], host.seq_lens[members].astype(np.int64)
    queries = int(host.query_start_loc[members[0] + 1] - starts[0])
    first_query = tokens - queries
    first_block = np.zeros_like(tokens)
    if spec.window:
        first_block = np.maximum(first_query - spec.window + 1, 0) // block_size
    blocks = -(-tokens // block_size) - first_block
    columns = first_block[:, None] + np.arange(blocks.max())
    inside = np.arange(blocks.max()) < blocks[:, None]
    listed = host.block_tables[members[:, None], np.where(inside, columns, 0)]
    table = np.where(inside, listed, kv.num_blocks).astype(np.int64)
    slots = (first_block * block_size)[:, None] + np.arange(blocks.max() * block_size)
    query_rows = (starts[:, None] + np.arange(queries)).reshape(-1).astype(np.int64)
    arrays = [
        _block_rows(table, spec.num_kv_heads),
        _hidden(slots, first_query[:, None] + np.arange(queries), spec.window),
        _stale_rows(slots, tokens, spec.num_kv_heads),
        query_rows,
    ]
    block_rows, hidden, stale, rows = upload_arrays(arrays, meta.positions.device)
    in_order = whole and len(query_rows) == host.num_tokens
    read = torch_kv(kv).layers[0]
    storage = read.new_empty((len(block_rows), block_size * read.shape[1]))
    shape = (len(block_rows) * block_size, spec.head_dim)
    return _Group(
        None if in_order else rows,
        block_rows,
        hidden,
        stale,
        len(members),
        queries,
        blocks=storage,
        values=storage.view(shape)
        if storage.dtype is torch.float32
        else storage.new_empty(shape, dtype=torch.float32),
    )


def _block_rows(table: NDArray[np.int64], kv_heads: int) -> NDArray[np.int64]:
    """Rows of [(N + 1), 2, Hkv] in the order [2, C, Hkv, M]."""
    kinds, heads = np.arange(2)[:, None, None, None], np.arange(kv_heads)[None, None, :, None]
    return ((table[None, :, None, :] * 2 + kinds) * kv_heads + heads).reshape(-1)


def _hidden(
    slots: NDArray[np.int64], positions: NDArray[np.int64], window: int | None
) -> NDArray[np.bool_]:
    """[C, n, L]: the key lies after the query or before its window."""
    distance = positions[:, :, None] - slots[:, None, :]
    hidden: NDArray[np.bool_] = distance < 0
    return hidden | (distance >= window) if window else hidden


def _stale_rows(
    slots: NDArray[np.int64], tokens: NDArray[np.int64], kv_heads: int
) -> NDArray[np.int64]:
    """Rows of [2, C, Hkv, L] whose slot is past the sequence's end."""
    sequences, length = slots.shape
    past = np.broadcast_to(
        (slots >= tokens[:, None])[None, :, None], (2, sequences, kv_heads, length)
    )
    return np.flatnonzero(past)


def kv_rows(kv: KVCache, batch: StepBatch) -> NDArray[np.int64]:
    """Where K and V of each token go: rows of [(N + 1), 2, Hkv, B] in the order [T, 2, Hkv]."""
    spec = kv.layout.spec
    block, offset = np.divmod(batch.slot_mapping, spec.block_size)
    kinds = np.arange(2 * spec.num_kv_heads)
    heads = block[:, None] * 2 * spec.num_kv_heads + kinds
    rows: NDArray[np.int64] = (heads * spec.block_size + offset[:, None]).reshape(-1)
    return rows
