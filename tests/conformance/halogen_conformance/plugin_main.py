"""The child process that loads plugins: `python -m halogen_conformance.plugin_main OUT NAME...`.

A line of JSON before and after each, so that the parent knows which one ended this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

from halogen_core.plugins import PluginOptions, PluginRegistry

HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")


def load(name: str) -> dict[str, Any]:
    """What loading one plugin gave."""
    before, printed = set(sys.modules), io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(printed):
        registry = PluginRegistry.discover(PluginOptions(allow=frozenset({name})))
    seconds = time.perf_counter() - began
    plugin = next(p for p in registry.plugins if p.name == name)
    return {
        "status": str(plugin.status),
        "reason": plugin.reason,
        "backends": [spec.name for spec in plugin.backends],
        "aliases": [alias for spec in plugin.backends for alias in spec.aliases],
        "heavy": [m for m in HEAVY if m in sys.modules and m not in before],
        "printed": printed.getvalue()[:2000],
        "seconds": seconds,
    }


def main(out: str, names: list[str]) -> None:
    """Load `names` in order."""
    with Path(out).open("a", encoding="utf-8", buffering=1) as stream:
        for name in names:
            stream.write(json.dumps({"name": name}) + "\n")
            facts = load(name)
            stream.write(json.dumps({"name": name, "facts": facts}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
