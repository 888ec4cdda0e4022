"""What an engine asks of a device's memory, and refusing early what cannot fit."""

from __future__ import annotations

from typing import Any

from halogen_core.engine.options import EngineOptions
from halogen_core.kv import one_memory
from halogen_core.loader.sizes import least_bytes
from halogen_core.spi import Backend, Checkpoint, DecoderConfig, KVLayout, MemoryRequest

FULL_LENGTH_SEQUENCES = 8
"""Without an exact size, the KV pool holds at most so many sequences of full context: the rest of
the memory is worth more to others on the same machine."""


def refuse_early(
    options: EngineOptions,
    backend: Backend[Any],
    checkpoint: Checkpoint,
    config: DecoderConfig,
    layout: KVLayout,
    context: int,
) -> None:
    """Raise `OutOfMemory` for what cannot fit a device before its first byte is read.

    In host memory weights may stay in the file's mapping: there only what is packed counts.
    """
    if any(tier.name == "device" for tier in backend.memory()):
        least = least_bytes(checkpoint, config)
        request = memory_request(options, config, layout, context, least)
        one_memory.divide(backend, request, options.host_kv_bytes)


def memory_request(
    options: EngineOptions,
    config: DecoderConfig,
    layout: KVLayout,
    context: int,
    static_bytes: int,
) -> MemoryRequest:
    """What must fit beside weights of `static_bytes`."""
    blocks_per_sequence = -(-context // layout.spec.block_size)
    most = blocks_per_sequence * min(options.max_batch, FULL_LENGTH_SEQUENCES)
    return MemoryRequest(
        static_bytes=static_bytes,
        temp_bytes=workspace_bytes(
            config, max_batch=options.max_batch, max_batch_tokens=options.max_batch_tokens
        ),
        kv_layout=layout,
        kv_bytes=options.kv_bytes,
        kv_ratio=options.kv_ratio,
        host_reserve=options.host_reserve,
        min_blocks=blocks_per_sequence,
        max_blocks=most if options.kv_bytes is None else None,
    )


def workspace_bytes(config: DecoderConfig, *, max_batch: int, max_batch_tokens: int) -> int:
    """Float32 activations of the largest step: widest tensors of a layer, and logits."""
    spec = config.layers[0].attention
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    return 4 * (max_batch_tokens * row + 3 * max_batch * config.vocab_size)
