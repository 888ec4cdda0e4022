"""The child process that loads one plugin: `python -m halogen_conformance.plugin_main NAME OUT`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from halogen_core.plugins import PluginOptions, PluginRegistry


def main(name: str, out: str) -> None:
    """Write what loading `name` gave to `out`."""
    began = time.perf_counter()
    before = set(sys.modules)
    registry = PluginRegistry.discover(PluginOptions(allow=frozenset({name})))
    seconds = time.perf_counter() - began
    from halogen_conformance.target import HEAVY

    plugin = next(p for p in registry.plugins if p.name == name)
    facts = {
        "status": str(plugin.status),
        "reason": plugin.reason,
        "backends": [spec.name for spec in plugin.backends],
        "aliases": [alias for spec in plugin.backends for alias in spec.aliases],
        "heavy": [m for m in HEAVY if m in sys.modules and m not in before],
        "seconds": seconds,
    }
    Path(out).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
