"""Mutants of attention."""

from __future__ import annotations

from typing import Any

import attrs

from halogen_conformance.mutants.naive import Defects, attend
from halogen_conformance.mutants.registry import mutant


def _naive(backend: Any, **defects: Any) -> None:
    wrong = Defects(**defects)

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        return attend(backend, q, kv, layer, meta, spec, sinks, wrong)

    backend.ops.attention = attention


def _with_spec(backend: Any, change: Any) -> None:
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        return right(q, kv, layer, meta, change(spec), sinks=sinks)

    backend.ops.attention = attention


@mutant("L1/attention/prefill@f32")
def causal_sees_next(backend):
    """A query sees the key after its own: the mask is off by one"""
    _naive(backend, causal_shift=1)


@mutant("L1/attention/prefill@f32")
def causal_misses_itself(backend):
    """A query does not see its own key"""
    _naive(backend, causal_shift=-1)


@mutant("L1/attention/H6-2@f32")
def heads_interleaved(backend):
    """Query head h reads KV head h % Hkv instead of h // group"""
    _naive(backend, heads=lambda h, spec: h % spec.num_kv_heads)


@mutant("L1/attention/chunk@f32")
def chunk_counts_from_zero(backend):
    """Queries of a later chunk are masked as if the chunk were the whole sequence"""
    _naive(backend, position_shift=True)


@mutant("L1/attention/window16@f32")
def window_one_more(backend):
    """The sliding window holds one key too many"""
    _naive(backend, window_shift=1)


@mutant("L1/attention/window16@f32")
def window_one_less(backend):
    """The sliding window holds one key too few"""
    _naive(backend, window_shift=-1)


@mutant("L1/attention/B16-edges@f32")
def page_edge_lost(backend):
    """The first token on a fresh page is not read"""
    _naive(backend, lose_page_edge=True)


@mutant("L1/attention/B16-edges@f32")
def stale_slot_read(backend):
    """One slot beyond the sequence's end is read and weighed"""
    _naive(backend, keys_past_end=1, causal_shift=1)


@mutant("L1/attention/context2048@f32")
def table_ignored_past_1024(backend):
    """The block table is not followed past 1,024 tokens"""
    _naive(backend, longest=1024)


@mutant("L1/attention/many@f32")
def sequences_past_a_tile(backend):
    """Sequences after the 32nd of a step are left out"""
    _naive(backend, most_sequences=32)


@mutant("L1/attention/H4-4@f32")
def layer_ignored(backend):
    """Every layer reads the cache of the first"""
    _naive(backend, ignore_layer=True)


@mutant("L1/attention/H4-4@f32")
def values_are_keys(backend):
    """The sum is over keys instead of values"""
    _naive(backend, values_are_keys=True)


@mutant("L1/attention/huge@f32")
def no_maximum_subtracted(backend):
    """exp overflows on huge logits because the row's maximum is not subtracted"""
    _naive(backend, no_maximum=True)


@mutant("L1/attention/sinks@f32")
def sink_has_a_value(backend):
    """The sink adds the first value instead of nothing"""
    _naive(backend, sink_has_value=True)


@mutant("L1/attention/sinks@f32")
def sink_missing(backend):
    """Attention sinks are ignored"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        return right(q, kv, layer, meta, spec)

    backend.ops.attention = attention


@mutant("L1/attention/softcap@f32")
def softcap_missing(backend):
    """The soft cap on attention logits is ignored"""
    _with_spec(backend, lambda spec: attrs.evolve(spec, softcap=None))


@mutant("L1/attention/H4-4@f32")
def scale_ignored(backend):
    """1/sqrt(D) whatever the model's scale is"""
    _with_spec(backend, lambda spec: attrs.evolve(spec, scale=spec.head_dim**-0.5))


@mutant("L1/attention/D80@f32", "L1/attention/D96@f32")
def scale_wrong_for_one_head_dim(backend):
    """Head dim 80 is scaled as if it were padded to 96"""

    def change(spec):
        padded = (80 / 96) ** 0.5 if spec.head_dim == 80 else 1.0
        return attrs.evolve(spec, scale=spec.scale * padded)

    _with_spec(backend, change)


@mutant("L1/attention/nan@f32")
def nan_query_swallowed(backend):
    """NaN in a query becomes a plausible number"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        return right(q.nan_to_num(), kv, layer, meta, spec, sinks=sinks)

    backend.ops.attention = attention


@mutant("L1/attention/T0@f32")
def empty_step_refused(backend):
    """A step without tokens raises"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        q.view(len(q), -1)
        return right(q, kv, layer, meta, spec, sinks=sinks)

    backend.ops.attention = attention
