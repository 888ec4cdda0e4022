"""From settings to the parts that `run` and `serve` need: model, tokenizer, engine options."""

from __future__ import annotations

from pathlib import Path

import attrs

from halogen_core.config import Config, environment
from halogen_core.engine.options import EngineOptions
from halogen_core.loader import Tokenizer, open_model, read_tokenizer
from halogen_core.loader.catalogue import resolve_model


@attrs.frozen(kw_only=True)
class Parts:
    """A resolved model with its tokenizer, and what builds its engine."""

    options: EngineOptions
    tokenizer: Tokenizer


def assemble(config: Config) -> Parts:
    """Find and open the model; raises `ModelError` before anything heavy starts.

    The tokenizer's `prepare` is left to the caller, who may have an engine to start first.
    """
    path = resolve_model(config.model.model, config.paths.models_dir)
    checkpoint = open_model(path)
    tokenizer = read_tokenizer(checkpoint)
    return Parts(options=engine_options(config, path, tokenizer), tokenizer=tokenizer)


def model_name(config: Config, path: Path) -> str:
    """The name that answers carry: what the user asked for, without folders and suffix."""
    asked = config.model.model
    return path.stem if asked == str(path) or "/" in asked else asked


def engine_options(config: Config, path: Path, tokenizer: Tokenizer) -> EngineOptions:
    """The settings that the engine reads, and nothing else."""
    engine, cache = config.engine, config.cache
    return EngineOptions(
        model_path=str(path),
        model_id=model_name(config, path),
        end_token_ids=sorted(tokenizer.end_token_ids),
        backend=engine.backend,
        device=engine.device,
        backend_options=dict(engine.backend_option),
        plugins_allow=None if engine.plugins is None else list(engine.plugins),
        plugins_block=list(engine.no_plugin),
        threads=engine.threads,
        deterministic=engine.deterministic,
        cache_dir=str(config.paths.cache_dir),
        environment=environment(),
        log_level=config.server.log_level,
        max_context=config.model.max_context,
        max_batch=engine.max_batch,
        max_batch_tokens=engine.max_batch_tokens,
        max_queue=engine.max_queue,
        max_prompt_len=engine.max_prompt_len,
        max_decode_len=engine.max_decode_len,
        max_total_tokens=engine.max_total_tokens,
        kv_dtype=cache.kv_dtype,
        block_size=cache.block_size,
        kv_bytes=cache.exact_bytes,
        kv_ratio=cache.share,
        host_reserve=cache.host_reserve,
        prefix_cache=cache.prefix_cache,
        host_kv_bytes=cache.host_pool_size,
        disk_kv_bytes=cache.disk_pool_size,
        disk_kv_dir=str(cache.disk_pool_dir or config.paths.cache_dir),
        pin_quota=cache.pin_quota,
        scheduling_policy=engine.scheduling_policy,
        eviction_policy=cache.eviction_policy,
        tpot_target_ms=engine.tpot_target_ms,
        min_batch_window_ms=engine.min_batch_window_ms,
        max_batch_window_ms=engine.max_batch_window_ms,
        prefill_timeout_ms=engine.prefill_timeout_ms,
        fail_on_prefill_timeout=engine.fail_on_prefill_timeout,
        queue_timeout_s=engine.queue_timeout_s,
        long_prompt_tokens=engine.long_prompt_tokens,
        long_lane_share=engine.long_lane_share,
        max_preemptions=engine.max_preemptions,
        run_ahead=engine.run_ahead,
    )
