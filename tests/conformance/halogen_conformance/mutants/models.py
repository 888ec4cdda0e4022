"""Mutants that every single op survives: they show when a model runs."""

from __future__ import annotations

import attrs

from halogen_conformance.mutants.registry import mutant


@mutant("L3/whole/llama", "L3/whole/qwen3")
def weights_cached_by_shape(backend):
    """Two linear weights of one shape are taken for the same"""
    right, seen = backend.pack, {}

    def pack(parts, role):
        key = (role, tuple(part.shape for part in parts))
        if key not in seen:
            seen[key] = right(parts, role)
        return seen[key]

    backend.pack = pack


@mutant("L3/chunked/llama")
def attention_cached_by_shape(backend):
    """Attention of a step with the same shape as an earlier one answers from a cache"""
    right, seen = backend.ops.attention, {}

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        key = (tuple(q.shape), layer)
        if key not in seen:
            seen[key] = right(q, kv, layer, meta, spec, sinks=sinks)
        return seen[key]

    backend.ops.attention = attention


@mutant("L3/decoded/llama")
def decode_loses_old_keys(backend):
    """After 24 tokens decode drops the first block of a sequence"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        if len(q) == 1 and int(meta.host.seq_lens[0]) > 24:
            spec = attrs.evolve(spec, window=int(meta.host.seq_lens[0]) - 8)
        return right(q, kv, layer, meta, spec, sinks=sinks)

    backend.ops.attention = attention


@mutant("L3/whole/llama-window", "L3/whole/gemma3")
def first_layers_window_for_all(backend):
    """Every layer gets the window of the first call"""
    right, first = backend.ops.attention, []

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        first.append(spec.window)
        spec = attrs.evolve(spec, window=first[0])
        return right(q, kv, layer, meta, spec, sinks=sinks)

    backend.ops.attention = attention


@mutant("L3/whole/gemma3")
def first_layers_rope_for_all(backend):
    """Rope tables are made once and used for layers with another base"""
    right, first = backend.ops.qkv_rope_store, []

    def qkv_rope_store(qkv, kv, layer, meta, spec, *, q_norm=None, k_norm=None):
        first.append(spec.rope)
        spec = attrs.evolve(spec, rope=first[0])
        return right(qkv, kv, layer, meta, spec, q_norm=q_norm, k_norm=k_norm)

    backend.ops.qkv_rope_store = qkv_rope_store


@mutant("L3/batch/many-is-one")
def sequences_reach_each_other(backend):
    """In a step of several sequences the second one's table is taken for the third's"""
    right = backend.ops.attention

    def attention(q, kv, layer, meta, spec, *, sinks=None):
        tables = meta.host.block_tables.copy()
        if len(tables) > 3 and layer == 1:
            tables[3] = tables[2]
            tables[3][tables[3] < 0] = tables[2][0]
        batch = attrs.evolve(meta.host, block_tables=tables)
        return right(q, kv, layer, backend.upload_step(batch), spec, sinks=sinks)

    backend.ops.attention = attention


@mutant("L3/invariant/chunks", "L3/invariant/company", deterministic=True)
def claims_batch_invariance(backend):
    """Batch invariance is claimed, but products are summed by shape"""
    plain = type(backend)().ops
    for name in ("linear", "attention", "mlp", "logits"):
        setattr(backend.ops, name, getattr(plain, name))


@mutant("L3/capture/equals-eager")
def replays_old_inputs(backend):
    """A captured step answers with the tokens of its capture"""

    def capture(step, batch):
        first = step(backend.upload_step(batch))
        return lambda batch: first

    backend.capture_key = lambda batch: ("decode", batch.num_sequences)
    backend.capture = capture


@mutant("L3/capture/mixed-steps")
def one_graph_with_and_without_selection(backend):
    """A step captured where every token has logits is replayed where some have none (met)"""
    import numpy as np

    def capture(step, batch):
        every = len(batch.logit_rows) == batch.num_tokens

        def replay(now):
            if every:
                now = attrs.evolve(now, logit_rows=np.arange(len(now.logit_rows), dtype=np.int32))
            return step(backend.upload_step(now))

        return replay

    backend.capture_key = lambda batch: "any step"
    backend.capture = capture


@mutant("L3/capture/equals-eager")
def claims_graphs_it_has_not(backend):
    """Graph capture is claimed, and nothing is ever captured"""
    right = backend.capabilities
    backend.capabilities = lambda: attrs.evolve(right(), graph_capture=True)


@mutant("L3/ahead/carried")
def carries_tokens_in_order(backend):
    """Steps run ahead, and carried tokens are taken in order, whatever their rows say"""
    import numpy as np

    from halogen_core.spi import Sampled

    right = backend.upload_step

    def upload_step(batch):
        if batch.carried is not None:
            rows = np.arange(batch.num_tokens, dtype=np.int32)
            batch = attrs.evolve(batch, carried=attrs.evolve(batch.carried, rows=rows))
        return right(batch)

    def fetch(sampled):
        return lambda: Sampled(token_ids=backend.download(sampled.token_ids))

    backend.upload_step, backend.fetch = upload_step, fetch


@mutant("L3/cached/moved")
def moved_blocks_lose_precision(backend):
    """Exported blocks pass through float16"""
    import numpy as np

    from halogen_core.spi import KVBlocks

    right = backend.kv_export

    def kv_export(kv, blocks):
        out = right(kv, blocks)
        values = np.ascontiguousarray(out.data).view(np.float32)
        narrow = values.astype(np.float16).astype(np.float32)
        return KVBlocks(spec=out.spec, data=narrow.view(np.uint8))

    backend.kv_export = kv_export


@mutant("L3/ranks/two-is-one")
def claims_collectives(backend):
    """Collectives are claimed that nothing can call"""
    right = backend.capabilities
    backend.capabilities = lambda: attrs.evolve(right(), collectives=("all_reduce",))


@mutant("L3/formats/Q5_K")
def format_taken_for_another(backend):
    """Q5_K weights are read with their fifth bit ignored"""
    right = backend.pack

    def pack(parts, role):
        return right([_without_fifth_bits(part) for part in parts], role)

    backend.pack = pack


def _without_fifth_bits(part):
    if part.format != "Q5_K":
        return part
    data = part.data.copy().reshape(-1, 176)
    data[:, 16:48] = 0
    return attrs.evolve(part, data=data.reshape(-1))
