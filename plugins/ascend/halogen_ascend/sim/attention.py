"""Paged attention as micro-tasks: (sequence, KV head, query tile, KV chunk), merged online.

Each chunk of KV blocks is one cube task that leaves (max, sum, weighted values); a vector task per
query tile folds the parts together in the order they ran (online softmax, Milakov & Gimelshein
2018; split-KV as in Flash-Decoding, Dao et al. 2023). The chunk length is fixed, so a sequence's
result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from halogen_ascend.constraints import FUSED_HEAD_DIMS
from halogen_ascend.errors import OutOfRange
from halogen_ascend.sim.kvcache import KVPool
from halogen_ascend.sim.nz import ROWS
from halogen_ascend.sim.tasks import MicroTask, Program
from halogen_core.spi import AttentionSpec, StepBatch

QUERY_TILE = 128

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """One attention call; `chunk_blocks` KV blocks per task, 0: a head's whole cache in one."""

    q: torch.Tensor
    """[T, Hq, D]"""
    out: torch.Tensor
    """[T, Hq, D]"""
    kv: KVPool
    layer: int
    spec: AttentionSpec
    sinks: torch.Tensor | None
    chunk_blocks: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.spec.num_heads // self.spec.num_kv_heads


@attrs.frozen(kw_only=True)
class Tile:
    """Query rows q0 to q1 of T, at positions from `position`, of one sequence and KV head."""

    sequence: int
    head: int
    q0: int
    q1: int
    position: int
    blocks: tuple[int, ...]
    first: bool
    """The first tile of its sequence: it finds no KV in L2 yet."""

    @property
    def end(self) -> int:
        """KV length that the last row sees."""
        return self.position + self.q1 - self.q0


def program(call: Call, host: StepBatch) -> Program:
    """The whole call as one launch."""
    check_lengths(host)
    call.kv.check_blocks("attention", host)
    graph = Program("attention")
    for tile in _tiles(host, call.spec):
        parts: list[Part] = []
        indices = [graph.add(task) for task in _partials(call, tile, parts)]
        graph.add(_merge(call, tile, parts, tuple(indices)))
    return graph


