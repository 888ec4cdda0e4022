"""From options to a working engine: plugin, device, model, memory plan, scheduler."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from halogen_core import __version__
from halogen_core.engine.engine import Engine
from halogen_core.engine.fitting import memory_request, refuse_early
from halogen_core.engine.grammar import Grammars
from halogen_core.engine.mover import BackendMover
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import EngineInfo
from halogen_core.engine.runner import Runner
from halogen_core.engine.snapshots import Snapshots
from halogen_core.errors import ConfigError
from halogen_core.kv import one_memory
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.policies import eviction_policy
from halogen_core.kv.snapshot import Identity
from halogen_core.kv.tiers import Tier, Tiers
from halogen_core.kv.tree import ReuseRules
from halogen_core.loader import load_tokenizer, open_model
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.plugins import (
    PluginOptions,
    PluginRegistry,
    create_backend,
    install_packs,
    select,
)
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.pacing import block_seconds
from halogen_core.scheduler.policies import scheduling_policy
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.spi import (
    Backend,
    BackendOptions,
    Checkpoint,
    DecoderConfig,
    KVCache,
    KVLayout,
    MemoryPlan,
    PolicySpec,
)

Progress = Callable[[int, int], None]


def build_engine(
    options: EngineOptions, *, progress: Progress = lambda done, total: None
) -> Engine:
    """Open the backend, load the model and divide memory; raises what stands in the way."""
    registry = PluginRegistry.discover(_plugin_options(options))
    candidate = select(
        registry,
        options.backend,
        device=options.device,
        cache_dir=Path(options.cache_dir) if options.cache_dir else None,
        environment=options.environment,
    )
    checkpoint = open_model(Path(options.model_path))
    architectures = registry.collect("halogen_model_architectures")
    config = config_of(checkpoint, [spec for _, spec in architectures])
    backend = create_backend(candidate, _backend_options(options))
    try:
        install_packs(registry, candidate.spec.name, backend)
        return assemble_engine(
            options,
            backend,
            checkpoint,
            config,
            progress=progress,
            policies=Policies(
                scheduling=[p for _, p in registry.collect("halogen_scheduling_policies")],
                eviction=[p for _, p in registry.collect("halogen_eviction_policies")],
            ),
        )
    except BaseException:
        backend.close()
        raise


def assemble_engine(
    options: EngineOptions,
    backend: Backend[Any],
    checkpoint: Checkpoint,
    config: DecoderConfig,
    *,
    progress: Progress = lambda done, total: None,
    policies: Policies | None = None,
) -> Engine:
    """An engine over an open backend and checkpoint; `policies` are those of plugins."""
    policies = policies or Policies()
    context = _context(options, backend, config)
    layout = _kv_layout(options, backend, config)
    refuse_early(options, backend, checkpoint, config, layout, context)
    began = time.perf_counter()
    decoder = Decoder.load(config, checkpoint, backend, progress=progress)
    load_s = time.perf_counter() - began
    request = memory_request(options, config, layout, context, decoder.nbytes)
    division = one_memory.divide(backend, request, options.host_kv_bytes)
    plan = division.plan
    kv = backend.kv_alloc(layout, plan.num_blocks)
    mover = BackendMover(backend, kv)
    tiers = _tiers(options, mover, division.host_bytes)
    blocks = _block_pool(options, config, mover, policies, tiers)
    scheduler = Scheduler(
        _scheduler_config(options),
        blocks,
        policy=scheduling_policy(options.scheduling_policy, policies.scheduling),
        cost=backend.cost,
        limits=backend.limits,
    )
    return Engine(
        runner=Runner(backend, decoder, kv),
        scheduler=scheduler,
        blocks=blocks,
        snapshots=Snapshots(blocks, mover, _identity(backend, checkpoint, layout)),
        grammars=Grammars(lambda: load_tokenizer(checkpoint), config.vocab_size),
        info=_info(options, backend, checkpoint, config, kv, plan, context),
        end_token_ids=tuple(options.end_token_ids),
        plan=plan,
        load_s=load_s,
        run_ahead=options.run_ahead,
    )


@attrs.frozen(kw_only=True)
class Policies:
    """What plugins contribute to the scheduler and the KV block manager."""

    scheduling: Sequence[PolicySpec] = ()
    eviction: Sequence[PolicySpec] = ()


def _block_pool(
    options: EngineOptions,
    config: DecoderConfig,
    mover: BackendMover,
    policies: Policies,
    tiers: Tiers | None,
) -> BlockPool:
    windows = [layer.attention.window for layer in config.layers]
    # a block may go only when no layer looks at it any more
    window = None if None in windows else max(w for w in windows if w is not None)
    size = mover.kv.layout.spec.block_size
    return BlockPool(
        mover.kv.num_blocks,
        size,
        eviction=eviction_policy(options.eviction_policy, policies.eviction),
        eviction_name=options.eviction_policy,
        prefix_cache=options.prefix_cache,
        rules=ReuseRules(window=window),
        pin_quota=options.pin_quota,
        tiers=tiers,
    )


def _tiers(options: EngineOptions, mover: BackendMover, host_bytes: int) -> Tiers | None:
    """Host memory, then disk, where they were given a size."""
    each, stack = mover.bytes_per_block, []
    if host_bytes:
        stack.append(Tier.host(host_bytes, each))
    if options.disk_kv_bytes:
        folder = Path(options.disk_kv_dir or tempfile.gettempdir())
        stack.append(Tier.disk(folder, _disk_bytes(options, each), each))
    seconds = block_seconds(mover.backend.cost, mover.kv.layout.spec.block_size)
    return Tiers(mover, tuple(stack), seconds) if stack else None


def _disk_bytes(options: EngineOptions, bytes_per_block: int) -> int:
    if options.disk_kv_bytes < bytes_per_block:
        raise ConfigError(
            f"`disk_pool_size` is {options.disk_kv_bytes} bytes; one KV block takes "
            f"{bytes_per_block}",
            code="HRT-3304",
            fix="raise --disk-pool-size, or leave it out",
        )
    return options.disk_kv_bytes


def _identity(backend: Backend[Any], checkpoint: Checkpoint, layout: KVLayout) -> Identity:
    own = backend.capabilities()
    return Identity(
        model=checkpoint.content_id,
        layout=f"{layout.id} {layout.spec.dtype} {layout.spec.block_size}",
        build=f"halogen {__version__} {own.name}",
    )


def _plugin_options(options: EngineOptions) -> PluginOptions:
    allow = options.plugins_allow
    return PluginOptions(
        allow=None if allow is None else frozenset(allow), block=frozenset(options.plugins_block)
    )


def _backend_options(options: EngineOptions) -> BackendOptions:
    return BackendOptions(
        device=options.device,
        threads=options.threads,
        deterministic=options.deterministic,
        cache_dir=options.cache_dir,
        extra=options.backend_options,
    )


def _context(options: EngineOptions, backend: Backend[Any], config: DecoderConfig) -> int:
    own = backend.capabilities().max_context or config.context_length
    most = min(own, config.context_length)
    if options.max_context is not None and options.max_context > most:
        raise ConfigError(
            f"`max_context` is {options.max_context}; model and backend allow {most} tokens",
            code="HRT-5033",
            fix=f"set --max-context to at most {most}",
        )
    return options.max_context or most


def _kv_layout(options: EngineOptions, backend: Backend[Any], config: DecoderConfig) -> KVLayout:
    own = backend.capabilities()
    spec = kv_spec(
        config,
        dtype=options.kv_dtype or own.kv_dtypes[0],
        block_size=options.block_size or own.kv_block_sizes[0],
    )
    return backend.kv_layout(spec)


def _scheduler_config(options: EngineOptions) -> SchedulerConfig:
    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1e3

    return SchedulerConfig(
        max_batch=options.max_batch,
        max_batch_tokens=options.max_batch_tokens,
        max_queue=options.max_queue,
        max_prompt_len=options.max_prompt_len,
        max_decode_len=options.max_decode_len,
        max_total_tokens=options.max_total_tokens,
        tpot_target_s=seconds(options.tpot_target_ms),
        min_window_s=options.min_batch_window_ms / 1e3,
        max_window_s=options.max_batch_window_ms / 1e3,
        prefill_timeout_s=seconds(options.prefill_timeout_ms),
        fail_on_prefill_timeout=options.fail_on_prefill_timeout,
        queue_timeout_s=options.queue_timeout_s,
        long_prompt_tokens=options.long_prompt_tokens,
        long_lane_share=options.long_lane_share,
        max_preemptions=options.max_preemptions,
    )


def _info(
    options: EngineOptions,
    backend: Backend[Any],
    checkpoint: Checkpoint,
    config: DecoderConfig,
    kv: KVCache,
    plan: MemoryPlan,
    context: int,
) -> EngineInfo:
    own = backend.capabilities()
    return EngineInfo(
        model_id=options.model_id,
        architecture=config.architecture,
        model_path=options.model_path,
        content_id=checkpoint.content_id,
        vocab_size=config.vocab_size,
        context_length=context,
        backend=own.name,
        device=own.device,
        block_size=kv.layout.spec.block_size,
        num_blocks=plan.num_blocks,
        kv_dtype=kv.layout.spec.dtype,
        placement={p.op: f"{p.level.value}: {p.implementation}" for p in backend.placement()},
        reasons=list(plan.reasons),
    )
