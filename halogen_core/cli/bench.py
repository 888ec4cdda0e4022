"""`halogen bench`: how fast the engine is here, beside what the device can do at most."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halogen_core.cli.bounds import Load, decode_bound, prefill_bound, verdict
from halogen_core.cli.profiles import Profile, find_profile, profile_of
from halogen_core.cli.selftest import versions
from halogen_core.cli.settings import SettingsCommand, with_settings
from halogen_core.config import Config
from halogen_core.errors import ConfigError

if TYPE_CHECKING:
    from halogen_core.cli.bench_runs import Work
    from halogen_core.engine.engine import Engine

KINDS = ("prefill", "decode", "mixed")
DRIFT = 0.03
Measured = tuple[Any, ...]
"""Kind of work, batch, prompt and tokens of a result."""


@click.command("bench", cls=SettingsCommand)
@click.option("--work", default="prefill,decode", show_default=True, help="; ".join(KINDS))
@click.option("--batch", default="1", show_default=True, help="sequences, like 1,4,8")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="tokens")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, help="to make")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--profile", help="for the bounds: a name or a JSON file; default: this device's")
@click.option("--baseline", type=click.Path(path_type=Path), help="fail when 3 % off this result")
@click.option("--fit-flash-threshold", is_flag=True, help="measure where flash attention pays")
@click.option("--save", is_flag=True, help="keep the fitted threshold for later starts")
@click.option("--out", type=click.Path(path_type=Path), help="write the JSON here too")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@with_settings("model", "engine", "cache", "paths", leave_out=("served_model_name",))
def command(  # noqa: PLR0913 - a command line has many flags
    config: Config,
    *,
    work: str,
    batch: str,
    prompt: int,
    tokens: int,
    runs: int,
    profile: str | None,
    baseline: Path | None,
    fit_flash_threshold: bool,
    save: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure prompts and decoding through the real engine; medians, spread and tail.

    A rate above the theoretical peak is labelled `impossible`, one above the best that was ever
    measured `speculative`.
    """
    from halogen_core.engine.building import build_engine

    works = plan_works(work, batch, prompt, tokens)
    check(works, config, save=save, fits=fit_flash_threshold, out=out)
    if profile is not None:
        find_profile(profile, config.engine.backend)
    parts = _assemble(config)
    say = (lambda text: None) if as_json else click.echo
    engine = build_engine(parts.options)
    try:
        report = about(engine)
        known = read_baseline(baseline, report) if baseline else {}
        say(f"{report['model']} on {report['device']}")
        if fit_flash_threshold:
            report["flash"] = fit_flash(engine, works[0].batch, save, say)
        else:
            report["results"] = measure_all(engine, works, runs, find(profile, engine), say)
        report["gauges"] = gauges(engine)
    finally:
        engine.close()
    _write(report, out, as_json)
    lines = drifts(report, known)
    for line in lines:
        click.secho(line, fg="red", err=True)
    sys.exit(int(bool(lines)))


def plan_works(kinds: str, batches: str, prompt: int, tokens: int) -> list[Work]:
    """Every kind with every batch size; raises `ConfigError`."""
    from halogen_core.cli.bench_runs import Work

    wanted = kinds.split(",")
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise _bad("--work", unknown[0], ", ".join(KINDS))
    sizes = batches.split(",")
    if wrong := [size for size in sizes if not size.isdigit() or int(size) < 1]:
        raise _bad("--batch", wrong[0], "whole numbers from 1, like 1,4,8")
    if "mixed" in wanted and "1" in sizes:
        raise _bad("--batch", "1", "2 or more for mixed work")
    return [
        Work(kind=kind, batch=int(size), prompt=prompt, tokens=tokens)
        for kind in wanted
        for size in sizes
    ]


def check(works: list[Work], config: Config, *, save: bool, fits: bool, out: Path | None) -> None:
    """Refuse before measuring what would be wrong or lost after it; raises `ConfigError`."""
    most = config.engine.max_batch
    if too_many := [one.batch for one in works if one.batch > most]:
        raise _bad("--batch", str(too_many[0]), f"up to --max-batch, which is {most}")
    if save and not fits:
        raise _bad("--save", "on", "only with --fit-flash-threshold, whose result it keeps")
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.open("a", encoding="utf-8").close()
        except OSError as exc:
            raise _bad("--out", str(out), f"a file that can be written ({exc})") from exc


def about(engine: Engine) -> dict[str, Any]:
    """What was measured, on what, by which command."""
    info = engine.info
    return {
        "command": shlex.join(["halogen", *sys.argv[1:]]),
        "versions": versions(),
        "machine": {"system": platform.platform(), "processor": _processor()},
        "backend": info.backend,
        "device": info.device,
        "model": info.model_id,
        "architecture": info.architecture,
        "kv_dtype": info.kv_dtype,
        "block_size": info.block_size,
    }


def gauges(engine: Engine) -> dict[str, float]:
    """What the backend tells right after the work: clocks, watts and heat, where it has sensors."""
    return dict(engine.runner.backend.counters().gauges)


def find(name: str | None, engine: Engine) -> Profile | None:
    """The profile asked for, or of this device; the host's own reading speed where it is that."""
    from halogen_core.cli.host_profile import host_profile

    info = engine.info
    if name is not None:
        return find_profile(name, info.backend)
    tier = engine.runner.backend.memory()[0]
    is_host = tier.shared_with_host and tier.bandwidth is None
    return host_profile() if is_host else profile_of(info.backend, info.device)


