"""Mutants of KV blocks."""

from __future__ import annotations

import attrs
import numpy as np

from halogen_conformance.mutants.registry import mutant
from halogen_core.spi import ConfigError, KVBlocks

ROUND = "L2/kv/round-trip/f32-B16"


@mutant(ROUND)
def export_exchanges_k_and_v(backend):
    """Exported blocks hold V before K, imported ones K before V"""
    right = backend.kv_export

    def kv_export(kv, blocks):
        out = right(kv, blocks)
        return KVBlocks(spec=out.spec, data=np.ascontiguousarray(out.data[:, :, ::-1]))

    backend.kv_export = kv_export


@mutant("L1/qkv_rope_store/kv-f32@f32", "L1/attention/kv-f32@f32")
def import_and_export_exchanged_alike(backend):
    """K and V are exchanged on both ways, so that a round trip cannot tell"""
    out_, in_ = backend.kv_export, backend.kv_import

    def kv_export(kv, blocks):
        out = out_(kv, blocks)
        return KVBlocks(spec=out.spec, data=np.ascontiguousarray(out.data[:, :, ::-1]))

    def kv_import(kv, blocks, data):
        in_(kv, blocks, KVBlocks(spec=data.spec, data=np.ascontiguousarray(data.data[:, :, ::-1])))

    backend.kv_export, backend.kv_import = kv_export, kv_import


@mutant(ROUND)
def export_sorts_blocks(backend):
    """Blocks are exported in ascending order whatever was asked"""
    right = backend.kv_export
    backend.kv_export = lambda kv, blocks: right(kv, sorted(blocks))


@mutant(ROUND)
def import_forgets_the_last_layer(backend):
    """The last layer of imported blocks is not written"""
    right, export = backend.kv_import, backend.kv_export

    def kv_import(kv, blocks, data):
        old = export(kv, list(blocks)).data
        changed = np.array(data.data)
        changed[:, -1] = old[:, -1]
        right(kv, blocks, KVBlocks(spec=data.spec, data=changed))

    backend.kv_import = kv_import


@mutant("L2/kv/nan-kept")
def import_cleans_nan(backend):
    """Blocks pass through floats on the way and NaN becomes zero"""
    right = backend.kv_import

    def kv_import(kv, blocks, data):
        clean = np.nan_to_num(np.ascontiguousarray(data.data).view(np.float32))
        right(kv, blocks, KVBlocks(spec=data.spec, data=clean.view(np.uint8)))

    backend.kv_import = kv_import


@mutant("L2/kv/pool/neighbours")
def import_touches_a_neighbour(backend):
    """The block after the imported one is overwritten"""
    right = backend.kv_import

    def kv_import(kv, blocks, data):
        right(kv, blocks, data)
        if len(blocks) == 1 and blocks[0] + 1 < kv.num_blocks:
            right(kv, [blocks[0] + 1], data)

    backend.kv_import = kv_import


@mutant("L2/kv/copy/f32")
def copies_all_at_once(backend):
    """All sources are read before any destination is written"""
    out_, in_ = backend.kv_export, backend.kv_import

    def kv_copy(kv, pairs):
        if pairs:
            in_(kv, [d for _, d in pairs], out_(kv, [s for s, _ in pairs]))

    backend.kv_copy = kv_copy


@mutant("L2/kv/copy/f32")
def copies_the_first_layer_only(backend):
    """Only layer 0 of a block is copied"""
    out_, in_ = backend.kv_export, backend.kv_import

    def kv_copy(kv, pairs):
        for source, destination in pairs:
            data = np.array(out_(kv, [destination]).data)
            data[:, 0] = out_(kv, [source]).data[:, 0]
            in_(kv, [destination], KVBlocks(spec=kv.layout.spec, data=data))

    backend.kv_copy = kv_copy


@mutant("L2/kv/sharing/copy-on-write")
def copy_is_an_alias(backend):
    """A copied block is remembered as the same block, so a fork writes into its parent"""
    right = backend.ops.qkv_rope_store
    same: dict[int, int] = {}

    def kv_copy(kv, pairs):
        same.update({destination: source for source, destination in pairs})

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        size = kv.layout.spec.block_size
        slots = meta.host.slot_mapping
        blocks = np.array([same.get(int(b), int(b)) for b in slots // size], np.int64)
        batch = attrs.evolve(meta.host, slot_mapping=blocks * size + slots % size)
        again = backend.upload_step(batch)
        return right(qkv, kv, layer, again, spec, q_norm=q_norm, k_norm=k_norm)

    backend.kv_copy, backend.ops.qkv_rope_store = kv_copy, qkv_rope_store


@mutant("L2/kv/sharing/shuffled-tables")
def blocks_taken_as_consecutive(backend):
    """A sequence's blocks are read as if they lay one after another"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        tables = meta.host.block_tables.copy()
        run = (tables[:, :1] + np.arange(tables.shape[1])) % kv.num_blocks
        batch = attrs.evolve(meta.host, block_tables=np.where(tables >= 0, run, -1).astype("i4"))
        return right(q, kv, layer, backend.upload_step(batch), spec, sinks=sinks)

    backend.ops.attention = attention


@mutant("L2/kv/moving/under-readers")
def export_frees_what_it_read(backend):
    """Exporting a block clears the one after it"""
    right, in_ = backend.kv_export, backend.kv_import

    def kv_export(kv, blocks):
        out = right(kv, blocks)
        if len(blocks) == 1:
            zeros = KVBlocks(spec=out.spec, data=np.zeros_like(out.data))
            in_(kv, [(blocks[0] + 1) % kv.num_blocks], zeros)
        return out

    backend.kv_export = kv_export


@mutant("L2/kv/refuse/blocks-out-of-range")
def bounds_unchecked(backend):
    """Blocks out of range wrap around instead of being refused"""
    out_, in_, copy = backend.kv_export, backend.kv_import, backend.kv_copy

    def wrapped(kv, blocks):
        return [b % kv.num_blocks for b in blocks]

    backend.kv_export = lambda kv, blocks: out_(kv, wrapped(kv, blocks))
    backend.kv_import = lambda kv, blocks, data: in_(kv, wrapped(kv, blocks), data)
    backend.kv_copy = lambda kv, pairs: copy(kv, [tuple(wrapped(kv, p)) for p in pairs])


@mutant("L2/kv/refuse/foreign-data")
def foreign_blocks_taken(backend):
    """Blocks of another spec are cut to size instead of being refused"""
    right = backend.kv_import

    def kv_import(kv, blocks, data):
        try:
            right(kv, blocks, data)
        except ConfigError:
            return

    backend.kv_import = kv_import


@mutant("L2/kv/layout/size")
def layout_counts_k_only(backend):
    """bytes_per_block counts K and forgets V"""
    right = backend.kv_layout

    def kv_layout(spec):
        layout = right(spec)
        return attrs.evolve(layout, bytes_per_block=layout.bytes_per_block // 2)

    backend.kv_layout = kv_layout


@mutant("L2/kv/refuse/layouts")
def any_layout_promised(backend):
    """Impossible block sizes are silently replaced by 16"""
    right = backend.kv_layout

    def kv_layout(spec):
        size = spec.block_size if spec.block_size > 0 else 16
        dtype = spec.dtype if spec.dtype != "f7" else "f16"
        return right(attrs.evolve(spec, block_size=size, dtype=dtype))

    backend.kv_layout = kv_layout
