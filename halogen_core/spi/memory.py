"""Memory as the seam sees it: tiers, plans, KV layouts and the canonical form of a KV block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from halogen_core.errors import ConfigError
from halogen_core.spi.arrays import Bytes


@attrs.frozen(kw_only=True)
class MemoryTier:
    """One kind of memory, told honestly. Sizes in bytes, bandwidth in bytes per second."""

    name: str
    """`device`, `host` or `disk`, or a vendor's own."""
    total: int
    free: int
    """What an allocation could really get now."""
    reclaimable: int = 0
    """Counted in `free` only after something is dropped (page cache)."""
    shared_with_host: bool = False
    """The same bytes as host memory: never add the two up."""
    bandwidth: float | None = None
    granule: int = 1
    """Allocations are rounded up to this."""
    source: str = ""
    """Where the numbers come from, e.g. `sysfs mem_info_gtt_total; cgroup memory.max`."""


@attrs.frozen(kw_only=True)
class KVSpec:
    """What the core wants to cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "f16"
    """Storage: `f32`, `f16`, `bf16`, `q8_0` or `f8_e5m2`."""
    block_size: int = 16
    """Tokens per block."""


@attrs.frozen(kw_only=True)
class KVLayout:
    """How a backend stores it; the physical order of elements stays the backend's secret."""

    spec: KVSpec
    id: str
    """Changes when the physical layout does."""
    bytes_per_block: int
    """Over all layers, K and V, padding included."""
    alignment: int = 1


@attrs.frozen(kw_only=True, eq=False)
class KVCache:
    """An allocated KV pool; `payload` belongs to the backend."""

    layout: KVLayout
    num_blocks: int
    payload: Any


@attrs.frozen(kw_only=True, eq=False)
class KVBlocks:
    """Blocks in canonical host form: uint8 [n, L, 2, B, Hkv, row], K before V.

    `row` is D elements in `spec.dtype`, little-endian (q8_0: ggml blocks of 32). Offload,
    snapshots, migration and tests all use this form, so every layout stays movable and testable.
    """

    spec: KVSpec
    data: Bytes


@attrs.frozen(kw_only=True)
class MemoryRequest:
    """What must fit. Bytes."""

    static_bytes: int
    """Weights as packed."""
    temp_bytes: int
    """Workspace of the largest step."""
    kv_layout: KVLayout
    kv_bytes: int | None = None
    """An exact KV pool, or None: what is left under `kv_ratio`."""
    kv_ratio: float = 0.85
    """Share for KV of what is left after weights, workspace and `host_reserve`."""
    graph_bytes: int = 0
    host_reserve: int = 0
    min_blocks: int = 1
    """Refuse when fewer fit: one sequence of the longest context."""
    max_blocks: int | None = None


@attrs.frozen(kw_only=True)
class PoolPlan:
    """One pool of a plan."""

    name: str
    """`static`, `dynamic`, `temp` or `graph`."""
    tier: str
    bytes: int


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """A promise: these pools can be allocated as they stand."""

    pools: tuple[PoolPlan, ...]
    num_blocks: int
    reasons: tuple[str, ...] = ()
    """The arithmetic, a line each, for people."""


KV_ROW_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "f8_e5m2": 1.0, "q8_0": 34 / 32}
"""Bytes per element of each KV storage type."""


def kv_row_bytes(spec: KVSpec) -> int:
    """Bytes of one head's row of D elements in canonical form."""
    return int(spec.head_dim * KV_ROW_BYTES[spec.dtype])


def kv_block_shape(spec: KVSpec, n: int) -> tuple[int, ...]:
    """Shape of `KVBlocks.data` for n blocks."""
    return (n, spec.num_layers, 2, spec.block_size, spec.num_kv_heads, kv_row_bytes(spec))


def check_kv_blocks(spec: KVSpec, blocks: Sequence[int], data: KVBlocks) -> None:
    """Raise `ConfigError` unless `data` is `blocks` of a pool of `spec`; for `kv_import`."""
    wanted = kv_block_shape(spec, len(blocks))
    if data.spec != spec or data.data.shape != wanted:
        raise ConfigError(
            f"kv blocks are {data.spec} of shape {data.data.shape}; this pool takes {spec} of "
            f"shape {wanted}",
            code="HRT-3103",
            fix="caches move only between engines with the same model and cache settings",
        )


def check_block_ids(blocks: Sequence[int], num_blocks: int) -> None:
    """Raise `ConfigError` for a block that a pool of `num_blocks` does not have."""
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise ConfigError(
                f"kv block is {block}; this pool has blocks 0 to {num_blocks - 1}",
                code="HRT-3104",
                fix="this is a bug in the caller's block table",
            )
