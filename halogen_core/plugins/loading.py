"""Finding and loading plugins so that a broken one is a line in a list, never a crash.

pluggy's own `load_setuptools_entrypoints` stops at the first import that fails and one raising
implementation loses all results of a call, so loading and calling are done here, one by one.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable, Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any

import attrs
import importlib_metadata
import pluggy

from halogen_core.errors import HalogenError, PluginError
from halogen_core.plugins.manifest import Manifest, check_versions, find_manifest, read_manifest
from halogen_core.spi import ENTRY_POINT_GROUP, BackendSpec, hookspecs


class PluginStatus(StrEnum):
    """What became of an installed plugin."""

    OK = "ok"
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"


@attrs.define(kw_only=True)
class Plugin:
    """One entry point: where it comes from, its manifest and what became of it."""

    name: str
    module: str
    distribution: str
    version: str
    status: PluginStatus = PluginStatus.OK
    reason: str = ""
    trace: str = ""
    manifest: Manifest | None = None
    backends: tuple[BackendSpec, ...] = ()


@attrs.frozen(kw_only=True)
class PluginOptions:
    """Which plugins may load: `allow` None means all; `strict` lets failures through."""

    allow: frozenset[str] | None = None
    block: frozenset[str] = frozenset()
    none: bool = False
    strict: bool = False


@attrs.define(kw_only=True)
class PluginRegistry:
    """The plugins of this process and their hooks."""

    plugins: list[Plugin]
    hooks: pluggy.PluginManager

    @classmethod
    def discover(cls, options: PluginOptions | None = None) -> PluginRegistry:
        """Load every installed plugin that may load; never raises for a plugin's fault."""
        options = options or PluginOptions()
        hooks = pluggy.PluginManager(hookspecs.PROJECT)
        hooks.add_hookspecs(hookspecs)
        registry = cls(plugins=[], hooks=hooks)
        entry_points = importlib_metadata.entry_points(group=ENTRY_POINT_GROUP)
        for entry in sorted(entry_points, key=lambda e: e.name):
            dist = entry.dist
            plugin = Plugin(
                name=entry.name,
                module=entry.value,
                distribution=dist.name if dist else "?",
                version=dist.version if dist else "?",
            )
            registry.plugins.append(plugin)
            registry._load(plugin, options)
        registry._refuse_duplicates()
        return registry

    def implements(self, hook: str) -> bool:
        """Whether any plugin has this hook."""
        return bool(getattr(self.hooks.hook, hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> Iterator[tuple[Plugin, Any]]:
        """Call one hook plugin by plugin; a plugin that raises is marked broken and skipped."""
        for plugin in self.plugins:
            if plugin.status is not PluginStatus.OK:
                continue
            module = self.hooks.get_plugin(plugin.name)
            others = [p for p in self.hooks.get_plugins() if p is not module]
            caller = self.hooks.subset_hook_caller(hook, remove_plugins=others)
            try:
                results = caller(**arguments)
            except Exception as exc:
                _mark_broken(plugin, f"hook `{hook}` raised {type(exc).__name__}: {exc}")
                continue
            for result in results:
                yield plugin, result

    def collect(self, hook: str, **arguments: Any) -> list[tuple[Plugin, Any]]:
        """The records that all plugins return from a collecting hook, with who returned them."""
        found: list[tuple[Plugin, Any]] = []
        for plugin, records in self.call(hook, **arguments):
            try:
                found += [(plugin, record) for record in records]
            except Exception as exc:  # a generator raises only here
                _mark_broken(plugin, f"hook `{hook}` raised {type(exc).__name__}: {exc}")
        return found

    def _load(self, plugin: Plugin, options: PluginOptions) -> None:
        if reason := _disabled(plugin.name, options):
            plugin.status, plugin.reason = PluginStatus.DISABLED, reason
            return
        try:
            plugin.manifest = read_manifest(find_manifest(plugin.module))
            check_versions(plugin.manifest)
        except HalogenError as exc:
            plugin.status, plugin.reason = PluginStatus.INCOMPATIBLE, str(exc)
            if options.strict:
                raise
            return
        try:
            self._register(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            if self.hooks.has_plugin(plugin.name):
                self.hooks.unregister(name=plugin.name)
            _mark_broken(plugin, f"{type(exc).__name__}: {exc}")
            if options.strict:
                raise

    def _register(self, plugin: Plugin) -> None:
        module: ModuleType = importlib.import_module(plugin.module)
        self.hooks.register(module, name=plugin.name)
        try:
            self.hooks.check_pending()
        except pluggy.PluginValidationError as exc:
            raise PluginError(f"built for a newer SPI: {exc}", code="HRT-1103") from exc
        caller = self.hooks.subset_hook_caller(
            "halogen_backends",
            remove_plugins=[p for p in self.hooks.get_plugins() if p is not module],
        )
        plugin.backends = tuple(_checked_specs(spec for specs in caller() for spec in specs))

    def _refuse_duplicates(self) -> None:
        owner: dict[str, Plugin] = {}
        for plugin in self.plugins:
            for spec in plugin.backends:
                for name in (spec.name, *spec.aliases):
                    if (first := owner.setdefault(name, plugin)) is not plugin:
                        reason = (
                            f"claims backend name `{name}` of `{first.name}` ({first.distribution})"
                        )
                        _mark_broken(plugin, reason)
            if plugin.status is PluginStatus.BROKEN:
                plugin.backends = ()


def _disabled(name: str, options: PluginOptions) -> str:
    if options.none:
        return "all plugins are disabled"
    if name in options.block:
        return "blocked by --no-plugin"
    if options.allow is not None and name not in options.allow:
        return "not in the HALOGEN_PLUGINS list"
    return ""


def _checked_specs(specs: Iterable[object]) -> Iterator[BackendSpec]:
    for spec in specs:
        if not isinstance(spec, BackendSpec):
            raise PluginError(f"`halogen_backends` returned {spec!r}, not a BackendSpec")
        yield spec


def _mark_broken(plugin: Plugin, reason: str) -> None:
    plugin.status, plugin.reason = PluginStatus.BROKEN, reason
    plugin.trace = traceback.format_exc()
