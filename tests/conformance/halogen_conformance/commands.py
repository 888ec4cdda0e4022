"""What `halogen conform` does; each returns an exit status."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from halogen_conformance.bench import Bench
from halogen_conformance.case import BAD, Result
from halogen_conformance.catalogue import suite_cases
from halogen_conformance.certify import Request, certify
from halogen_conformance.execute import execute
from halogen_conformance.folder import differences, objections, read_report, write_folder
from halogen_conformance.journal import Journal
from halogen_conformance.report import badge, report_of
from halogen_conformance.target import Target, find, inspect_plugins
from halogen_conformance.waivers import read_waivers
from halogen_conformance.worker import Benches, extras_of
from halogen_core.errors import ConfigError

INTERRUPTED = 130
"""Exit status by convention: 128 and the number of SIGINT."""


def run(
    *,
    backend: str,
    level: int,
    out: Path | None,
    only: Sequence[str],
    waivers: Path | None,
    patience: float,
    device: str | None,
    threads: int | None,
    options: Sequence[str],
    jobs: int = 1,
    resume: bool = False,
) -> int:
    """Certify and report; 0 only if the level is certified and the run was whole.

    130 when it was interrupted (SIGINT, SIGTERM); the report holds what there is.
    """
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run that was cut")
    request = Request(
        backend=backend,
        level=level,
        device=device,
        threads=threads,
        options=parse_options(options),
        only=only,
        waivers=read_waivers(waivers) if waivers else (),
        patience=patience,
        jobs=jobs,
    )
    counts: Counter[str] = Counter()

    def progress(result: Result) -> None:
        counts[result.status] += 1
        if result.status in BAD:
            click.secho(f"{result.status} {result.id}: {result.reason[:300]}", fg="red")

    journal = Journal(out, resume=resume) if out is not None else None
    with _ended_like_interrupted():
        outcome = certify(request, progress, journal)
    report = report_of(outcome)
    if out is not None and journal is not None:
        write_folder(out, report)
        if not outcome.interrupted:
            journal.end()
        click.echo(f"report: {out / 'report.html'}")
    click.echo(", ".join(f"{n} {status}" for status, n in counts.items()) or "no case ran")
    click.echo(f"{badge(report)['message']} in {report['seconds']:.0f} s")
    for line in report["troubles"]:
        click.secho(f"trouble: {line}", fg="yellow")
    if outcome.interrupted:
        return INTERRUPTED
    if only:
        return int(not counts or any(counts[s] for s in BAD))
    return int(report["level_certified"] < level)


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, ends workers and writes the report as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse_options(options: Sequence[str]) -> dict[str, str]:
    """`key=value` words as a mapping."""
    out = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--backend-option is `{option}`; expected key=value")
        out[key] = value
    return out


def repro(
    *,
    case_id: str,
    backend: str,
    device: str | None,
    threads: int | None,
    options: Sequence[str],
) -> int:
    """One case in this process: for a debugger, or a look at the numbers."""
    target = Target(
        backend=backend,
        plugin=find(backend, inspect_plugins()).name,
        device=device,
        threads=threads,
        options=parse_options(options),
    )
    case = next((c for c in suite_cases() if c.id == case_id), None)
    if case is None:
        raise ConfigError(
            f"case `{case_id}` does not exist",
            code="HRT-6006",
            fix="`halogen conform list` names all cases",
        )
    click.echo(f"{case.id}\n  catches: {case.why}\n  signature: {case.signature}")
    benches = Benches(target, extras_of(target))
    made = benches.bench(case)
    result = execute(made) if isinstance(made, Bench) else made
    for m in result.measurements:
        click.echo(
            f"  {m.what}: error {m.error:.3g}, allowed {m.allowed:.3g}, "
            f"same-dtype reference {m.reference:.3g}, ratio {m.ratio:.3f}"
        )
    for name, value in result.facts.items():
        click.echo(f"  {name}: {value}")
    click.echo(f"{result.status} {result.reason}".rstrip())
    benches.close()
    return int(result.status in BAD)


def verify(folder: Path) -> int:
    """Print objections; 0: none."""
    found = objections(folder)
    for line in found:
        click.secho(line, fg="red")
    if not found:
        report = read_report(folder)
        click.echo(f"{report['backend']}: complete, {badge(report)['message']}")
    return int(bool(found))


def diff(old: Path, new: Path) -> int:
    """Print what changed; 1 when something regressed."""
    changes = differences(read_report(old), read_report(new))
    for kind, lines in changes.items():
        if lines:
            click.secho(f"{kind} ({len(lines)})", bold=True)
            for line in lines:
                click.echo(f"  {line}")
    if not any(changes.values()):
        click.echo("no difference")
    return int(bool(changes["regressions"]))


def list_cases(level: int | None, why: bool) -> None:
    """Ids, a line each."""
    for case in suite_cases():
        if level in (None, case.level):
            click.echo(f"{case.id}  {case.why}" if why else case.id)
