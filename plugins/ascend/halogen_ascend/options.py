"""Backend options of `ascend:sim`, checked against the part before anything is opened."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from halogen_ascend.device_string import DEFAULT_PROFILE, parse_device
from halogen_ascend.sim.faults import Fault, parse_faults
from halogen_ascend.sim.memory import POOLS
from halogen_ascend.sim.profiles import Profile, profile, restrict
from halogen_core.spi import BackendOptions, ConfigError

log = logging.getLogger(__name__)

DTYPES = ("f16", "bf16", "f32")
ROPE_ALIGN = 128
"""Bytes; the field notes' figure, a multiple of the part's own granule of 32."""


@attrs.frozen(kw_only=True)
class SimOptions:
    """What may be set with `--backend-option key=value`; bytes and seconds."""

    part: Profile
    dtype: str = "f16"
    """Compute dtype: f16, bf16 or f32."""
    kv_split: int = 8
    """KV blocks per attention task; 0 leaves a head's whole cache to one core."""
    graph_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Decode batch sizes with a captured step; empty switches capture off."""
    pools: Mapping[str, int] = attrs.field(factory=dict)
    launch_s: float = 5e-6
    rope_align: int = ROPE_ALIGN
    blocking: bool = False
    faults: tuple[Fault, ...] = ()
    threads: int = 1


def sim_options(options: BackendOptions) -> SimOptions:
    """Parse and validate. Raises `ConfigError` naming the key, the value and what is allowed."""
    choice = parse_device(options.device)
    if choice.runtime != "sim":
        raise ConfigError(
            f"device `{options.device or 'ascend'}` is a real one; only a simulated part can be "
            "planned without it",
            code="HRT-7101",
            fix=f"write --device ascend:sim:{DEFAULT_PROFILE}",
        )
    part = profile(choice.profile)
    values: dict[str, Any] = {}
    pools: dict[str, int] = {}
    cores: dict[str, int] = {}
    for key, text in options.extra.items():
        if key in _CORES:
            cores[_CORES[key]] = _read(key, text, lambda t: int(t, 0), "a whole number")
        elif key.removesuffix("_pool_gb") in POOLS and key.endswith("_pool_gb"):
            size = _read(key, text, _amount, "GiB, more than 0")
            pools[key.removesuffix("_pool_gb")] = int(size * 2**30)
        elif key in _READERS:
            values[_NAMES.get(key, key)] = _read(key, text, *_READERS[key])
        else:
            raise _unknown(key)
    part = restrict(part, core_num=cores.get("core_num"), mask=cores.get("mask"))
    made = SimOptions(
        part=part,
        pools=pools,
        **{"launch_s": part.launch, "threads": options.threads or 1, **values},
    )
    _check(made)
    return made


def _check(made: SimOptions) -> None:
    if made.dtype not in DTYPES:
        raise _wrong("dtype", made.dtype, f"one of {', '.join(DTYPES)}")
    if made.kv_split < 0:
        raise _wrong("kv_split", made.kv_split, "0 or more KV blocks per task")
    if made.rope_align < 4 or made.rope_align & (made.rope_align - 1):
        raise _wrong("rope_align", made.rope_align, "a power of two of at least 4 bytes")
    if made.rope_align < ROPE_ALIGN:
        log.warning(
            "rope_align is %d: rows of the cos/sin table are not aligned to %d bytes, which costs "
            "the real device; leave the option out",
            made.rope_align,
            ROPE_ALIGN,
        )


def _read(key: str, text: str, reader: Callable[[str], Any], allowed: str) -> Any:
    try:
        return reader(text)
    except ValueError as exc:
        raise _wrong(key, text, allowed) from exc


def _wrong(key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"backend option `{key}` is `{value}`; allowed: {allowed}",
        code="HRT-7109",
        fix="see the table of options in the README of halogen-ascend",
    )


def _unknown(key: str) -> ConfigError:
    hints = {
        "max_batch_size": "a window replaced it: see `halogen explain batching --help`",
        "kv_cache_pool_gb": "write `dynamic_pool_gb`",
    }
    known = ", ".join([*_CORES, *_READERS, *(f"{p}_pool_gb" for p in POOLS)])
    return ConfigError(
        f"backend option `{key}` is unknown to `ascend`; known: {known}",
        code="HRT-7109",
        fix=hints.get(key, "remove it"),
    )


def _amount(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


def _microseconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError(text)
    return value * 1e-6


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "on", "off"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "on")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_CORES = {"core_num": "core_num", "core_affinity_mask": "mask"}
_NAMES = {"launch_us": "launch_s"}
_READERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "dtype": (str, ""),
    "kv_split": (int, "a whole number of KV blocks per task"),
    "graph_buckets": (_sizes, "ascending batch sizes with commas between"),
    "launch_us": (_microseconds, "0 or more microseconds"),
    "rope_align": (int, "a power of two in bytes"),
    "blocking": (_flag, "true or false"),
    "faults": (parse_faults, ""),
}
