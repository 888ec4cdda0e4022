"""L0: what a plugin is before any device is touched. Each case names its own why."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import importlib_metadata

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case, Failure
from halogen_conformance.target import PluginFacts, Target, inspect_one, inspect_plugins
from halogen_core.plugins import Plugin, PluginOptions, PluginRegistry, PluginStatus
from halogen_core.plugins.manifest import Manifest, check_versions, find_manifest, read_manifest
from halogen_core.plugins.probe import probe
from halogen_core.spi import SPI_VERSION, BackendSpec, ProbeContext, ProbeResult

QUICK_S = 2.0
"""For importing a plugin's registration module: it holds up every command."""


def cases() -> Iterator[Case]:
    """All of them; the why is the first line of each function."""
    checks: dict[str, Callable[[Bench], None]] = {
        "manifest/valid": manifest_valid,
        "manifest/names-the-backend": manifest_name,
        "manifest/spi-range": manifest_spi_range,
        "discovery/loads": loads,
        "discovery/nothing-heavy": nothing_heavy,
        "discovery/silent": silent,
        "discovery/quick": quick,
        "discovery/twice": twice,
        "discovery/can-be-blocked": can_be_blocked,
        "discovery/name-is-free": name_is_free,
        "seam/imports-only-the-spi": imports_only_spi,
        "spec/factory-exists": factory_exists,
        "probe/finds-a-device": finds_a_device,
        "probe/device-ids": device_ids,
        "probe/ignores-other-names": ignores_other_names,
        "probe/same-twice": same_twice,
    }
    for name, run in checks.items():
        why = (run.__doc__ or "").strip().splitlines()[0]
        topic = name.partition("/")[0]
        yield Case(id=f"L0/{name}", topic=topic, why=why, run=run, device=False, timeout_s=90)


def _target(bench: Bench) -> Target:
    assert bench.target is not None
    return bench.target


@cache
def _facts(plugin: str) -> PluginFacts:
    return inspect_one(plugin)


@cache
def _plugin(target_json: str) -> Plugin:
    target = Target.from_json(target_json)
    plugin = next(p for p in target.registry().plugins if p.name == target.plugin)
    if plugin.status is not PluginStatus.OK:
        raise Failure(f"the plugin is {plugin.status}: {plugin.reason}")
    return plugin


def _spec(bench: Bench) -> tuple[Plugin, BackendSpec]:
    target = _target(bench)
    plugin = _plugin(target.to_json())
    for spec in plugin.backends:
        if target.backend in (spec.name, *spec.aliases):
            return plugin, spec
    raise Failure(f"the plugin offers {[s.name for s in plugin.backends]}, not {target.backend}")


def _manifest(bench: Bench) -> Manifest:
    target = _target(bench)
    entry = next(
        e
        for e in importlib_metadata.entry_points(group="halogen.plugins")
        if e.name == target.plugin
    )
    return read_manifest(find_manifest(entry.value))


_PROBED: dict[str, ProbeResult] = {}


def _probe(bench: Bench, *, again: bool = False) -> ProbeResult:
    """In a process of its own; asked once unless `again`."""
    plugin, spec = _spec(bench)
    if again or spec.name not in _PROBED:
        context = ProbeContext(device=_target(bench).device)
        _PROBED[spec.name] = probe(plugin, spec.name, context)
    return _PROBED[spec.name]


# ---------------------------------------------------------------- manifest


def manifest_valid(bench: Bench) -> None:
    """A manifest that cannot be read keeps the core from judging the plugin without importing it"""
    check_versions(_manifest(bench))


def manifest_name(bench: Bench) -> None:
    """The manifest and the code disagree about the backend's name"""
    name, (_, spec) = _manifest(bench).name, _spec(bench)
    if name not in (spec.name, *spec.aliases):
        raise Failure(f"the manifest says `{name}`, the backend is `{spec.name}`")


def manifest_spi_range(bench: Bench) -> None:
    """A range without an upper end promises to work with every future major version"""
    from packaging.specifiers import SpecifierSet

    wanted = SpecifierSet(_manifest(bench).spi)
    if wanted.contains(f"{SPI_VERSION[0] + 1}.0"):
        raise Failure(
            f"spi range `{wanted}` admits the next major version; add `<{SPI_VERSION[0] + 1}`"
        )


# ---------------------------------------------------------------- discovery


def loads(bench: Bench) -> None:
    """Loading the plugin fails, crashes or hangs"""
    facts = _facts(_target(bench).plugin)
    if facts.status != "ok":
        raise Failure(f"the plugin is {facts.status}: {facts.reason}")


