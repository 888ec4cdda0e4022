"""All that building an engine needs, resolved once and sent to the engine's process."""

from __future__ import annotations

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `build_engine` needs; `None` means: the backend's or the model's own choice."""

    model_path: str
    model_id: str
    end_token_ids: list[int]
    """The model's own end tokens (the tokenizer lives with the client)."""
    backend: str | None = None
    device: str | None = None
    backend_options: dict[str, str] = {}
    plugins_allow: list[str] | None = None
    plugins_block: list[str] = []
    threads: int | None = None
    deterministic: bool = False
    cache_dir: str | None = None
    environment: dict[str, str] = {}
    """Variables that probes name in their manifests, for the probe cache's key."""
    log_level: str = "info"
    """Of the engine's own process, whose lines go where the server's go."""

    max_context: int | None = None
    """Tokens a sequence may hold; None: the model's context length, bounded by the pool."""
    max_batch: int = 64
    """Sequences in one step (A8)."""
    max_batch_tokens: int = 2048
    """Token budget of one step (B4)."""
    max_queue: int = 256
    """Waiting requests before new ones are refused."""
    max_prompt_len: int | None = None
    max_decode_len: int | None = None
    max_total_tokens: int | None = None

    kv_dtype: str | None = None
    block_size: int | None = None
    kv_bytes: int | None = None
    """An exact KV pool in bytes; None: `kv_ratio` of what is left."""
    kv_ratio: float = 0.85
    host_reserve: int = 0
    """Bytes of memory to leave to others."""
    prefix_cache: bool = True
    host_kv_bytes: int = 0
    """Size of the host tier below the device pool; 0: none."""
    disk_kv_bytes: int = 0
    """Size of the disk tier below the host tier; 0: none."""
    disk_kv_dir: str | None = None
    """Where the disk tier has its file; None: the system's folder for temporary files."""
    pin_quota: float = 0.5
    """Share of the pool that sessions may pin (A18)."""

    scheduling_policy: str = "fcfs"
    eviction_policy: str = "lru"
    tpot_target_ms: float | None = None
    min_batch_window_ms: float = 0.0
    max_batch_window_ms: float = 0.0
    prefill_timeout_ms: float | None = None
    fail_on_prefill_timeout: bool = False
    queue_timeout_s: float | None = None
    long_prompt_tokens: int | None = None
    """Prompts longer than this take the long lane (A14)."""
    long_lane_share: float = 0.5
    max_preemptions: int = 3
    run_ahead: bool = True
    """Launch the next step while one runs, where the backend can."""
