"""Putting flags, environment, file and defaults together; the only reader of the environment."""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from halogen_core.config.schema import (
    LEGACY,
    SECTIONS,
    SETTINGS,
    CacheSettings,
    EngineSettings,
    ModelSettings,
    PathSettings,
    ServerSettings,
)
from halogen_core.config.setting import Setting
from halogen_core.errors import ConfigError

log = logging.getLogger(__name__)

NEEDS = {"disk_pool_dir": "disk_pool_size"}
"""Settings that would be ignored silently without another."""
POOL_NAMES = ("pool_size", "kv_cache_pool_gb", "kv_cache_ratio", "gpu_memory_utilization")
"""Settings of which at most one may be given."""
ALIASES = {alias: s.name for s in SETTINGS.values() for alias in s.aliases}
CONFIG_VARIABLE = "HALOGEN_CONFIG"
OTHER_VARIABLES = {CONFIG_VARIABLE, "HALOGEN_TORCH", "HALOGEN_TORCH_INDEX"}


@attrs.frozen(kw_only=True)
class Given:
    """A setting as some source gave it; `where` is for people."""

    name: str
    value: object
    where: str


@attrs.frozen(kw_only=True)
class Config:
    """All settings, resolved once; `sources` says where each came from."""

    model: ModelSettings
    engine: EngineSettings
    cache: CacheSettings
    server: ServerSettings
    paths: PathSettings
    sources: Mapping[str, str]

    def describe(self) -> dict[str, tuple[str, str]]:
        """Setting -> (value, source); secrets are masked."""
        return {
            s.name: (
                "***" if s.secret else str(getattr(getattr(self, s.section), s.name)),
                self.sources[s.name],
            )
            for s in SETTINGS.values()
        }