def nothing_heavy(bench: Bench) -> None:
    """Registration imports torch or a driver, and every `halogen` command pays"""
    if heavy := _facts(_target(bench).plugin).heavy:
        raise Failure(f"registration imported {', '.join(heavy)}; leave it to the factory")


def silent(bench: Bench) -> None:
    """Printing at import spoils `--json` output of commands"""
    if printed := _facts(_target(bench).plugin).printed:
        raise Failure(f"registration printed to stdout: {printed[:200]!r}")


def quick(bench: Bench) -> None:
    """Slow registration holds up every command"""
    seconds = _facts(_target(bench).plugin).seconds
    bench.facts["registration_s"] = round(seconds, 3)
    if seconds > QUICK_S:
        raise Failure(f"registration took {seconds:.1f} s; at most {QUICK_S:.0f} s")


def twice(bench: Bench) -> None:
    """Loading again in the same process gives something else"""
    first, second = _spec(bench)[0].backends, _target(bench).registry()
    again = next(p for p in second.plugins if p.name == _target(bench).plugin)
    if again.backends != first:
        raise Failure(f"first {first}, then {again.backends}")


def can_be_blocked(bench: Bench) -> None:
    """A blocked plugin is loaded all the same"""
    name = _target(bench).plugin
    registry = PluginRegistry.discover(
        PluginOptions(allow=frozenset({name}), block=frozenset({name}))
    )
    plugin = next(p for p in registry.plugins if p.name == name)
    if plugin.status is not PluginStatus.DISABLED or plugin.backends:
        raise Failure(f"blocked, yet the plugin is {plugin.status} and offers {plugin.backends}")


def name_is_free(bench: Bench) -> None:
    """Another installed plugin claims the same name or alias"""
    facts = {f.name: f for f in inspect_plugins()}[_target(bench).plugin]
    if facts.status != "ok":
        raise Failure(facts.reason)


def imports_only_spi(bench: Bench) -> None:
    """Imports beside `halogen_core.spi` break with any release of the core"""
    package = _spec(bench)[0].module.partition(".")[0]
    found = importlib.util.find_spec(package)
    folders = (found.submodule_search_locations if found else None) or []
    bad = sorted(
        f"{path.name}: {module}"
        for folder in folders
        for path in Path(folder).rglob("*.py")
        for module in _core_imports(path)
    )
    bench.facts["core_imports_beside_spi"] = len(bad)
    if bad:
        raise Failure(f"imports beside the SPI: {', '.join(bad[:10])}")


def _core_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
            if node.module == "halogen_core":
                names = [f"halogen_core.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "halogen_core" and parts[1:2] != ["spi"]:
                yield name


def factory_exists(bench: Bench) -> None:
    """The factory string leads nowhere, which shows only when someone serves"""
    _, spec = _spec(bench)
    module, _, attribute = spec.factory.partition(":")
    if not attribute.isidentifier() or importlib.util.find_spec(module) is None:
        raise Failure(f"factory `{spec.factory}` is not `package.module:function` of this package")


# ---------------------------------------------------------------- probe


def finds_a_device(bench: Bench) -> None:
    """The device is absent: nothing can be certified"""
    result = _probe(bench)
    if result.score <= 0:
        reasons = "; ".join(r.text for r in result.reasons) or "no reason given"
        raise Failure(f"the probe finds no device: {reasons}")
    if not result.devices:
        raise Failure("the probe has a score but lists no device")


def device_ids(bench: Bench) -> None:
    """Device ids that a user cannot pass to --device"""
    _, spec = _spec(bench)
    for device in _probe(bench).devices:
        if not device.id.startswith(f"{spec.name}:"):
            raise Failure(f"device id `{device.id}` is not `{spec.name}:...`")


def ignores_other_names(bench: Bench) -> None:
    """Answering for somebody else's backend makes that one unusable"""
    plugin, _ = _spec(bench)
    result = probe(plugin, "somebody_elses_backend", ProbeContext())
    if result.score > 0 or result.devices:
        raise Failure("the probe answered for a backend that the plugin does not offer")


def same_twice(bench: Bench) -> None:
    """A probe whose answer changes from call to call"""
    first, second = _probe(bench), _probe(bench, again=True)
    if (first.score, [d.id for d in first.devices]) != (
        second.score,
        [d.id for d in second.devices],
    ):
        raise Failure(f"first {first}, then {second}")
