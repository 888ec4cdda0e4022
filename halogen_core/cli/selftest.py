"""`halogen selftest`: is the backend's arithmetic right here, and is all that it needs compiled?"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from halogen_core.cli.selftest_record import keep_record
from halogen_core.cli.settings import SettingsCommand, with_settings
from halogen_core.config import Config, environment
from halogen_core.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from halogen_core.cli.selftest_checks import Outcome
    from halogen_core.engine.engine import Engine
    from halogen_core.spi import Backend


@click.command("selftest", cls=SettingsCommand)
@click.option("--warmup-kernels", is_flag=True, help="compile all that --model needs, and count")
@click.option("--ahead", is_flag=True, help="compile for a device that is not here")
@click.option("--tune", is_flag=True, help="measure launch shapes for --model and keep the best")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@with_settings("model", "engine", "cache", "paths", leave_out=("served_model_name", "max_queue"))
def command(
    config: Config, *, warmup_kernels: bool, ahead: bool, tune: bool, as_json: bool
) -> None:
    """Check a backend's numbers on this machine; exit code 1 when one is wrong.

    With --warmup-kernels it also runs every shape of step that the model can meet, so that later
    starts compile nothing; with --ahead it does so for a device that is not here.
    """
    from halogen_core.plugins import PluginRegistry

    if ahead:
        if tune:
            raise _contradiction("--ahead", "--tune")
        warmup_kernels = True
    registry = PluginRegistry.discover(_plugin_options(config))
    report: dict[str, Any] = {"versions": versions()}
    if not ahead:
        report |= _numbers(config, registry, as_json)
        keep_record(config.paths.cache_dir, report)
    if warmup_kernels or tune:
        with _engine(config, registry, ahead=ahead) as engine:
            if warmup_kernels:
                report["warmup"] = _told(warm_up(engine, config), as_json)
            if tune:
                report["tuned"] = _told(_tune(engine, config), as_json)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    sys.exit(int(not report.get("passed", True)))


def versions() -> dict[str, str]:
    """What results depend on."""
    import platform

    import importlib_metadata

    found = {"python": platform.python_version()}
    for name in ("halogen-core", "torch", "triton", "numpy"):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            found[name] = importlib_metadata.version(name)
    return found


# -- numbers


def _numbers(config: Config, registry: Any, as_json: bool) -> dict[str, Any]:
    from halogen_core.cli.selftest_checks import run_checks

    began = time.perf_counter()
    backend = _open(config, registry)
    own = backend.capabilities()
    if not as_json:
        click.echo(f"{own.name} on {own.device}")
    outcomes: list[Outcome] = []
    with contextlib.closing(backend):
        for outcome in run_checks(backend):
            outcomes.append(outcome)
            if not as_json:
                _show(outcome)
    passed = all(outcome.passed for outcome in outcomes)
    seconds = time.perf_counter() - began
    if not as_json:
        good = sum(outcome.passed for outcome in outcomes)
        click.echo(f"{good} of {len(outcomes)} checks passed in {seconds:.1f} s")
    return {
        "backend": own.name,
        "device": own.device,
        "checks": [attrs.asdict(outcome) for outcome in outcomes],
        "passed": passed,
        "seconds": seconds,
    }


def _show(outcome: Outcome) -> None:
    colour = {"ok": "green", "refused": "blue"}.get(outcome.verdict, "red")
    verdict = click.style(f"{outcome.verdict:>8}", fg=colour)
    error = "" if outcome.error is None else f"{outcome.error:9.1e} of {outcome.allowed:.0e}"
    click.echo(f"{verdict}  {outcome.name:38} {error}{outcome.note}")


# -- kernels


def warm_up(engine: Engine, config: Config) -> dict[str, Any]:
    """Run every kind of step once and say what was compiled for it."""
    from halogen_core.spi import CompilesKernels

    backend = engine.runner.backend
    own = backend.capabilities()
    if not isinstance(backend, CompilesKernels):
        text = f"nothing to compile: `{own.name}` runs kernels that were built with it"
        return {"compiled": 0, "text": text}
    began = time.perf_counter()
    steps = _rehearse(engine, config)
    seconds, counts = time.perf_counter() - began, backend.kernel_counts()
    text = (
        f"{steps} kinds of step on {own.device} in {seconds:.1f} s: {counts.compiled} kernels"
        f" compiled in {counts.seconds:.1f} s, {counts.loaded} from the cache, {counts.rebuilt}"
        f" damaged entries rebuilt; {engine.runner.captured_steps} captured steps;"
        f" cache {counts.cache or 'nowhere'}"
    )
    return {"steps": steps, "seconds": seconds, **attrs.asdict(counts), "text": text}


def _rehearse(engine: Engine, config: Config) -> int:
    from halogen_core.engine.rehearsal import rehearse, step_kinds

    runner = engine.runner
    room = runner.kv.num_blocks * runner.kv.layout.spec.block_size
    kinds = step_kinds(
        runner.backend.limits(),
        max_batch=config.engine.max_batch,
        max_tokens=config.engine.max_batch_tokens,
        context=min(engine.info.context_length, room),
    )
    # some kinds of step are captured only once they were met a few times
    times = 3 if runner.backend.capabilities().graph_capture else 1
    for kind in kinds:
        step = rehearse(kind, runner.kv, vocab=engine.info.vocab_size)
        for _ in range(times):
            runner.step(step.batch, step.shape)
    runner.backend.synchronize()
    return len(kinds)


def _tune(engine: Engine, config: Config) -> dict[str, Any]:
    from halogen_core.spi import Tunes

    backend = engine.runner.backend
    if not isinstance(backend, Tunes):
        name = backend.capabilities().name
        return {"text": f"nothing to tune: `{name}` has no launch shapes to choose"}
    found: list[str] = []
    where = backend.tune(lambda: void(_rehearse(engine, config)), found.append)
    lines = [*found, f"{len(found)} launches beat the table; kept in {where}"]
    return {"rules": found, "path": where, "text": "\n".join(lines)}


def void(value: object) -> None:
    """Drop a value."""


def _told(result: dict[str, Any], as_json: bool) -> dict[str, Any]:
    if not as_json:
        click.echo(result["text"])
    return result


# -- opening


def _plugin_options(config: Config) -> Any:
    from halogen_core.cli.plugins import plugin_options

    return plugin_options(config)


def _open(config: Config, registry: Any, *, ahead: bool = False) -> Backend[Any]:
    from halogen_core.plugins import create_backend, install_packs, select
    from halogen_core.spi import BackendOptions

    engine = config.engine
    if ahead:
        candidate = ahead_candidate(registry, engine.backend or "")
    else:
        candidate = select(
            registry,
            engine.backend,
            device=engine.device,
            cache_dir=config.paths.cache_dir,
            environment=environment(),
        )
    options = BackendOptions(
        device=engine.device,
        threads=engine.threads,
        deterministic=engine.deterministic,
        cache_dir=str(config.paths.cache_dir),
        extra=dict(engine.backend_option),
    )
    backend = create_backend(candidate, options)
    install_packs(registry, candidate.spec.name, backend)
    return backend


def ahead_candidate(registry: Any, name: str) -> Any:
    """The backend `name` as it compiles without its device; raises `BackendUnavailable`."""
    from halogen_core.plugins import Candidate
    from halogen_core.spi import ProbeResult

    able = []
    for plugin in registry.plugins:
        for spec in plugin.backends:
            if not spec.ahead_factory:
                continue
            able.append(spec.name)
            if name in (spec.name, *spec.aliases):
                own = attrs.evolve(spec, factory=spec.ahead_factory)
                return Candidate(plugin=plugin, spec=own, result=ProbeResult(score=1))
    raise BackendUnavailable(
        f"backend `{name}` compiles nothing ahead" if name else "`--ahead` must be told for what",
        reasons=[f"these do: {', '.join(able) or 'none that is installed'}"],
        fix="name one of them with --backend",
    )


@contextlib.contextmanager
def _engine(config: Config, registry: Any, *, ahead: bool) -> Iterator[Engine]:
    """An engine for the model, in this process."""
    from halogen_core.cli.assembly import assemble
    from halogen_core.engine.building import assemble_engine
    from halogen_core.loader import open_model
    from halogen_core.models import config_of

    options = assemble(config).options
    checkpoint = open_model(Path(options.model_path))
    backend = _open(config, registry, ahead=ahead)
    try:
        engine = assemble_engine(options, backend, checkpoint, config_of(checkpoint))
    except BaseException:
        backend.close()
        raise
    try:
        yield engine
    finally:
        engine.close()


def _contradiction(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"`{one}` and `{other}` contradict each other", code="HRT-1003", fix="remove one of the two"
    )
