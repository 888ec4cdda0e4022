"""`halogen plan`: what would fit and how fast it could be at most, from a device's saved profile.

Nothing is opened but the model's header: a profile is data that a plugin ships (folder `profiles`
of its static manifest), so no hardware and no driver is needed. Derived speeds are bounds, never
speeds.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from math import prod
from typing import Any

import attrs
import click

from halogen_core.cli.bounds import (
    Profile,
    active_share,
    find_profile,
    kv_bytes_per_token,
    kv_read_bytes,
    stored_bytes,
)
from halogen_core.cli.settings import with_settings
from halogen_core.config import Config
from halogen_core.errors import ConfigError, OutOfMemory
from halogen_core.spi import Checkpoint, DecoderConfig, QuantTensor

GIB = 1 << 30


@attrs.frozen(kw_only=True)
class Workload:
    """What the user wants to run."""

    context: int
    kv_dtype: str
    block_size: int
    batch_tokens: int
    host_bytes: int = 0
    """Of a host tier below the device pool."""


@click.command("plan")
@click.option("--model", required=True, help="a name, a file or a directory")
@click.option("--profile", "profile_name", required=True, help="a profile's name, or a JSON file")
@click.option("--backend", help="whose profile; default: the profile's own")
@click.option("--context", type=click.IntRange(1), help="tokens per session; default: the model's")
@click.option("--kv-dtype", help="storage of the KV cache; default: the profile's first")
@click.option("--batch-tokens", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="for programs")
@with_settings(also=("models_dir", "host_pool_size"))
def command(
    config: Config,
    model: str,
    profile_name: str,
    backend: str | None,
    context: int | None,
    kv_dtype: str | None,
    batch_tokens: int,
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
        batch_tokens=batch_tokens,
        host_bytes=config.cache.host_pool_size,
    )
    about = plan(checkpoint, decoder, profile, work)
    click.echo(json.dumps(about, indent=2) if as_json else "\n".join(lines(about)))


def plan(
    checkpoint: Checkpoint, decoder: DecoderConfig, profile: Profile, work: Workload
) -> dict[str, Any]:
    """The plan as data; raises `OutOfMemory` with the arithmetic when it cannot fit."""
    _check_workload(profile, work)
    tensors = [checkpoint.tensor(name) for name in checkpoint.names()]
    kept = partial(_packed_bytes, profile=profile)
    static = sum(kept(tensor) for tensor in tensors)
    per_token = kv_bytes_per_token(decoder, work.kv_dtype)
    temp = workspace_bytes(decoder, work.batch_tokens)
    left = profile.free - profile.reserve - static - temp - profile.graph
    tokens = max(0, left) // (per_token * work.block_size) * work.block_size
    arithmetic = [
        f"free {_gib(profile.free)} - reserve {_gib(profile.reserve)} - weights {_gib(static)} - "
        f"workspace {_gib(temp)} - captured steps {_gib(profile.graph)} = {_gib(left)} for KV",
        f"KV {per_token / 1024:.1f} KiB per token in {work.kv_dtype}: {tokens} tokens = "
        f"{tokens // work.context} sessions of {work.context}",
        *_host_tier(profile, work, per_token),
    ]
    if tokens < work.context:
        raise OutOfMemory(
            f"one session of {work.context} tokens needs {_gib(per_token * work.context)} of KV; "
            + "; ".join(arithmetic),
            code="HRT-3420",
            fix="use a smaller or more quantised model, a shorter --context, or --kv-dtype q8_0",
        )
    active = active_share(checkpoint, decoder, kept)
    formats = Counter(t.format for t in tensors)
    return {
        "model": checkpoint.path,
        "profile": profile.name,
        "device": profile.device,
        "source": profile.source,
        "pools": {
            "static": static,
            "dynamic": left,
            "temp": temp,
            "graph": profile.graph,
            "reserve": profile.reserve,
        },
        "kv_tokens": tokens,
        "sessions": tokens // work.context,
        "context": work.context,
        "arithmetic": arithmetic,
        "bounds": bounds(decoder, profile, work, active),
        "fallbacks": fallbacks(decoder, profile, formats),
        "formats": dict(formats),
    }


def _host_tier(profile: Profile, work: Workload, per_token: int) -> list[str]:
    """What a host tier adds, a line."""
    if not work.host_bytes:
        return []
    if profile.shared_with_host:
        return [
            f"host tier {_gib(work.host_bytes)}: one memory, so it is part of the KV above: it "
            "copies nothing and adds nothing"
        ]
    tokens = work.host_bytes // (per_token * work.block_size) * work.block_size
    return [f"host tier {_gib(work.host_bytes)}: {tokens} more tokens of prefixes, by copies"]


def bounds(
    decoder: DecoderConfig, profile: Profile, work: Workload, active: tuple[int, int]
) -> dict[str, dict[str, float]]:
    """Upper bounds on tokens per second of one stream, by kind of rate."""
    weight_bytes, elements = active
    full = kv_read_bytes(decoder, work.kv_dtype, work.context)
    return {
        "decode_tok_s_empty": {k: v / weight_bytes for k, v in profile.bandwidth.items()},
        "decode_tok_s_full": {k: v / (weight_bytes + full) for k, v in profile.bandwidth.items()},
        "prefill_tok_s": {k: v / (2 * elements) for k, v in profile.compute.items()},
    }


def fallbacks(decoder: DecoderConfig, profile: Profile, formats: Counter[str]) -> list[str]:
    """What would not run natively, a sentence each."""
    found = [f"op `{op}`: {why}" for op, why in sorted(profile.fallback_ops.items())]
    for name in sorted(formats):
        kind = profile.weight_formats.get(name, "unknown")
        if kind != "native" and name != "F32":
            found.append(f"format {name} ({formats[name]} tensors): {kind}")
    wide = max(layer.attention.head_dim for layer in decoder.layers)
    if wide > profile.head_dim_max:
        found.append(f"head dim {wide} is over {profile.head_dim_max}: attention is refused")
    return found


def workspace_bytes(decoder: DecoderConfig, tokens: int) -> int:
    """Activations of the largest step in 16 bits, and float32 logits of 256 rows."""
    moe = decoder.layers[0].moe
    inner = decoder.intermediate_size * (moe.top_k if moe else 1)
    return tokens * 2 * (6 * decoder.hidden_size + 3 * inner) + 256 * 4 * decoder.vocab_size


def lines(about: dict[str, Any]) -> list[str]:
    """The plan for people."""
    pools = ", ".join(f"{name} {_gib(size)}" for name, size in about["pools"].items())
    found = [f"{about['model']} on {about['device']}", f"pools: {pools}", *about["arithmetic"]]
    for name, rates in about["bounds"].items():
        listed = ", ".join(f"{kind} {rate:.1f}" for kind, rate in rates.items())
        found.append(f"bound on {name}: {listed} (not a speed: nothing can be faster)")
    found += [f"falls back: {text}" for text in about["fallbacks"]]
    return [*found, f"profile from {about['source']}"]


def _check_workload(profile: Profile, work: Workload) -> None:
    if work.kv_dtype not in profile.kv_dtypes:
        raise ConfigError(
            f"kv dtype is `{work.kv_dtype}`;"
            f" `{profile.backend}` has {', '.join(profile.kv_dtypes)}",
            code="HRT-3401",
            fix="check --kv-dtype",
        )


def _packed_bytes(tensor: QuantTensor, profile: Profile) -> int:
    """On the device: as stored where that is native, else 16 bits for each element."""
    if profile.weight_formats.get(tensor.format) == "native":
        return stored_bytes(tensor)
    return 2 * prod(tensor.shape)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
