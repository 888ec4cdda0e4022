"""Mutants of qkv_rope_store."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from halogen_conformance.mutants.registry import mutant
from halogen_core.spi import RopeSpec, RopeStyle


def _with_spec(backend: Any, change: Any) -> None:
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        return right(qkv, kv, layer, meta, change(spec), q_norm=q_norm, k_norm=k_norm)

    backend.ops.qkv_rope_store = qkv_rope_store


def _with_rope(backend: Any, change: Any) -> None:
    def evolve(spec):
        return spec if spec.rope is None else attrs.evolve(spec, rope=change(spec.rope))

    _with_spec(backend, evolve)


def _with_slots(backend: Any, change: Any) -> None:
    """The step's slots, changed before the write."""
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        batch = attrs.evolve(meta.host, slot_mapping=change(meta.host.slot_mapping, kv))
        again = backend.upload_step(batch)
        return right(qkv, kv, layer, again, spec, q_norm=q_norm, k_norm=k_norm)

    backend.ops.qkv_rope_store = qkv_rope_store


@mutant("L1/qkv_rope_store/D64-*@f32")
def rope_pairs_the_other_way(backend):
    """Interleaved and half-split pairing are exchanged"""
    other = {RopeStyle.NEOX: RopeStyle.INTERLEAVED, RopeStyle.INTERLEAVED: RopeStyle.NEOX}
    _with_rope(backend, lambda rope: attrs.evolve(rope, style=other[rope.style]))


@mutant("L1/qkv_rope_store/yarn-factor@f32")
def rope_factor_ignored(backend):
    """cos and sin are not multiplied by the attention factor"""
    _with_rope(backend, lambda rope: attrs.evolve(rope, attention_factor=1.0))


@mutant("L1/qkv_rope_store/partial@f32")
def rope_rotates_everything(backend):
    """A partial rotary dim is ignored and the whole head rotates"""

    def evolve(spec):
        inv_freq = tuple(1e4 ** (-i / (spec.head_dim / 2)) for i in range(spec.head_dim // 2))
        rope = RopeSpec(dim=spec.head_dim, inv_freq=inv_freq, style=spec.rope.style)
        return attrs.evolve(spec, rope=rope)

    _with_spec(backend, evolve)


@mutant("L1/qkv_rope_store/qk-norm@f32")
def qk_norm_lost(backend):
    """The norm of each head's query and key is not applied"""
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        return right(qkv, kv, layer, meta, spec)

    backend.ops.qkv_rope_store = qkv_rope_store


@mutant("L1/qkv_rope_store/qk-norm@f32")
def qk_norm_eps_fixed(backend):
    """The norm of heads uses 1e-6 whatever the layer says"""
    _with_spec(backend, lambda spec: attrs.evolve(spec, norm_eps=spec.norm_eps * 300))


@mutant("L1/qkv_rope_store/H8-2@f32")
def keys_and_values_exchanged(backend):
    """K is stored where V belongs"""
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        width = spec.num_kv_heads * spec.head_dim
        q, k, v = qkv.split([spec.num_heads * spec.head_dim, width, width], dim=1)
        swapped = qkv.new_empty(qkv.shape)
        swapped[:, : q.shape[1]], swapped[:, q.shape[1] : -width] = q, v
        swapped[:, -width:] = k
        return right(swapped, kv, layer, meta, spec, q_norm=q_norm, k_norm=k_norm)

    backend.ops.qkv_rope_store = qkv_rope_store


@mutant("L1/qkv_rope_store/B16@f32")
def slot_off_by_one(backend):
    """K and V go to the slot after the right one"""
    _with_slots(
        backend, lambda slots, kv: (slots + 1) % (kv.num_blocks * kv.layout.spec.block_size)
    )


@mutant("L1/qkv_rope_store/B8@f32", "L1/qkv_rope_store/B32@f32")
def block_size_fixed(backend):
    """Slots are computed for blocks of 16 whatever the pool has"""

    def change(slots, kv):
        size = kv.layout.spec.block_size
        block, offset = slots // size, slots % size
        return (block * size + offset % 16).astype(np.int64)

    _with_slots(backend, change)


@mutant("L1/qkv_rope_store/B16@f32")
def last_token_not_stored(backend):
    """The step's last token overwrites the one before it"""

    def change(slots, kv):
        return np.where(np.arange(len(slots)) == len(slots) - 1, slots[-2:-1], slots)

    _with_slots(backend, change)


@mutant("L1/qkv_rope_store/B16@f32")
def stores_into_first_layer(backend):
    """Every layer's K and V go to layer 0"""
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        return right(qkv, kv, 0, meta, spec, q_norm=q_norm, k_norm=k_norm)

    backend.ops.qkv_rope_store = qkv_rope_store


@mutant("L1/qkv_rope_store/far@f32")
def angles_in_half_precision(backend):
    """Positions are rounded to 11 bits before they become angles"""
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        rounded = meta.host.positions.astype(np.float16).astype(np.int32)
        again = backend.upload_step(attrs.evolve(meta.host, positions=rounded))
        return right(qkv, kv, layer, again, spec, q_norm=q_norm, k_norm=k_norm)

    backend.ops.qkv_rope_store = qkv_rope_store


@mutant("L1/qkv_rope_store/T0@f32")
def empty_store_refused(backend):
    """A step without tokens raises (met while building: a reshape of no rows)"""
    right = backend.ops.qkv_rope_store

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        q = right(qkv, kv, layer, meta, spec, q_norm=q_norm, k_norm=k_norm)
        return q.reshape(len(q), -1)

    backend.ops.qkv_rope_store = qkv_rope_store
