"""Choosing a backend. An explicit choice that cannot run is an error, never another device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from halogen_core.errors import BackendUnavailable, HalogenError
from halogen_core.plugins.loading import Plugin, PluginRegistry, PluginStatus
from halogen_core.plugins.missing import not_installed
from halogen_core.plugins.probe import probe
from halogen_core.spi import Backend, BackendOptions, BackendSpec, ProbeContext, ProbeResult


@attrs.frozen(kw_only=True)
class Candidate:
    """A backend, who offers it and what its probe said."""

    plugin: Plugin
    spec: BackendSpec
    result: ProbeResult

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{r.text} ({r.hint})" if r.hint else r.text for r in self.result.reasons)


def candidates(
    registry: PluginRegistry,
    *,
    cache_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Candidate]:
    """Every backend of every working plugin, probed, best first."""
    found = [
        Candidate(
            plugin=plugin,
            spec=spec,
            result=probe(
                plugin, spec.name, ProbeContext(), cache_dir=cache_dir, environment=environment
            ),
        )
        for plugin, spec in _offers(registry)
    ]
    return sorted(found, key=_rank, reverse=True)


def select(
    registry: PluginRegistry,
    name: str | None,
    *,
    device: str | None = None,
    cache_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Candidate:
    """The backend to use: the one named (by `name` or as prefix of `device`), else the best.

    Raises `PluginError` (HRT-1107) for an unknown name, `BackendUnavailable` with the probe's
    reasons for one that cannot run here.
    """
    wanted = name or (device.partition(":")[0] if device else None)
    if wanted is None:
        ranked = candidates(registry, cache_dir=cache_dir, environment=environment)
        if usable := [c for c in ranked if c.result.score > 0]:
            return usable[0]
        lines = [f"{c.spec.name}: {'; '.join(c.reasons)}" for c in ranked]
        raise BackendUnavailable(
            "no backend can run here",
            reasons=lines or ["no backend plugin is installed"],
            fix="install a backend, such as halogen-cpu-reference",
        )
    plugin, spec = _named(registry, wanted)
    context = ProbeContext(device=device)
    result = probe(plugin, spec.name, context, cache_dir=cache_dir, environment=environment)
    chosen = Candidate(plugin=plugin, spec=spec, result=result)
    if result.score <= 0:
        raise BackendUnavailable(
            f"backend `{spec.name}` cannot run here",
            reasons=chosen.reasons,
            fix="see `halogen doctor`; it is never replaced by another device",
        )
    return chosen


def create_backend(candidate: Candidate, options: BackendOptions) -> Backend[Any]:
    """Open the backend through its factory; anything but our own errors is wrapped."""
    module, _, attribute = candidate.spec.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
        backend: Backend[Any] = factory(options)
    except HalogenError:
        raise
    except Exception as exc:
        raise BackendUnavailable(
            f"backend `{candidate.spec.name}` could not be opened",
            reasons=[f"{type(exc).__name__}: {exc}"],
            fix=f"reinstall {candidate.plugin.distribution}, or see `halogen doctor`",
        ) from exc
    return backend


def _offers(registry: PluginRegistry) -> list[tuple[Plugin, BackendSpec]]:
    return [
        (plugin, spec)
        for plugin in registry.plugins
        if plugin.status is PluginStatus.OK
        for spec in plugin.backends
    ]


def _rank(candidate: Candidate) -> tuple[bool, int, int]:
    return candidate.result.score > 0, candidate.spec.priority, candidate.result.score


def _named(registry: PluginRegistry, name: str) -> tuple[Plugin, BackendSpec]:
    offers = _offers(registry)
    for plugin, spec in offers:
        if name == spec.name or name in spec.aliases:
            return plugin, spec
    for plugin in registry.plugins:
        claimed = plugin.manifest.name if plugin.manifest else plugin.name
        if name in (plugin.name, claimed):
            raise BackendUnavailable(
                f"plugin `{plugin.name}` ({plugin.distribution} {plugin.version})"
                f" is {plugin.status}",
                reasons=[plugin.reason],
                fix="`halogen plugins list` shows every plugin and its state",
            )
    names = sorted(spec.name for _, spec in offers)
    raise not_installed(name, names, [alias for _, spec in offers for alias in spec.aliases])
