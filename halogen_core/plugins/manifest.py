"""Static manifests: what a plugin says of itself in `halogen-backend.toml`, read without import."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import attrs
import importlib_metadata
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from halogen_core.errors import PluginError, SpiMismatch
from halogen_core.spi import SPI_VERSION

FILE_NAME = "halogen-backend.toml"
MANIFEST_VERSION = 1
_REQUIRED = ("manifest", "name", "spi")
_OPTIONAL = ("python", "torch", "description", "probe_env", "profiles")


@attrs.frozen(kw_only=True)
class Manifest:
    """The promises a plugin makes before any of its code runs; ranges are PEP 440 specifiers."""

    name: str
    spi: str
    python: str = ""
    torch: str = ""
    description: str = ""
    probe_env: tuple[str, ...] = ()
    """Environment variables that change what the probe finds (they key its cache)."""
    profiles: str = ""
    """Folder of saved capability profiles inside the package, for `halogen plan`."""
    path: str = ""


def find_manifest(module: str) -> Path:
    """The manifest beside the package that holds `module`; nothing is imported.

    Raises `PluginError` (HRT-1104) when the package or its manifest is missing.
    """
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PluginError(
            f"package `{package}` cannot be found",
            code="HRT-1104",
            fix="reinstall the plugin",
        )
    for folder in spec.submodule_search_locations:
        if (path := Path(folder) / FILE_NAME).is_file():
            return path
    raise PluginError(
        f"package `{package}` has no `{FILE_NAME}`",
        code="HRT-1104",
        fix="ship the manifest as package data",
    )


def read_manifest(path: Path) -> Manifest:
    """Parse and validate; raises `PluginError` (HRT-1105) naming the key at fault."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise PluginError(f"`{path.name}` cannot be read: {exc}", code="HRT-1105") from exc
    missing = [key for key in _REQUIRED if key not in data]
    unknown = sorted(set(data) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        raise PluginError(
            f"`{path.name}` lacks {missing} and has unknown keys {unknown}",
            code="HRT-1105",
            fix=f"required: {list(_REQUIRED)}, optional: {list(_OPTIONAL)}",
        )
    if data.pop("manifest") != MANIFEST_VERSION:
        raise PluginError(
            f"`{path.name}` is not of manifest version {MANIFEST_VERSION}", code="HRT-1105"
        )
    data["probe_env"] = tuple(data.get("probe_env", ()))
    return Manifest(path=str(path), **data)


def check_versions(manifest: Manifest) -> None:
    """Raise `SpiMismatch` or `PluginError` (HRT-1106) if this core, Python or torch is outside."""
    spi = ".".join(map(str, SPI_VERSION))
    if not _within(spi, manifest.spi, "spi"):
        raise SpiMismatch(
            f"plugin `{manifest.name}` wants SPI {manifest.spi}; this core speaks {spi}",
            fix="install the plugin's release for this core, or upgrade halogen-core",
        )
    python = ".".join(map(str, sys.version_info[:3]))
    for what, have, want in (
        ("python", python, manifest.python),
        ("torch", _torch_version(), manifest.torch),
    ):
        if want and not (have and _within(have, want, what)):
            raise PluginError(
                f"plugin `{manifest.name}` wants {what} {want}; here is {have or 'none'}",
                code="HRT-1106",
                fix=f"install a matching {what}",
            )


def _within(version: str, specifier: str, what: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidSpecifier as exc:
        raise PluginError(
            f"manifest key `{what}` is `{specifier}`, not a version range", code="HRT-1105"
        ) from exc


def _torch_version() -> str | None:
    try:
        return importlib_metadata.version("torch").partition("+")[0]
    except importlib_metadata.PackageNotFoundError:
        return None
