"""Every setting: its type, default, limits and what it is for.

A setting `some_name` is the flag `--some-name`, the variable `HALOGEN_SOME_NAME` and the key
`some_name` in a TOML or YAML file, at the top level or in the table of its section. Names are
unique over all sections. docs/reference/configuration.md is generated from here.
"""

# ruff: noqa: RUF009 - `setting` makes an attrs field

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from halogen_core.config.setting import Setting, setting
from halogen_core.config.values import (
    INTEGER,
    NUMBER,
    PAIRS,
    PATH,
    SIZE,
    SWITCH,
    TEXT,
    WORDS,
)


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Which model, and by what names clients know it."""

    model: str = setting(
        TEXT,
        "smollm2-135m",
        "a known name (see `halogen pull --help`), `hf:OWNER/NAME`, a GGUF file or a directory",
        aliases=("name", "model_path"),
    )
    served_model_name: tuple[str, ...] = setting(
        WORDS, (), "names that requests may use beside the model's own; the first is listed first"
    )
    max_context: int | None = setting(
        INTEGER,
        None,
        "tokens a sequence may hold, prompt and answer; default: what the model was made for",
        aliases=("max_model_len", "context_length"),
        minimum=1,
    )


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Where and how the model runs."""

    backend: str | None = setting(
        TEXT, None, "backend plugin to use; never replaced by another one; default: the best here"
    )
    device: str | None = setting(TEXT, None, "device as `backend:index`; default: the first")
    backend_option: Mapping[str, str] = setting(
        PAIRS, attrs.Factory(dict), "option of the backend; unknown ones are refused by it"
    )
    plugins: tuple[str, ...] | None = setting(WORDS, None, "load only these plugins; default: all")
    no_plugin: tuple[str, ...] = setting(WORDS, (), "plugins not to load")
    threads: int | None = setting(INTEGER, None, "CPU threads of the backend", minimum=1)
    deterministic: bool = setting(
        SWITCH, False, "same tokens whatever shares the batch, where the backend can"
    )
    max_batch: int = setting(
        INTEGER, 64, "sequences in one step", aliases=("max_num_seqs",), minimum=1
    )
    max_batch_tokens: int = setting(
        INTEGER, 2048, "tokens in one step", aliases=("max_num_batched_tokens",), minimum=1
    )
    max_queue: int = setting(INTEGER, 256, "waiting requests; more are answered 429", minimum=0)
    max_prompt_len: int | None = setting(INTEGER, None, "longest prompt in tokens", minimum=1)
    max_decode_len: int | None = setting(INTEGER, None, "longest answer in tokens", minimum=1)
    max_total_tokens: int | None = setting(
        INTEGER, None, "tokens of all running sequences together", minimum=1
    )
    scheduling_policy: str = setting(TEXT, "fcfs", "order of the waiting queue")
    tpot_target_ms: float | None = setting(
        NUMBER, None, "keep the time per output token near this by bounding steps", minimum=0.1
    )
    min_batch_window_ms: float = setting(
        NUMBER, 0.0, "wait at least this long for company before a step", minimum=0
    )
    max_batch_window_ms: float = setting(NUMBER, 0.0, "wait at most this long", minimum=0)
    prefill_timeout_ms: float | None = setting(
        NUMBER, None, "a prefill that takes longer goes to the long lane", minimum=1
    )
    fail_on_prefill_timeout: bool = setting(
        SWITCH, False, "refuse a prompt that exceeds `prefill_timeout_ms` instead"
    )
    queue_timeout_s: float | None = setting(
        NUMBER, None, "a request that waits longer than this is refused", minimum=0.001
    )
    long_prompt_tokens: int | None = setting(
        INTEGER, None, "prompts longer than this take the long lane", minimum=1
    )
    long_lane_share: float = setting(
        NUMBER,
        0.5,
        "share of the steps that the long lane gets while others have work",
        minimum=0.01,
        maximum=1,
    )
    max_preemptions: int = setting(
        INTEGER,
        3,
        "after so many a sequence is let in again only with all the blocks it can need",
        minimum=0,
    )
    run_ahead: bool = setting(
        SWITCH, True, "launch the next step while one runs, where the backend can"
    )
    hang_timeout_s: float = setting(
        NUMBER, 120.0, "a step longer than this means the engine hangs; it is restarted", minimum=1
    )