def _tiles(host: StepBatch, spec: AttentionSpec) -> Iterator[Tile]:
    starts = host.query_start_loc.tolist()
    for sequence, length in enumerate(host.seq_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        base = length - (last - first)
        blocks = tuple(int(b) for b in host.block_tables[sequence] if b >= 0)
        for q0 in range(first, last, QUERY_TILE):
            for head in range(spec.num_kv_heads):
                yield Tile(
                    sequence=sequence,
                    head=head,
                    q0=q0,
                    q1=min(q0 + QUERY_TILE, last),
                    position=base + q0 - first,
                    blocks=blocks,
                    first=q0 == first,
                )


def _partials(call: Call, tile: Tile, parts: list[Part]) -> Iterator[MicroTask]:
    size = call.kv.spec.block_size
    begin = 0
    if call.spec.window is not None:
        begin = max(0, tile.position - call.spec.window + 1)
    step = call.chunk_blocks * size or max(tile.end, 1)
    # chunk edges are multiples of the step, so that a growing sequence keeps its chunks
    for start in range(begin // step * step, tile.end, step):
        low, high = max(start, begin), min(start + step, tile.end)
        if high > low:
            yield _partial(call, tile, (low, high, start, step), parts)


def _partial(
    call: Call, tile: Tile, span: tuple[int, int, int, int], parts: list[Part]
) -> MicroTask:
    low, high, start, step = span
    size, dim = call.kv.spec.block_size, call.spec.head_dim
    first = low // size
    blocks = tile.blocks[first : -(-high // size)]
    rows = -(-(tile.q1 - tile.q0) * call.group // ROWS) * ROWS
    itemsize = 4 if call.kv.spec.dtype == "f32" else 2
    # other sizes run composed: their scores travel through memory
    fused = dim in FUSED_HEAD_DIMS

    def run() -> None:
        shift = first * size
        keys, values = call.kv.gather(call.layer, blocks, tile.head, high - shift, low - shift)
        # whole chunks only: sums over a fixed length round alike however far the sequence is
        edges = (0, 0, low - start, start + step - high)
        keys, values = (torch.nn.functional.pad(x, edges) for x in (keys, values))
        parts.append(_softmax_part(call, tile, start, keys, values))

    return MicroTask(
        unit="cube",
        label=f"seq {tile.sequence} head {tile.head} q {tile.q0}:{tile.q1} kv {low}:{high}",
        macs=2 * rows * dim * (high - low),
        itemsize=2,
        hbm_bytes=2 * (high - low) * dim * itemsize if tile.first else 0,
        l2_bytes=rows * (dim + 2) * 4 + (0 if fused else 2 * rows * (high - low) * 4),
        bank=call.kv.bank(blocks[0]) if len(blocks) == 1 else None,
        run=run,
    )


def _softmax_part(
    call: Call, tile: Tile, low: int, keys: torch.Tensor, values: torch.Tensor
) -> Part:
    """Row maxima, sums and weighted values of one chunk: [g q, 1], [g q, 1], [g q, D] float32."""
    count = tile.q1 - tile.q0
    lo = tile.head * call.group
    q = call.q[tile.q0 : tile.q1, lo : lo + call.group].float().transpose(0, 1)
    flat = q.reshape(call.group * count, -1)
    short = -flat.shape[0] % ROWS
    scores = torch.nn.functional.pad(flat, (0, 0, 0, short)) @ keys.T * call.spec.scale
    if call.spec.softcap is not None:
        scores = call.spec.softcap * torch.tanh(scores / call.spec.softcap)
    # padded rows repeat the last position so that they stay finite; they are dropped at the merge
    where = torch.arange(tile.position, tile.end).repeat(call.group)
    where = torch.nn.functional.pad(where, (0, short), value=tile.end - 1)[:, None]
    at = torch.arange(low, low + keys.shape[0])[None]
    hidden = at > where
    if call.spec.window is not None:
        hidden |= at <= where - call.spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    return top, weights.sum(1, keepdim=True), weights @ values


def _merge(call: Call, tile: Tile, parts: list[Part], after: tuple[int, ...]) -> MicroTask:
    count, dim = tile.q1 - tile.q0, call.spec.head_dim
    rows = count * call.group

    def run() -> None:
        top, total, acc = parts[0]
        for other_top, other_total, other_acc in parts[1:]:
            best = torch.maximum(top, other_top)
            safe = torch.where(best == -torch.inf, 0.0, best)
            old, new = torch.exp(top - safe), torch.exp(other_top - safe)
            total = total * old + other_total * new
            acc = acc * old + other_acc * new
            top = best
        lo = tile.head * call.group
        if call.sinks is not None:
            extra = call.sinks[lo : lo + call.group].repeat_interleave(count)[:, None]
            best = torch.maximum(top[:rows], extra)
            old = torch.exp(top[:rows] - best)
            total, acc = total[:rows] * old + torch.exp(extra - best), acc[:rows] * old
        merged = (acc[:rows] / total[:rows]).view(call.group, count, dim).transpose(0, 1)
        call.out[tile.q0 : tile.q1, lo : lo + call.group] = merged

    size = len(after) * rows * (dim + 2) * 4
    return MicroTask(
        unit="vector",
        label=f"merge seq {tile.sequence} head {tile.head} q {tile.q0}:{tile.q1}",
        vector_bytes=size,
        l2_bytes=size,
        after=after,
        run=run,
    )


def check_lengths(host: StepBatch) -> None:
    """Every list agrees with every other; stale state from the step before shows here."""
    count = host.num_sequences
    queries = np.diff(host.query_start_loc)
    if len(queries) != count or len(host.block_tables) != count:
        raise OutOfRange(
            f"`attention`: {len(queries)} query lengths and {len(host.block_tables)} block tables "
            f"for {count} KV lengths",
            fix="every host list of a step has one entry per sequence",
        )
    wrong = np.flatnonzero((queries < 0) | (queries > host.seq_lens))
    if len(wrong):
        s = int(wrong[0])
        raise OutOfRange(
            f"`attention`: sequence {s} has {queries[s]} queries and length {host.seq_lens[s]}",
            fix="state of an earlier step was kept; rebuild the batch",
        )