def measure_all(
    engine: Engine, works: list[Work], runs: int, profile: Profile | None, say: Any
) -> list[dict[str, Any]]:
    """One result per work, with its bounds."""
    from halogen_core.cli.bench_runs import measure

    results = []
    for one in works:
        result = measure(engine, one, runs).report() | bounds_of(engine, one, profile)
        result["verdict"] = verdict(result["tok_s"], result["bound_best"], result["bound_peak"])
        results.append(result)
        say(line_of(result))
    if all(one.batch == 1 for one in works):
        say("note: one stream says nothing of capacity; add --batch 1,4,8")
    return results


def bounds_of(engine: Engine, work: Work, profile: Profile | None) -> dict[str, Any]:
    """The highest rates that the profile allows: by what was best measured, and by the peak."""
    if profile is None or work.kind == "mixed":
        return {"bound_best": None, "bound_peak": None, "profile": None}
    load = load_of(engine, work, profile)
    found: dict[str, Any] = {"profile": profile.name}
    for kind, by_compute in (("best", "tuned"), ("peak", "peak")):
        bandwidth, compute = profile.bandwidth.get(kind), profile.compute.get(by_compute)
        if work.kind == "prefill":
            found[f"bound_{kind}"] = compute and prefill_bound(load, compute)
        else:
            found[f"bound_{kind}"] = bandwidth and decode_bound(load, bandwidth, compute)
    return found


def load_of(engine: Engine, work: Work, profile: Profile) -> Load:
    """Bytes and operations of the engine's model at this work's mean context."""
    from halogen_core.cli.bounds import active_weights, kv_read_bytes
    from halogen_core.loader import open_model

    decoder = engine.runner.decoder.config
    checkpoint = open_model(Path(engine.info.model_path))
    active = active_weights(checkpoint, decoder, profile.packed_bytes)
    moe = decoder.layers[0].moe
    return Load(
        weight_bytes=active.bytes,
        elements=active.elements,
        head=active.head,
        kv_bytes=kv_read_bytes(decoder, engine.info.kv_dtype, work.prompt + work.tokens // 2),
        sequences=work.batch,
        experts=None if moe is None else (moe.top_k, moe.num_experts),
    )


def line_of(result: dict[str, Any]) -> str:
    """A result for people: throughput and tail together, never one alone."""
    text = (
        f"{result['kind']:8}{result['batch']:4} × ({result['prompt']} in, {result['tokens']} out):"
        f" {result['tok_s']:9.1f} tok/s ± {100 * result['spread']:.0f} %,"
        f" TTFT p99 {result['ttft_ms']['p99']:.0f} ms"
    )
    if "itl_ms" in result:
        text += f", ITL p50 {result['itl_ms']['p50']:.1f} p99 {result['itl_ms']['p99']:.1f} ms"
    if bound := result["bound_peak"] or result["bound_best"]:
        text += f"; {100 * result['tok_s'] / bound:.0f} % of the bound {bound:.1f}"
    return f"{text}; {result['verdict']}"


def fit_flash(engine: Engine, rows: int, save: bool, say: Any) -> dict[str, Any]:
    """Measure and fit the threshold; with `save` it is the default of later starts."""
    from halogen_core.cli.flash_fit import KEY, measure_flash
    from halogen_core.spi import Adjustable

    found = measure_flash(engine, rows=rows, repeats=7, progress=say).report()
    say(f"{KEY}: {found[KEY]} (use --backend-option {KEY}={found[KEY]})")
    backend = engine.runner.backend
    if save and isinstance(backend, Adjustable):
        found["saved"] = backend.remember(KEY, str(found[KEY]))
        say(f"kept in {found['saved']}")
    return found


def read_baseline(path: Path, report: dict[str, Any]) -> dict[Measured, float]:
    """Rates of an earlier result by what was measured; raises unless it is of the same device."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        known = {_key(result): float(result["tok_s"]) for result in before["results"]}
        same = (before["device"], before["model"]) == (report["device"], report["model"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise _bad("--baseline", str(path), f"a result of `halogen bench` ({exc})") from exc
    if not same:
        raise _bad("--baseline", before["device"], f"a result of {report['device']}")
    return known


def drifts(report: dict[str, Any], known: Mapping[Measured, float]) -> list[str]:
    """Results more than 3 % off the `known` ones, a line each."""
    lines = []
    for result in report.get("results", []):
        old = known.get(_key(result))
        if old and abs(result["tok_s"] / old - 1) > DRIFT:
            change = 100 * (result["tok_s"] / old - 1)
            lines.append(f"{_key(result)}: {result['tok_s']:.1f} tok/s, {change:+.1f} %")
    return lines


def _key(result: dict[str, Any]) -> Measured:
    return tuple(result[name] for name in ("kind", "batch", "prompt", "tokens"))


def _write(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    text = json.dumps(report, indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)


def _assemble(config: Config) -> Any:
    from halogen_core.cli.assembly import assemble

    return assemble(config)


def _processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


def _bad(flag: str, value: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"`{flag}` is `{value}`; allowed: {allowed}", code="HRT-1002", fix=f"check {flag}"
    )
