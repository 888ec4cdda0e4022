"""Frozen configuration: flag > `HALOGEN_*` variable > TOML or YAML file > default."""

from halogen_core.config.resolution import Config, environment, resolve
from halogen_core.config.schema import (
    SECTIONS,
    SETTINGS,
    CacheSettings,
    EngineSettings,
    ModelSettings,
    PathSettings,
    ServerSettings,
)
from halogen_core.config.setting import Setting

__all__ = [
    "SECTIONS",
    "SETTINGS",
    "CacheSettings",
    "Config",
    "EngineSettings",
    "ModelSettings",
    "PathSettings",
    "ServerSettings",
    "Setting",
    "environment",
    "resolve",
]
