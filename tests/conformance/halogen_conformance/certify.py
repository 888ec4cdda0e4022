"""One whole run: which cases, in which processes, and how each result is accounted for."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from halogen_conformance.case import Result, Status
from halogen_conformance.catalogue import suite_cases
from halogen_conformance.journal import Journal
from halogen_conformance.runner import Told, run_cases
from halogen_conformance.target import INSPECT_S, PluginFacts, Target, find, inspect_plugins
from halogen_conformance.waivers import Waiver, covering

FAILED = frozenset({Status.FAIL, Status.CRASH, Status.TIMEOUT})


@attrs.frozen(kw_only=True)
class Request:
    """What the user asks of a run."""

    backend: str
    level: int = 3
    device: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    threads: int | None = None
    only: Sequence[str] = ()
    """Patterns of case ids; empty: all of the levels asked for."""
    waivers: Sequence[Waiver] = ()
    patience: float = 1.0
    """Multiplies all timeouts."""
    jobs: int = 1
    """Worker processes beside each other."""


@attrs.frozen(kw_only=True)
class Outcome:
    """Everything a report is made of."""

    request: Request
    target: Target
    plugin: PluginFacts
    plugins: Sequence[PluginFacts]
    results: Sequence[Result]
    told: Told
    began: float
    seconds: float
    resumed: int = 0
    """Results that an earlier start found."""
    interrupted: bool = False


@attrs.frozen(kw_only=True)
class Chosen:
    """A case of the suite or of the plugin that the request asks for."""

    id: str
    timeout_s: float
    alone: bool


@attrs.define(kw_only=True)
class _Run:
    request: Request
    target: Target
    plugin: PluginFacts
    journal: Journal | None
    progress: Callable[[Result], None]
    told: Told = attrs.field(factory=Told)
    results: dict[str, Result] = attrs.field(factory=dict)

    def chosen(self) -> list[Chosen]:
        """In the order of the report; the plugin's own cases are known once a worker told them."""
        own = [Chosen(id=c.id, timeout_s=c.timeout_s, alone=c.alone) for c in suite_cases()]
        own += [
            Chosen(id=c["id"], timeout_s=c["timeout_s"], alone=c["alone"])
            for c in self.told.extras.get("cases", [])
        ]
        wanted = [c for c in own if int(c.id[1]) <= self.request.level]
        wanted = [c for c in wanted if _wanted(c.id, self.request.only)]
        return sorted(wanted, key=lambda c: c.id[1])

    def all(self) -> None:
        """Run part after part, each chosen from what workers told until then."""
        while left := [c for c in self.chosen() if c.id not in self.results]:
            belongs, jobs = next(p for p in _parts(self.request.jobs) if any(map(p[0], left)))
            self._part([c for c in left if belongs(c)], jobs)

    def _part(self, part: Sequence[Chosen], jobs: int) -> None:
        if self.plugin.status != "ok":
            reason = f"the plugin is {self.plugin.status}: {self.plugin.reason}"
            for case in part:
                self._account(Result(id=case.id, status=Status.FAIL, reason=reason))
            return
        run_cases(
            self.target,
            [case.id for case in part],
            self.told,
            self._account,
            timeouts={case.id: case.timeout_s for case in part},
            patience=self.request.patience,
            jobs=jobs,
        )

    def _account(self, result: Result) -> None:
        found = accounted(result, self.told.extras.get("declared_gaps", {}), self.request.waivers)
        self.results[result.id] = found
        if self.journal:
            self.journal.add(found, self.told)
        self.progress(found)

    def in_order(self) -> list[Result]:
        """A result for every case; one that never ended is NOT_RUN."""
        return [
            self.results.get(c.id)
            or Result(id=c.id, status=Status.NOT_RUN, reason="interrupted before it ended")
            for c in self.chosen()
        ]


def certify(
    request: Request,
    progress: Callable[[Result], None] = lambda _: None,
    journal: Journal | None = None,
) -> Outcome:
    """Run the suite, or what `journal` leaves of it; Ctrl-C ends it with what there is.

    Raises `PluginError` (HRT-6001) for a backend that is not installed.
    """
    began = time.time()
    plugins = inspect_plugins(INSPECT_S * request.patience)
    plugin = find(request.backend, plugins)
    target = Target(
        backend=request.backend,
        plugin=plugin.name,
        device=request.device,
        options=dict(request.options),
        threads=request.threads,
    )
    run = _Run(request=request, target=target, plugin=plugin, journal=journal, progress=progress)
    if journal:
        run.results |= journal.begin(target, plugin, run.told)
    resumed, interrupted = sum(c.id in run.results for c in run.chosen()), False
    try:
        run.all()
    except KeyboardInterrupt:
        interrupted = True
        run.told.troubles.append(f"interrupted after {time.time() - began:.0f} s")
    return Outcome(
        request=request,
        target=target,
        plugin=plugin,
        plugins=plugins,
        results=run.in_order(),
        told=run.told,
        began=began,
        seconds=time.time() - began,
        resumed=resumed,
        interrupted=interrupted,
    )


def _parts(jobs: int) -> Iterator[tuple[Callable[[Chosen], bool], int]]:
    """Which cases run together, and in how many processes, one part after the other.

    With one job a process per level. With more, L0 first, which also tells of the plugin's own
    cases; then all that may have company; then what needs the machine, a process per level.
    """
    if jobs > 1:
        yield (lambda c: c.id[1] == "0"), 1
        yield (lambda c: not c.alone), jobs
    for level in range(6):
        yield (lambda c, level=level: int(c.id[1]) == level), 1


def _wanted(case_id: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatch.fnmatchcase(case_id, pattern) for pattern in only)


def accounted(result: Result, gaps: Mapping[str, str], waivers: Sequence[Waiver]) -> Result:
    """The result in the light of declared gaps and waivers."""
    if (gap := gaps.get(result.id)) is not None:
        if result.status in FAILED:
            reason = f"declared gap ({gap}): {result.reason}"
            return attrs.evolve(result, status=Status.XFAIL, reason=reason)
        if result.status is Status.PASS:
            reason = f"declared as a gap ({gap}), but it passes: remove the declaration"
            return attrs.evolve(result, status=Status.XPASS, reason=reason)
    if result.status in FAILED and (waiver := covering(waivers, result.id)):
        reason = f"waived until {waiver.expires} ({waiver.link}): {waiver.reason}; {result.reason}"
        return attrs.evolve(result, status=Status.WAIVED, reason=reason)
    return result