@attrs.frozen(kw_only=True)
class CacheSettings:
    """Memory for keys and values."""

    kv_dtype: str | None = setting(
        TEXT,
        None,
        "storage of keys and values; default: the backend's choice",
        choices=("f32", "f16", "bf16", "q8_0", "f8_e5m2"),
    )
    block_size: int | None = setting(INTEGER, None, "tokens per block", minimum=1)
    pool_size: int | None = setting(
        SIZE, None, "exact size of the KV pool; excludes the other three names of it", minimum=1
    )
    kv_cache_pool_gb: float | None = setting(
        NUMBER, None, "the same as a plain number of GiB", minimum=0.001
    )
    kv_cache_ratio: float = setting(
        NUMBER,
        0.85,
        "share for KV of the memory left after weights, workspace and `host_reserve`",
        aliases=("kv_ratio",),
        minimum=0.01,
        maximum=1.0,
    )
    gpu_memory_utilization: float | None = setting(
        NUMBER, None, "another name of `kv_cache_ratio`", minimum=0.01, maximum=1.0
    )
    host_reserve: int = setting(SIZE, 0, "memory to leave to other programs", minimum=0)
    host_pool_size: int = setting(
        SIZE, 0, "host memory that takes KV blocks evicted from the device", minimum=0
    )
    disk_pool_size: int = setting(
        SIZE, 0, "disk space that takes KV blocks evicted from host memory", minimum=0
    )
    disk_pool_dir: Path | None = setting(
        PATH, None, "folder on the disk of `disk_pool_size`; default: `cache_dir`"
    )
    prefix_cache: bool = setting(
        SWITCH, True, "reuse the KV of common prompt beginnings", aliases=("enable_prefix_caching",)
    )
    eviction_policy: str = setting(TEXT, "lru", "which cached block goes first")
    pin_quota: float = setting(
        NUMBER,
        0.5,
        "share of the pool that sessions may pin, with `session_priority+lru`",
        minimum=0,
        maximum=1,
    )
    kv_snapshot: Path | None = setting(
        PATH, None, "file that `serve` reads the prefix cache from at start and writes on drain"
    )

    @property
    def exact_bytes(self) -> int | None:
        """The KV pool by `pool_size` or `kv_cache_pool_gb`; None: by `share`."""
        if self.kv_cache_pool_gb is not None:
            return int(self.kv_cache_pool_gb * (1 << 30))
        return self.pool_size

    @property
    def share(self) -> float:
        """The KV pool by `kv_cache_ratio` or `gpu_memory_utilization`."""
        return self.gpu_memory_utilization or self.kv_cache_ratio


@attrs.frozen(kw_only=True)
class ServerSettings:
    """The HTTP server."""

    host: str = setting(TEXT, "127.0.0.1", "address to listen on, IPv4 or IPv6")
    port: int = setting(INTEGER, 8000, "TCP port; 0: any free one", minimum=0, maximum=65535)
    unix_socket: Path | None = setting(PATH, None, "listen on this Unix socket instead of TCP")
    api_key: tuple[str, ...] = setting(
        WORDS, (), "keys that clients must send one of; none: no authentication", secret=True
    )
    api_key_file: Path | None = setting(PATH, None, "file with further keys, one a line")
    admin_key: str | None = setting(
        TEXT, None, "key of the `/admin/` routes; none: there are none", secret=True
    )
    cors_origins: tuple[str, ...] = setting(
        WORDS,
        ("localhost",),
        "origins whose web pages may use the server, `scheme://host[:port]`; `localhost`: those of "
        "this machine, `*`: all; without keys others are refused",
    )
    metrics: bool = setting(SWITCH, True, "serve `/metrics`", aliases=("enable_metrics",))
    metrics_port: int | None = setting(
        INTEGER,
        None,
        "serve `/metrics` here, without a key, instead of on `port`",
        minimum=0,
        maximum=65535,
    )
    metrics_compat: str = setting(
        TEXT, "none", "give metrics under another server's names too", choices=("none", "vllm")
    )
    max_body_size: int = setting(SIZE, 8 << 20, "largest request body", minimum=1024)
    receive_timeout_s: float = setting(
        NUMBER, 30.0, "a request must have arrived whole within this", minimum=0.1
    )
    send_timeout_s: float = setting(
        NUMBER, 30.0, "a client that accepts no bytes for this long is cut off", minimum=0.1
    )
    sse_ping_s: float = setting(
        NUMBER, 10.0, "comment lines this often while a stream has nothing to say", minimum=0.05
    )
    drain_timeout_s: float = setting(
        NUMBER, 30.0, "after SIGTERM, wait this long for running requests", minimum=0
    )
    default_max_tokens: int | None = setting(
        INTEGER,
        None,
        "answer length of chat requests that do not say; default: the rest of the context",
        minimum=1,
    )
    log_level: str = setting(
        TEXT, "info", "how much to log", choices=("debug", "info", "warning", "error")
    )


@attrs.frozen(kw_only=True)
class PathSettings:
    """Where files are kept; the defaults follow the XDG base directories."""

    models_dir: Path = setting(
        PATH, Path("models"), "downloaded models; default: `$XDG_DATA_HOME/halogen/models`"
    )
    cache_dir: Path = setting(
        PATH,
        Path("cache"),
        "compiled kernels, packed weights, probes; default: `$XDG_CACHE_HOME/halogen`",
    )


SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "cache": CacheSettings,
    "server": ServerSettings,
    "paths": PathSettings,
}

SETTINGS: dict[str, Setting] = {
    field.name: Setting(
        name=field.name, section=section, default=field.default, **dict(field.metadata)
    )
    for section, fields in SECTIONS.items()
    for field in attrs.fields(fields)
}

LEGACY: dict[str, str] = {
    "max_batch_size": "use `max_batch` (sequences in a step) or `min_batch_window_ms`",
    "dynamic_batching": "steps are always batched; see `max_batch` and `max_batch_tokens`",
    "tensor_parallel_size": "one engine drives one device in this release",
    "exec_mode": "one engine drives one device in this release",
    "precision": "the model file's own precision is used; pull a quantised model",
    "quantization": "the model file's own precision is used; pull a quantised model",
    "flash_attention": "the backend chooses its kernels; see `halogen plugins list --json`",
    "enable_profiling": "see `/metrics` for times per phase",
}
"""Names of older or other servers, refused with what to use instead."""
