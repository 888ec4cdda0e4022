"""A slow paged attention with one knob per classic defect; all knobs at rest it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from halogen_conformance.oracle.numbers import kv_values
from halogen_core.spi import AttentionSpec, KVCache, PackedWeight, StepMeta

Floats = Any


@attrs.frozen(kw_only=True)
class Defects:
    """What is wrong; the defaults are nothing."""

    causal_shift: int = 0
    """Keys beyond the query's own position that it sees."""
    window_shift: int = 0
    position_shift: bool = False
    """Queries of a chunk count from the start of the sequence."""
    heads: Callable[[int, AttentionSpec], int] = lambda h, s: h // (s.num_heads // s.num_kv_heads)
    scale: Callable[[AttentionSpec], float] = lambda s: s.scale
    ignore_layer: bool = False
    values_are_keys: bool = False
    keys_past_end: int = 0
    """Slots read beyond the sequence's end."""
    longest: int | None = None
    """Tokens of the block table that are looked at."""
    lose_page_edge: bool = False
    """A first token on a fresh page is not read."""
    no_maximum: bool = False
    """exp without subtracting the row's maximum."""
    sink_has_value: bool = False
    most_sequences: int | None = None


def attend(
    backend: Any,
    q: Any,
    kv: KVCache,
    layer: int,
    meta: StepMeta[Any],
    spec: AttentionSpec,
    sinks: PackedWeight[Any] | None,
    wrong: Defects,
) -> Any:
    """Attention as the seam has it, except for `wrong`."""
    rows = backend.download(q).reshape(-1, spec.num_heads, spec.head_dim)
    extra = None if sinks is None else backend.unpack(sinks)
    out = np.zeros_like(rows)
    host = meta.host
    for s, length in enumerate(host.seq_lens[: wrong.most_sequences]):
        at = slice(host.query_start_loc[s], host.query_start_loc[s + 1])
        keys, values = _history(backend, kv, 0 if wrong.ignore_layer else layer, host, s, wrong)
        if wrong.values_are_keys:
            values = keys
        first = 0 if wrong.position_shift else int(length) - (at.stop - at.start)
        for j, row in enumerate(rows[at]):
            for h in range(spec.num_heads):
                g = wrong.heads(h, spec)
                sink = None if extra is None else float(extra[h])
                out[at.start + j, h] = _one(
                    row[h], keys[:, g], values[:, g], first + j, spec, sink, wrong
                )
    return backend.upload(out.reshape(len(rows), -1))


def _history(
    backend: Any, kv: KVCache, layer: int, host: Any, s: int, wrong: Defects
) -> tuple[Floats, Floats]:
    size = kv.layout.spec.block_size
    length = int(host.seq_lens[s]) + wrong.keys_past_end
    if wrong.longest is not None:
        length = min(length, wrong.longest)
    if wrong.lose_page_edge and length % size == 1 and length > 1:
        length -= 1
    positions = np.arange(length)
    blocks = np.maximum(host.block_tables[s, positions // size], 0)
    data = backend.kv_export(kv, [int(b) for b in range(kv.num_blocks)]).data
    both = kv_values(data[blocks, layer, :, positions % size], kv.layout.spec.dtype)
    return both[:, 0], both[:, 1]


def _one(
    q: Floats,
    keys: Floats,
    values: Floats,
    position: int,
    spec: AttentionSpec,
    sink: float | None,
    wrong: Defects,
) -> Floats:
    logits = keys @ q.astype(np.float64) * wrong.scale(spec)
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    where = np.arange(len(keys))
    seen = where <= position + wrong.causal_shift
    if spec.window is not None:
        seen &= where > position - spec.window - wrong.window_shift
    logits, values = logits[seen], values[seen]
    if not len(logits):
        return np.zeros_like(q)
    peak = np.float32(0) if wrong.no_maximum else logits.max()
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp((logits - peak).astype(np.float32))
        total = weights.sum()
        if sink is not None:
            total = total + np.exp(np.float32(sink - peak))
        out = (weights / total) @ values
        if sink is not None and wrong.sink_has_value:
            out = out + np.exp(np.float32(sink - peak)) / total * values[0]
    return out
