"""What a device can do at most, as data, and the bounds that follow for a model.

A profile is a JSON file that a plugin ships (folder `profiles` of its static manifest). Whatever is
derived from it is a bound, never a speed: steps per second are at most bandwidth over the bytes
that a step reads, and at most compute over its operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import attrs

from halogen_core.errors import ConfigError
from halogen_core.spi import Checkpoint, DecoderConfig, KVSpec, QuantTensor, kv_row_bytes


@attrs.frozen(kw_only=True)
class Profile:
    """A device as data. Bytes, bytes per second, operations per second."""

    name: str
    backend: str
    device: str
    source: str
    free: int
    reserve: int
    graph: int = 0
    """Set aside for captured steps."""
    shared_with_host: bool = False
    """One memory: a host tier is part of the pool."""
    bandwidth: dict[str, float]
    compute: dict[str, float]
    weight_formats: dict[str, str]
    kv_dtypes: tuple[str, ...]
    kv_block_sizes: tuple[int, ...]
    head_dim_max: int
    fallback_ops: dict[str, str]


def find_profile(name: str, backend: str | None = None) -> Profile:
    """The profile of that name among installed plugins' (by manifest), or in a file.

    The profile says which backend it is of; `backend`, if given, must be that one.
    """
    from halogen_core.plugins import PluginRegistry

    found: dict[str, Path] = {}
    names: dict[str, set[str]] = {}
    for plugin in PluginRegistry.discover().plugins:
        offered = {n for spec in plugin.backends for n in (spec.name, *spec.aliases)}
        offered.add(plugin.name)
        names |= dict.fromkeys(offered, offered)
        manifest = plugin.manifest
        if manifest is not None and manifest.profiles and (backend is None or backend in offered):
            folder = Path(manifest.path).parent / manifest.profiles
            found |= {file.stem: file for file in sorted(folder.glob("*.json"))}
    if name.endswith(".json"):
        profile = read_profile(Path(name))
        if backend is None or backend in names.get(profile.backend, {profile.backend}):
            return profile
        raise _no_profile(f"profile `{name}` is of backend `{profile.backend}`, not `{backend}`")
    if name not in found:
        owner = f"backend `{backend}`" if backend else "no installed plugin"
        verb = "has no" if backend else "has a"
        listed = ", ".join(sorted(found)) or "none"
        raise _no_profile(f"{owner} {verb} profile `{name}`; there are {listed}")
    return read_profile(found[name])


def _no_profile(text: str) -> ConfigError:
    return ConfigError(text, code="HRT-3421", fix="name one that is there, or give a JSON file")


def read_profile(path: Path) -> Profile:
    """A profile file; raises `ConfigError` for one that is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        memory = data["memory"]
        return Profile(
            name=data["name"],
            backend=data["backend"],
            device=data["device"],
            source=data["source"],
            free=memory["free"],
            reserve=memory["reserve"],
            graph=memory.get("graph", 0),
            shared_with_host=memory.get("shared_with_host", False),
            bandwidth=data["bandwidth"],
            compute=data["compute"],
            weight_formats=data["weight_formats"],
            kv_dtypes=tuple(data["kv_dtypes"]),
            kv_block_sizes=tuple(data["kv_block_sizes"]),
            head_dim_max=data["head_dim_max"],
            fallback_ops=data["fallback_ops"],
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"profile `{path}` cannot be used: {type(exc).__name__}: {exc}",
            code="HRT-3422",
            fix="compare it with a profile that a plugin ships",
        ) from exc


def kv_bytes_per_token(decoder: DecoderConfig, dtype: str) -> int:
    """K and V of all layers."""
    total = 0
    for layer in decoder.layers:
        spec = layer.attention
        row = KVSpec(
            num_layers=1, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype
        )
        total += 2 * spec.num_kv_heads * kv_row_bytes(row)
    return total


def kv_read_bytes(decoder: DecoderConfig, dtype: str, context: int) -> int:
    """KV that one decoding step reads at a full context; windows read less."""
    per = kv_bytes_per_token(decoder, dtype) / decoder.num_layers
    seen = sum(min(context, layer.attention.window or context) for layer in decoder.layers)
    return int(per * seen)


def stored_bytes(tensor: QuantTensor) -> int:
    """Of a tensor with its scales, as in the file."""
    return tensor.data.nbytes + sum(scales.nbytes for scales in tensor.aux.values())


def active_share(
    checkpoint: Checkpoint,
    decoder: DecoderConfig,
    kept: Callable[[QuantTensor], int] = stored_bytes,
) -> tuple[int, int]:
    """(bytes, elements) of weights that one token reads; of experts only the chosen ones.

    `kept` tells the bytes of a tensor on the device.
    """
    moe = decoder.layers[0].moe
    share = moe.top_k / moe.num_experts if moe else 1.0
    size = elements = 0.0
    for name in checkpoint.names():
        if name == "token_embd.weight" and not decoder.tied_embeddings:
            continue
        tensor = checkpoint.tensor(name)
        part = share if "_exps." in name else 1.0
        size += part * kept(tensor)
        elements += part * prod(tensor.shape)
    return int(size), int(elements)


@attrs.frozen(kw_only=True)
class Load:
    """What a measured rate was about, as far as bounds depend on it."""

    weight_bytes: int
    """That one token reads."""
    elements: int
    """Weights that one token multiplies with."""
    kv_bytes: int = 0
    """That one sequence reads per step."""
    sequences: int = 1
    experts: tuple[int, int] | None = None
    """(chosen, all) of a mixture: more sequences read more of them."""

    @property
    def step_bytes(self) -> float:
        """Least bytes of one decode step; weights are read once for all sequences."""
        share = 1.0
        if self.experts is not None:
            chosen, count = self.experts
            met = count * (1 - (1 - chosen / count) ** self.sequences)
            share = max(1.0, met / chosen)
        return self.weight_bytes * share + self.kv_bytes * self.sequences


def decode_bound(load: Load, bandwidth: float, compute: float | None) -> float:
    """Tokens per second that decoding cannot exceed, without speculation."""
    by_bytes = load.sequences * bandwidth / load.step_bytes
    return by_bytes if compute is None else min(by_bytes, compute / (2 * load.elements))


def prefill_bound(load: Load, compute: float) -> float:
    """Prompt tokens per second that cannot be exceeded."""
    return compute / (2 * load.elements)


def verdict(rate: float, best: float | None, peak: float | None) -> str:
    """`impossible` over the theoretical peak, `speculative` over the best that was measured."""
    if peak is not None and rate > peak:
        return "impossible"
    if best is not None and rate > best:
        return "speculative"
    return "within the bound" if best is not None or peak is not None else "no bound known"
