"""What is under test: a backend by name, the plugin that offers it, and how to open it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import importlib_metadata

from halogen_conformance.case import Opening
from halogen_core.errors import PluginError
from halogen_core.plugins import PluginOptions, PluginRegistry, create_backend, select
from halogen_core.spi import ENTRY_POINT_GROUP, Backend, BackendOptions

INSPECT_S = 60.0


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

    def with_threads(self, threads: int) -> Target:
        """The same with a share of the CPU's threads, where the user asked for no number."""
        return self if self.threads is not None else attrs.evolve(self, threads=threads)

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
    """Every installed plugin, loaded in another process; duplicates of a name are broken.

    One process loads them one by one; where a plugin ends it, the next process goes on.
    """
    entries = sorted(importlib_metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name)
    return _refuse_duplicates(_inspect(entries, timeout_s))


def inspect_one(plugin: str, timeout_s: float = INSPECT_S) -> PluginFacts:
    """The facts of one installed plugin, in a process that loads nothing else."""
    entries = importlib_metadata.entry_points(group=ENTRY_POINT_GROUP)
    return _inspect([e for e in entries if e.name == plugin], timeout_s)[0]


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


def _inspect(entries: Sequence[Any], timeout_s: float) -> list[PluginFacts]:
    known = {e.name: _identity(e) for e in entries}
    facts: dict[str, PluginFacts] = {}
    while pending := [name for name in known if name not in facts]:
        lines, ending = _load_in_child(pending, timeout_s)
        for line in lines:
            if "facts" in line:
                facts[line["name"]] = PluginFacts(**known[line["name"]], **line["facts"])
        if ending is not None:
            started = [line["name"] for line in lines if "facts" not in line]
            culprit = next((n for n in reversed(started) if n not in facts), pending[0])
            status, reason = ending
            facts[culprit] = PluginFacts(**known[culprit], status=status, reason=reason)
    return [facts[name] for name in known]


def _identity(entry: Any) -> dict[str, str]:
    return {
        "name": entry.name,
        "module": entry.value,
        "distribution": entry.dist.name if entry.dist else "?",
        "version": entry.dist.version if entry.dist else "?",
    }


def _load_in_child(
    names: Sequence[str], timeout_s: float
) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
    """What the child wrote, and how it ended if not well: (status, reason)."""
    with tempfile.TemporaryDirectory(prefix="halogen-inspect-") as folder:
        out = Path(folder) / "facts.jsonl"
        out.touch()
        command = [sys.executable, "-m", "halogen_conformance.plugin_main", str(out), *names]
        ending = None
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            if done.returncode != 0:
                tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
                how = f"loading ended the process with {exit_text(done.returncode)}: {tail}"
                ending = ("crash", how)
        except subprocess.TimeoutExpired:
            ending = ("hang", f"loading did not end within {timeout_s:.0f} s")
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if ending is None and sum("facts" in line for line in lines) < len(names):
            ending = ("crash", "loading ended the process with exit code 0")
        return lines, ending


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
