"""Saved capability profiles: a device as data, so that plans and bounds need no hardware.

A profile is a JSON file that a plugin ships (folder `profiles` of its static manifest).
"""

from __future__ import annotations

import json
from math import isfinite, prod
from pathlib import Path
from typing import Any

import attrs

from halogen_core.errors import ConfigError
from halogen_core.spi import KV_ROW_BYTES, QuantTensor


@attrs.frozen(kw_only=True)
class Profile:
    """A device as data. Bytes, bytes per second, operations per second."""

    name: str
    backend: str
    device: str
    source: str
    matches: str = ""
    """Part of the name that a backend gives to such a device."""
    free: int
    reserve: int
    graph: int = 0
    """Set aside for captured steps."""
    shared_with_host: bool = False
    """One memory: a host tier is part of the pool."""
    bandwidth: dict[str, float]
    compute: dict[str, float]
    weight_formats: dict[str, str]
    packed_bits: dict[str, float] = attrs.field(factory=dict)
    """Bits of an element on the device, scales included, where that is not what the file has."""
    kv_dtypes: tuple[str, ...]
    kv_block_sizes: tuple[int, ...]
    head_dim_max: int
    fallback_ops: dict[str, str]

    def packed_bytes(self, tensor: QuantTensor) -> int:
        """On the device: as stored where that is native, else 16 bits for each element.

        Norms stay exact. A device of which nothing is known keeps everything as stored.
        """
        if len(tensor.shape) == 1:
            return stored_bytes(tensor)
        if bits := self.packed_bits.get(tensor.format):
            return int(bits * prod(tensor.shape) / 8)
        if not self.weight_formats or self.weight_formats.get(tensor.format) == "native":
            return stored_bytes(tensor)
        return 2 * prod(tensor.shape)


def stored_bytes(tensor: QuantTensor) -> int:
    """Of a tensor with its scales, as in the file."""
    return tensor.data.nbytes + sum(scales.nbytes for scales in tensor.aux.values())


def find_profile(name: str | None, backend: str | None = None) -> Profile:
    """The profile of that name among installed plugins' (by manifest), or in a file.

    The profile says which backend it is of; `backend`, if given, must be that one.
    """
    found, names = _shipped(backend)
    owner = f"backend `{backend}`" if backend else "no installed plugin"
    listed = f"there are {', '.join(sorted(found)) or 'none'}"
    if name is None:
        raise _no_profile(f"no device is named; of {owner if backend else 'all plugins'} {listed}")
    if name.endswith(".json"):
        profile = read_profile(Path(name))
        if backend is None or backend in names.get(profile.backend, {profile.backend}):
            return profile
        raise _no_profile(f"profile `{name}` is of backend `{profile.backend}`, not `{backend}`")
    if name not in found:
        verb = "has no" if backend else "has a"
        raise _no_profile(f"{owner} {verb} profile `{name}`; {listed}")
    return read_profile(found[name])


def profile_of(backend: str, device: str) -> Profile | None:
    """The first profile of a backend's plugin whose `matches` is part of the device's name."""
    found, _ = _shipped(backend)
    profiles = (read_profile(path) for _, path in sorted(found.items()))
    return next((p for p in profiles if p.matches and p.matches in device), None)


def _shipped(backend: str | None) -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Files of profiles by name, and all names of the backends that a name's plugin offers."""
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
    return found, names


def _no_profile(text: str) -> ConfigError:
    fix = "name one that is there with --profile, or give a JSON file"
    return ConfigError(text, code="HRT-3421", fix=fix)


def read_profile(path: Path) -> Profile:
    """A profile file; raises `ConfigError` for one that is damaged."""
    try:
        return _profile(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        why = f"`{exc.args[0]}` is missing" if isinstance(exc, KeyError) else str(exc)
        raise ConfigError(
            f"profile `{path}` cannot be used: {why}",
            code="HRT-3422",
            fix="compare it with a profile that a plugin ships",
        ) from exc


def _profile(data: Any) -> Profile:
    """Raises `KeyError` for what is missing, `ValueError` for what cannot be meant."""
    memory = _of(data, dict, "the file")["memory"]
    _of(memory, dict, "memory")
    return Profile(
        name=_of(data["name"], str, "name"),
        backend=_of(data["backend"], str, "backend"),
        device=_of(data["device"], str, "device"),
        source=_of(data["source"], str, "source"),
        matches=_of(data.get("matches", ""), str, "matches"),
        free=_size(memory["free"], "memory.free"),
        reserve=_size(memory["reserve"], "memory.reserve"),
        graph=_size(memory.get("graph", 0), "memory.graph"),
        shared_with_host=_of(memory.get("shared_with_host", False), bool, "shared_with_host"),
        bandwidth=_rates(data["bandwidth"], "bandwidth"),
        compute=_rates(data["compute"], "compute"),
        weight_formats=_texts(data["weight_formats"], "weight_formats"),
        packed_bits=_rates(data.get("packed_bits", {}), "packed_bits"),
        kv_dtypes=tuple(_kv_dtypes(data["kv_dtypes"])),
        kv_block_sizes=tuple(_block_sizes(data["kv_block_sizes"])),
        head_dim_max=_size(data["head_dim_max"], "head_dim_max"),
        fallback_ops=_texts(data["fallback_ops"], "fallback_ops"),
    )


def _of(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is `{value}`; allowed is a JSON {_JSON[kind]}")
    return value


_JSON = {dict: "object", list: "array", str: "string", bool: "boolean"}


def _size(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is `{value}`; allowed is a whole number from 0")
    return value


def _rates(value: Any, name: str) -> dict[str, float]:
    for key, rate in _of(value, dict, name).items():
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not isfinite(rate) or rate <= 0:
            raise ValueError(f"{name}.{key} is `{rate}`; allowed is a number above 0")
    return dict(value)


def _texts(value: Any, name: str) -> dict[str, str]:
    return {key: _of(text, str, f"{name}.{key}") for key, text in _of(value, dict, name).items()}


def _kv_dtypes(value: Any) -> list[str]:
    if not _of(value, list, "kv_dtypes") or any(kind not in KV_ROW_BYTES for kind in value):
        raise ValueError(f"kv_dtypes is `{value}`; allowed are some of {', '.join(KV_ROW_BYTES)}")
    return list(value)


def _block_sizes(value: Any) -> list[int]:
    sizes = [_size(size, "kv_block_sizes") for size in _of(value, list, "kv_block_sizes")]
    if not all(sizes) or not sizes:
        raise ValueError(f"kv_block_sizes is `{value}`; allowed are numbers of tokens")
    return sizes