def resolve(
    flags: Mapping[str, object] | None = None,
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Flag beats environment beats file beats default; raises `ConfigError` (HRT-10xx).

    `flags` maps setting names to what was given on the command line; None means: not given.
    """
    variables: Mapping[str, str] = os.environ if environment is None else environment
    layers = [
        list(_from_file(_find_file(file, variables))),
        list(_from_environment(variables)),
        list(_from_flags(flags or {})),
    ]
    chosen: dict[str, Given] = {}
    for layer in layers:
        chosen |= _one_each(layer)
    _refuse_conflicts(chosen)
    values = _default_paths(variables) | {name: given.value for name, given in chosen.items()}
    sources = dict.fromkeys(SETTINGS, "default") | {n: g.where for n, g in chosen.items()}
    parts: dict[str, Any] = {
        section: fields(
            **{f.name: values[f.name] for f in attrs.fields(fields) if f.name in values}
        )
        for section, fields in SECTIONS.items()
    }
    return Config(sources=sources, **parts)


def environment(names: tuple[str, ...] | None = None) -> dict[str, str]:
    """Variables of this process, for probes and checks that name them; None: all."""
    every = dict(os.environ)
    return every if names is None else {name: every[name] for name in names if name in every}


def _from_flags(flags: Mapping[str, object]) -> Iterator[Given]:
    for name, value in flags.items():
        if value is not None and value != ():
            setting = SETTINGS[name]
            yield _given(setting, value, f"flag {setting.flag}")


def _from_environment(variables: Mapping[str, str]) -> Iterator[Given]:
    known = {s.variable: s for s in SETTINGS.values()}
    for variable, value in variables.items():
        if setting := known.get(variable):
            yield _given(setting, value, f"environment variable {variable}")
        elif variable.startswith("HALOGEN_") and variable not in OTHER_VARIABLES:
            _unknown_variable(variable, list(known))


def _unknown_variable(variable: str, known: list[str]) -> None:
    """A near miss is an error; others may belong to a plugin."""
    if near := difflib.get_close_matches(variable, known, n=1, cutoff=0.85):
        raise ConfigError(
            f"environment variable `{variable}` is unknown", fix=f"did you mean `{near[0]}`?"
        )
    log.debug("environment variable %s is not a setting of the core", variable)


def _from_file(path: Path | None) -> Iterator[Given]:
    for key, value in _read_file(path).items() if path else ():
        if key in SECTIONS and isinstance(value, dict):
            for inner, item in value.items():
                yield _from_key(inner, item, f"{path}: {key}.{inner}")
        else:
            yield _from_key(key, value, f"{path}: {key}")


def _from_key(key: str, value: object, where: str) -> Given:
    name = key.replace("-", "_")
    if setting := SETTINGS.get(ALIASES.get(name, name)):
        return _given(setting, value, where)
    if hint := LEGACY.get(name):
        raise ConfigError(
            f"setting `{key}` ({where}) has no meaning here", code="HRT-1005", fix=hint
        )
    near = difflib.get_close_matches(name, [*SETTINGS, *ALIASES, *SECTIONS], n=1)
    fix = f"did you mean `{near[0]}`?" if near else "see docs/reference/configuration.md"
    raise ConfigError(f"setting `{key}` ({where}) is unknown", fix=fix)


def _given(setting: Setting, value: object, where: str) -> Given:
    result = _read(setting.kind.read, value, setting.name, where)
    _check_limits(setting, result, where)
    return Given(name=setting.name, value=result, where=where)


def _read(read: Any, value: object, name: str, where: str) -> object:
    try:
        return read(value)
    except ValueError as exc:
        raise ConfigError(
            f"setting `{name}` is `{value}` ({where})", code="HRT-1002", fix=f"it must be {exc}"
        ) from exc


def _check_limits(setting: Setting, value: object, where: str) -> None:
    allowed = ""
    if setting.choices and value not in setting.choices:
        allowed = "one of " + ", ".join(setting.choices)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = setting.minimum, setting.maximum
        if low is not None and value < low:
            allowed = f"at least {low:g}"
        elif high is not None and value > high:
            allowed = f"at most {high:g}"
    if allowed:
        raise ConfigError(
            f"setting `{setting.name}` is {value} ({where})",
            code="HRT-1002",
            fix=f"it must be {allowed}",
        )


def _one_each(layer: list[Given]) -> dict[str, Given]:
    """The layer by name; the same setting twice in one layer (by an alias) is refused."""
    found: dict[str, Given] = {}
    for given in layer:
        if (first := found.setdefault(given.name, given)) is not given:
            _conflict(first, given, f"both mean `{given.name}`")
    return found


def _refuse_conflicts(chosen: Mapping[str, Given]) -> None:
    pools = [chosen[name] for name in POOL_NAMES if name in chosen]
    if len(pools) > 1:
        _conflict(pools[0], pools[1], "both set the size of the KV pool")
    for low, high in (
        ("min_batch_window_ms", "max_batch_window_ms"),
        ("max_prompt_len", "max_context"),
        ("max_decode_len", "max_context"),
    ):
        a, b = chosen.get(low), chosen.get(high)
        if a and b and float(str(a.value)) > float(str(b.value)):
            _conflict(a, b, f"`{low}` must not exceed `{high}`")
    for name, needed in NEEDS.items():
        if (given := chosen.get(name)) and needed not in chosen:
            raise ConfigError(
                f"`{name}` ({given.where}) has no effect without `{needed}`, which is not set",
                code="HRT-1003",
                fix=f"set --{needed.replace('_', '-')}, or leave `{name}` out",
            )
    if (port := chosen.get("port")) and (unix := chosen.get("unix_socket")):
        _conflict(port, unix, "the server listens in one place")


def _conflict(a: Given, b: Given, why: str) -> None:
    raise ConfigError(
        f"`{a.name}` ({a.where}) and `{b.name}` ({b.where}) contradict each other: {why}",
        code="HRT-1003",
        fix="remove one of the two",
    )


def _find_file(file: Path | None, variables: Mapping[str, str]) -> Path | None:
    """The file named by flag or variable, else the user's, else the system's, else none."""
    if named := file or (Path(v) if (v := variables.get(CONFIG_VARIABLE)) else None):
        return named
    folders = (_xdg(variables, "XDG_CONFIG_HOME", ".config"), Path("/etc/halogen"))
    names = ("halogen.toml", "halogen.yaml", "config.toml", "config.yaml")
    return next((p for d in folders for name in names if (p := d / name).is_file()), None)


def _read_file(path: Path) -> dict[str, Any]:
    """The file's top-level table; raises `ConfigError` (HRT-1004)."""
    import yaml  # late: most commands have no YAML file

    try:
        content = path.read_text(encoding="utf-8")
        data = tomllib.loads(content) if path.suffix == ".toml" else yaml.safe_load(content)
    except OSError as exc:
        raise ConfigError(
            f"configuration file `{path}` cannot be opened: {exc.strerror}",
            code="HRT-1004",
            fix="check --config, HALOGEN_CONFIG and the file's rights",
        ) from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(
            f"configuration file `{path}` cannot be read: {exc}",
            code="HRT-1004",
            fix="TOML files end in .toml, all others are read as YAML",
        ) from exc
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"configuration file `{path}` holds no table of settings", code="HRT-1004"
        )
    return {str(key): value for key, value in data.items()}


def _default_paths(variables: Mapping[str, str]) -> dict[str, object]:
    return {
        "models_dir": _xdg(variables, "XDG_DATA_HOME", ".local/share") / "models",
        "cache_dir": _xdg(variables, "XDG_CACHE_HOME", ".cache"),
    }


def _xdg(variables: Mapping[str, str], variable: str, default: str) -> Path:
    chosen = variables.get(variable)
    home = Path(variables.get("HOME") or "~").expanduser()
    return (Path(chosen) if chosen else home / default) / "halogen"
