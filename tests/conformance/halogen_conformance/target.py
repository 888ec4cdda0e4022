"""What is under test: a backend by name, the plugin that offers it, and how to open it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import importlib_metadata

from halogen_conformance.case import Opening
from halogen_core.errors import PluginError
from halogen_core.plugins import PluginOptions, PluginRegistry, create_backend, select
from halogen_core.spi import ENTRY_POINT_GROUP, Backend, BackendOptions

INSPECT_S = 60.0
HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")


@attrs.frozen(kw_only=True)
class PluginFacts:
    """What loading one installed plugin, in a process of its own, gave."""

    name: str
    module: str
    distribution: str
    version: str
    status: str
    """`ok`, `disabled`, `incompatible`, `broken`, or here also `crash` and `hang`."""
    reason: str = ""
    backends: Sequence[str] = ()
    aliases: Sequence[str] = ()
    heavy: Sequence[str] = ()
    """Heavy modules that registration imported."""
    printed: str = ""
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Target:
    """A backend to certify, and how the user wants it opened."""

    backend: str
    plugin: str
    """Entry-point name; only this plugin is loaded where the backend runs."""
    device: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    threads: int | None = None

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Target:
        return cls(**json.loads(text))

    def registry(self) -> PluginRegistry:
        """The plugins of this process: the one under test only."""
        return PluginRegistry.discover(PluginOptions(allow=frozenset({self.plugin})))

    def open(self, opening: Opening) -> Backend[Any]:
        """Probe and open; raises what the core would raise for a user."""
        extra = dict(self.options)
        if opening.dtype is not None:
            extra["dtype"] = opening.dtype
        options = BackendOptions(
            device=self.device,
            threads=self.threads,
            deterministic=opening.deterministic,
            extra=extra,
        )
        candidate = select(self.registry(), self.backend, device=self.device)
        return create_backend(candidate, options)


# ---------------------------------------------------------------- looking at plugins, isolated


def inspect_plugins(timeout_s: float = INSPECT_S) -> list[PluginFacts]:
    """Every installed plugin, each loaded in its own process; duplicates of a name are broken."""
    entries = sorted(importlib_metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name)
    with ThreadPoolExecutor(max_workers=2) as pool:
        facts = list(pool.map(lambda e: _inspect(e, timeout_s), entries))
    return _refuse_duplicates(facts)


def inspect_one(plugin: str, timeout_s: float = INSPECT_S) -> PluginFacts:
    """The facts of one installed plugin."""
    entries = importlib_metadata.entry_points(group=ENTRY_POINT_GROUP)
    return _inspect(next(e for e in entries if e.name == plugin), timeout_s)


def find(backend: str, facts: Sequence[PluginFacts]) -> PluginFacts:
    """The plugin that offers `backend`, or the broken one that was meant to.

    Raises `PluginError` (HRT-6001) when no installed plugin is called that.
    """
    for fact in facts:
        if fact.status == "ok" and backend in (*fact.backends, *fact.aliases):
            return fact
    for fact in facts:
        if backend in (fact.name, *fact.backends):
            return fact
    known = ", ".join(sorted(name for f in facts for name in f.backends)) or "none"
    raise PluginError(
        f"backend `{backend}` is not installed; installed: {known}",
        code="HRT-6001",
        fix="pip install the plugin that provides it into the environment of the suite",
    )


def _inspect(entry: Any, timeout_s: float) -> PluginFacts:
    known = {
        "name": entry.name,
        "module": entry.value,
        "distribution": entry.dist.name if entry.dist else "?",
        "version": entry.dist.version if entry.dist else "?",
    }
    with tempfile.TemporaryDirectory(prefix="halogen-inspect-") as folder:
        out = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "halogen_conformance.plugin_main", entry.name, str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            reason = f"loading did not end within {timeout_s:.0f} s"
            return PluginFacts(**known, status="hang", reason=reason)
        if not out.exists():
            tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
            reason = f"loading ended the process with {exit_text(done.returncode)}: {tail}"
            return PluginFacts(**known, status="crash", reason=reason)
        return PluginFacts(**known, **json.loads(out.read_text()), printed=done.stdout[:2000])


def exit_text(code: int) -> str:
    """How a process ended, for people."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _refuse_duplicates(facts: list[PluginFacts]) -> list[PluginFacts]:
    owner: dict[str, PluginFacts] = {}
    out = []
    for fact in facts:
        current = fact
        for name in (*fact.backends, *fact.aliases) if fact.status == "ok" else ():
            if (first := owner.setdefault(name, fact)) is not fact:
                reason = f"claims backend name `{name}` of `{first.name}` ({first.distribution})"
                current = attrs.evolve(fact, status="broken", reason=reason)
        out.append(current)
    return out
