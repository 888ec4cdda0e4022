"""Which code a run is of: a digest per distribution, so that what was cut goes on with the same."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import importlib_metadata

from halogen_conformance.target import PluginFacts

SUITE = "halogen-conformance"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SEPARATORS = re.compile(r"[-_.]+")


def sources(plugin: PluginFacts) -> dict[str, str]:
    """A sha256 by distribution: the suite, the plugin and all that these require, installed.

    Of one installed to be edited over its files; of others over the list of files and their hashes
    that the installer wrote (RECORD). The plugin's package is read in any case.
    """
    found = {"python": platform.python_version()}
    waiting = [SUITE, plugin.distribution]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            distribution = importlib_metadata.distribution(name)
        except importlib_metadata.PackageNotFoundError:
            # what a marker leaves out; a plugin without it could not have been loaded
            continue
        found[name] = _digest(distribution)
        waiting += _requirements(distribution)
    found[f"package {plugin.module}"] = _contents(_package(plugin.module))
    return found


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names whose digest differs or that only one of them has."""
    return sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))


def _normal(name: str) -> str:
    """As in PEP 503."""
    return _SEPARATORS.sub("-", name).lower()


def _requirements(distribution: Any) -> Iterator[str]:
    for line in distribution.requires or ():
        if "extra ==" not in line and (name := _NAME.match(line)):
            yield name[0]


def _digest(distribution: Any) -> str:
    folder = _edited_in(distribution)
    if folder is not None:
        return _contents(_packages(folder))
    listed = distribution.read_text("RECORD") or ""
    return hashlib.sha256(f"{distribution.version}\n{listed}".encode()).hexdigest()


def _edited_in(distribution: Any) -> Path | None:
    """The project's folder of an editable installation (PEP 610)."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))


def _packages(folder: Path) -> list[Path]:
    """Folders of packages in a project, also under `src`, and modules that are in none.

    Not the whole project: a report may be written into it.
    """
    inits = [*folder.glob("*/__init__.py"), *folder.glob("src/*/__init__.py")]
    single = [path for place in (".", "src") for path in folder.glob(f"{place}/*.py")]
    return [*(init.parent for init in inits), *single]


def _package(module: str) -> list[Path]:
    """Where the top package of `module` lies; found without importing it."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return []
    return [Path(p) for p in spec.submodule_search_locations or [spec.origin] if p]


def _contents(roots: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for root in sorted(roots):
        for path in sorted([root] if root.is_file() else root.rglob("*")):
            if path.is_file() and path.parent.name != "__pycache__":
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root.parent)} {len(data)}\n".encode() + data)
    return digest.hexdigest()
