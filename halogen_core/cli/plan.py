"""`halogen plan`: what would fit and how fast it could be at most, from a device's saved profile.

Nothing is opened but the model's header: a profile is data that a plugin ships (folder `profiles`
of its static manifest), so no hardware and no driver is needed. Derived speeds are bounds, never
speeds.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import attrs
import click

from halogen_core.cli.bounds import active_weights, bounds, kv_bytes_per_token, kv_read_bytes
from halogen_core.cli.profiles import Profile, find_profile
from halogen_core.cli.settings import with_settings
from halogen_core.config import Config
from halogen_core.engine.fitting import FULL_LENGTH_SEQUENCES, workspace_bytes
from halogen_core.errors import ConfigError, OutOfMemory, UnsupportedOp
from halogen_core.loader.sizes import used_names
from halogen_core.spi import Checkpoint, DecoderConfig

MIB = 1 << 20
GIB = 1 << 30


@attrs.frozen(kw_only=True)
class Workload:
    """What the user wants to run; lengths in tokens, sizes in bytes."""

    context: int
    kv_dtype: str
    block_size: int
    max_batch_tokens: int = 2048
    max_batch: int = 64
    host_bytes: int = 0
    """Of a host tier below the device pool."""
    kv_ratio: float = 0.85
    """Share of what is left that an engine takes by itself."""


@attrs.frozen(kw_only=True)
class Room:
    """What is left for KV, in bytes and in blocks."""

    left: int
    block_bytes: int
    block_size: int
    session_blocks: int
    """Of one sequence of full context."""
    own_blocks: int
    """That an engine takes when it is given no size."""

    @property
    def blocks(self) -> int:
        """One more, for padding, belongs to the pool and to no sequence."""
        return max(0, self.left // self.block_bytes - 1)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


@click.command("plan")
@click.option("--model", required=True, help="a name, a file or a directory")
@click.option("--profile", "profile_name", help="a profile's name, or a JSON file")
@click.option("--backend", help="whose profile; default: the profile's own")
@click.option("--context", type=click.IntRange(1), help="tokens per session; default: the model's")
@click.option("--kv-dtype", help="storage of the KV cache; default: the profile's first")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@with_settings(
    also=("models_dir", "host_pool_size", "max_batch", "max_batch_tokens", "kv_cache_ratio")
)
def command(
    config: Config,
    model: str,
    profile_name: str | None,
    backend: str | None,
    context: int | None,
    kv_dtype: str | None,
    as_json: bool,
) -> None:
    """Plan MODEL on a device that need not be here: memory, sessions, bounds, fallbacks."""
    from halogen_core.loader import open_model
    from halogen_core.loader.catalogue import resolve_model
    from halogen_core.models import config_of

    profile = find_profile(profile_name, backend)
    checkpoint = open_model(resolve_model(model, config.paths.models_dir))
    decoder = config_of(checkpoint)
    work = Workload(
        context=context or decoder.context_length,
        kv_dtype=kv_dtype or profile.kv_dtypes[0],
        block_size=profile.kv_block_sizes[0],
        max_batch_tokens=config.engine.max_batch_tokens,
        max_batch=config.engine.max_batch,
        host_bytes=config.cache.host_pool_size,
        kv_ratio=config.cache.share,
    )
    about = plan(checkpoint, decoder, profile, work)
    click.echo(json.dumps(about, indent=2) if as_json else "\n".join(lines(about)))


def plan(
    checkpoint: Checkpoint, decoder: DecoderConfig, profile: Profile, work: Workload
) -> dict[str, Any]:
    """The plan as data; raises `OutOfMemory` with the arithmetic when it cannot fit.

    Sizes are those that an engine on the device asks for (`halogen_core.engine.fitting`).
    """
    _check_workload(decoder, profile, work)
    tensors = [checkpoint.tensor(name) for name in used_names(checkpoint, decoder)]
    pools = {
        "static": sum(profile.packed_bytes(tensor) for tensor in tensors),
        "temp": workspace_bytes(
            decoder, max_batch=work.max_batch, max_batch_tokens=work.max_batch_tokens
        ),
        "graph": profile.graph,
        "reserve": profile.reserve,
    }
    room = _room(decoder, work, profile.free - sum(pools.values()))
    arithmetic = [
        f"free {_gib(profile.free)} - reserve {_gib(profile.reserve)} - weights "
        f"{_gib(pools['static'])} - workspace {_gib(pools['temp'])} - captured steps "
        f"{_gib(profile.graph)} = {_gib(room.left)} for KV",
        f"KV {room.block_bytes / room.block_size / 1024:.1f} KiB per token in {work.kv_dtype}: "
        f"{room.tokens} tokens = {room.tokens // work.context} sessions of {work.context}",
    ]
    if room.blocks < room.session_blocks:
        raise _too_large(room, work, arithmetic)
    arithmetic += [_own_choice(room, work), *_host_tier(profile, work, room)]
    return {
        "model": checkpoint.path,
        "profile": profile.name,
        "device": profile.device,
        "source": profile.source,
        "pools": {"static": pools.pop("static"), "dynamic": room.left, **pools},
        "kv_tokens": room.tokens,
        "sessions": room.tokens // work.context,
        "context": work.context,
        "arithmetic": arithmetic,
        "together": (together := min(room.tokens // work.context, work.max_batch)),
        "bounds": bounds(
            decoder,
            profile,
            active_weights(checkpoint, decoder, profile.packed_bytes),
            kv_bytes=kv_read_bytes(decoder, work.kv_dtype, work.context),
            together=together,
        ),
        "fallbacks": fallbacks(profile, Counter(t.format for t in tensors)),
        "formats": dict(Counter(t.format for t in tensors)),
    }


def _room(decoder: DecoderConfig, work: Workload, left: int) -> Room:
    each = kv_bytes_per_token(decoder, work.kv_dtype) * work.block_size
    session = -(-work.context // work.block_size)
    most = session * min(work.max_batch, FULL_LENGTH_SEQUENCES)
    return Room(
        left=left,
        block_bytes=each,
        block_size=work.block_size,
        session_blocks=session,
        own_blocks=min(most, max(0, int(left * work.kv_ratio) // each - 1)),
    )


def _too_large(room: Room, work: Workload, arithmetic: list[str]) -> OutOfMemory:
    fix = "use a smaller or more quantised model, or --kv-dtype q8_0"
    if room.tokens:
        fix = f"set --context to at most {room.tokens}, or {fix}"
    elif room.left < 0:
        fix += ", or a smaller --max-batch-tokens"
    return OutOfMemory(
        f"one session of {work.context} tokens needs "
        f"{_gib((room.session_blocks + 1) * room.block_bytes)} of KV; " + "; ".join(arithmetic),
        code="HRT-3420",
        fix=fix,
    )


def _own_choice(room: Room, work: Workload) -> str:
    """What `serve` does with the room, and how it gets all of it."""
    all_of_it = f"--pool-size {room.left // MIB}MiB takes all"
    if room.own_blocks < room.session_blocks:
        share = f"{100 * work.kv_ratio:g} %"
        return f"`halogen serve` takes {share} by itself, too little for a session; {all_of_it}"
    sessions = room.own_blocks * room.block_size // work.context
    return (
        f"`halogen serve` takes {_gib((room.own_blocks + 1) * room.block_bytes)} of it by itself, "
        f"{sessions} sessions of {work.context}; {all_of_it}"
    )


def _host_tier(profile: Profile, work: Workload, room: Room) -> list[str]:
    """What a host tier adds, a line; raises where an engine would."""
    size, each = work.host_bytes, room.block_bytes
    if not size:
        return []
    if size < each:
        raise ConfigError(
            f"`host_pool_size` is {size} bytes; one KV block takes {each}",
            code="HRT-3304",
            fix="raise --host-pool-size, or leave it out",
        )
    if not profile.shared_with_host:
        tokens = size // each * work.block_size
        return [f"host tier {_gib(size)}: {tokens} more tokens of prefixes, by copies"]
    beside = (room.blocks - room.own_blocks) * each
    if size // each * each > beside:
        raise OutOfMemory(
            f"the host tier of {_gib(size)} is the same memory as the KV pool: {_gib(beside)} fit "
            f"beside the {_gib((room.own_blocks + 1) * each)} that `halogen serve` takes",
            code="HRT-3305",
            fix=f"set --host-pool-size to at most {beside // MIB}MiB, or leave it out",
        )
    return [
        f"host tier {_gib(size)}: one memory, so it is part of the KV above: it "
        "copies nothing and adds nothing"
    ]


def fallbacks(profile: Profile, formats: Counter[str]) -> list[str]:
    """What would not run natively, a sentence each."""
    found = [f"op `{op}`: {why}" for op, why in sorted(profile.fallback_ops.items())]
    for name in sorted(formats):
        kind = profile.weight_formats.get(name, "unknown")
        if kind != "native" and name != "F32":
            found.append(f"format {name} ({formats[name]} tensors): {kind}")
    return found


def lines(about: dict[str, Any]) -> list[str]:
    """The plan for people."""
    pools = ", ".join(f"{name} {_gib(size)}" for name, size in about["pools"].items())
    found = [f"{about['model']} on {about['device']}", f"pools: {pools}", *about["arithmetic"]]
    streams = f"{about['together']} sessions of {about['context']}"
    for name, rates in about["bounds"].items():
        listed = ", ".join(f"{kind} {rate:.1f}" for kind, rate in rates.items())
        what = f"{name} of {streams}" if name.endswith("together") else name
        found.append(f"bound on {what}: {listed} (not a speed: nothing can be faster)")
    found += [f"falls back: {text}" for text in about["fallbacks"]]
    return [*found, f"profile from {about['source']}"]


def _check_workload(decoder: DecoderConfig, profile: Profile, work: Workload) -> None:
    if work.kv_dtype not in profile.kv_dtypes:
        raise ConfigError(
            f"kv dtype is `{work.kv_dtype}`;"
            f" `{profile.backend}` has {', '.join(profile.kv_dtypes)}",
            code="HRT-3401",
            fix="check --kv-dtype",
        )
    if work.context > decoder.context_length:
        raise ConfigError(
            f"`context` is {work.context}; the model allows {decoder.context_length} tokens",
            code="HRT-5033",
            fix=f"set --context to at most {decoder.context_length}",
        )
    dims = {layer.attention.head_dim for layer in decoder.layers}
    if work.kv_dtype == "q8_0" and (odd := [dim for dim in dims if dim % 32]):
        raise ConfigError(
            f"kv dtype `q8_0` needs a head dim that is a multiple of 32, the model has {odd[0]}",
            code="HRT-3401",
            fix="use f16, bf16 or f8_e5m2",
        )
    wide = max(dims)
    if wide > profile.head_dim_max:
        raise UnsupportedOp(
            f"head dim is {wide}; attention of `{profile.backend}` takes {profile.head_dim_max} "
            "at most",
            fix="choose another model or backend",
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
