"""One whole run: which cases, in which processes, and how each result is accounted for."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from halogen_conformance.case import Result, Status
from halogen_conformance.catalogue import suite_cases
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


def certify(request: Request, progress: Callable[[Result], None] = lambda _: None) -> Outcome:
    """Run the suite; raises `PluginError` (HRT-6001) for a backend that is not installed."""
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
    told, results = Told(), []

    def account(result: Result) -> None:
        results.append(accounted(result, told.extras.get("declared_gaps", {}), request.waivers))
        progress(results[-1])

    for level in range(request.level + 1):
        _run_level(level, request, target, plugin, told, account)
    return Outcome(
        request=request,
        target=target,
        plugin=plugin,
        plugins=plugins,
        results=results,
        told=told,
        began=began,
        seconds=time.time() - began,
    )


def _run_level(
    level: int,
    request: Request,
    target: Target,
    plugin: PluginFacts,
    told: Told,
    account: Callable[[Result], None],
) -> None:
    timeouts = {c.id: c.timeout_s for c in suite_cases() if c.level == level}
    if level > 0:
        more = told.extras.get("cases", [])
        timeouts |= {c["id"]: c["timeout_s"] for c in more if c["id"][1] == str(level)}
    ids = [i for i in timeouts if _wanted(i, request.only)]
    if plugin.status != "ok":
        reason = f"the plugin is {plugin.status}: {plugin.reason}"
        for case_id in ids:
            account(Result(id=case_id, status=Status.FAIL, reason=reason))
        return
    if ids:
        run_cases(target, ids, told, account, timeouts=timeouts, patience=request.patience)


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
