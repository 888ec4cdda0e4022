"""The process that runs cases: `python -m halogen_conformance.worker ORDERS ANSWERS TARGET`.

Ids come one at a time, a line each, on file descriptor ORDERS until it is closed. One line of JSON
when a case starts and one when it ends, so that the parent knows which case was running when this
process dies or hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

import attrs

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case, Opening, Result, Status
from halogen_conformance.catalogue import all_cases, suite_cases
from halogen_conformance.execute import execute
from halogen_conformance.target import Target
from halogen_conformance.tolerance import Tolerances
from halogen_core.spi import Backend, ConfigError, ConformanceExtras, HalogenError


class Benches:
    """Opened backends by opening; failures to open are remembered, not repeated."""

    def __init__(
        self, target: Target, extras: ConformanceExtras, out: TextIO | None = None
    ) -> None:
        self._target = target
        self._extras = extras
        self._out = out
        self._open: dict[Opening, Backend[Any] | HalogenError | Exception] = {}

    def bench(self, case: Case) -> Bench | Result:
        """A fresh bench for `case`, or how it ends without one."""
        if not case.device:
            return self._bench(None, case)
        backend = self._backend(case.opening)
        if isinstance(backend, Exception):
            return _could_not_open(case, backend)
        bench = self._bench(backend, case)
        if case.opening.dtype not in (None, bench.dtype):
            reason = f"compute_dtypes:{case.opening.dtype}"
            return Result(id=case.id, status=Status.FILTERED, reason=reason)
        return bench

    def close(self) -> None:
        """Close all; may raise what the backend raises."""
        for backend in self._open.values():
            if not isinstance(backend, Exception):
                backend.close()

    def _bench(self, backend: Any, case: Case) -> Bench:
        claims = backend.capabilities() if backend is not None else None
        return Bench(
            backend=backend,
            capabilities=claims,  # type: ignore[arg-type]
            tolerances=Tolerances(tightened=self._extras.tolerances),
            case=case,
            target=self._target,
            reopen=lambda: self._target.open(case.opening),
        )

    def _backend(self, opening: Opening) -> Backend[Any] | Exception:
        if opening not in self._open:
            try:
                backend = self._open[opening] = self._target.open(opening)
                if self._out:
                    _say(self._out, {"opened": portrait(backend)})
            except Exception as exc:
                self._open[opening] = exc
        found: Any = self._open[opening]
        return found


def _could_not_open(case: Case, error: Exception) -> Result:
    asked = case.opening.dtype
    if asked is not None and isinstance(error, ConfigError):
        # another dtype is a wish, not a promise
        return Result(id=case.id, status=Status.FILTERED, reason=f"compute_dtypes:{asked}: {error}")
    text = f"the backend cannot be opened: {error}"
    return Result(id=case.id, status=Status.FAIL, reason=text)


def extras_of(target: Target) -> ConformanceExtras:
    """What the plugin adds by `halogen_conformance`, merged."""
    found = [record for _, record in target.registry().collect("halogen_conformance")]
    return ConformanceExtras(
        cases=[c for e in found for c in e.cases],
        declared_gaps={k: v for e in found for k, v in e.declared_gaps.items()},
        tolerances={k: v for e in found for k, v in e.tolerances.items()},
    )


def run(orders: Iterable[str], out: TextIO, target: Target) -> None:
    """Run cases as they are ordered, each announced and answered on `out`."""
    extras = extras_of(target)
    cases = {case.id: case for case in all_cases(extras.cases)}
    benches = Benches(target, extras, out)
    _say(out, {"extras": _extras_message(extras, cases)})
    for case_id in map(str.strip, orders):
        _say(out, {"start": case_id})
        case = cases[case_id]
        made = benches.bench(case)
        result = execute(made) if isinstance(made, Bench) else made
        _say(out, {"result": attrs.asdict(result)})
    _say(out, {"start": "close"})
    try:
        benches.close()
        _say(out, {"closed": ""})
    except Exception:
        _say(out, {"closed": traceback.format_exc(limit=3)})


def portrait(backend: Backend[Any]) -> dict[str, Any]:
    """What an opened backend says of itself, for the report."""
    return {
        "capabilities": attrs.asdict(backend.capabilities()),
        "placement": [attrs.asdict(p) for p in backend.placement()],
        "memory": [attrs.asdict(tier) for tier in backend.memory()],
        "limits": attrs.asdict(backend.limits()),
    }


def _extras_message(extras: ConformanceExtras, cases: dict[str, Case]) -> dict[str, Any]:
    own = {case.id for case in suite_cases()}
    more = [c for c in cases.values() if c.id not in own]
    return {
        "cases": [
            {
                "id": c.id,
                "topic": c.topic,
                "column": c.column,
                "timeout_s": c.timeout_s,
                "alone": c.alone,
            }
            for c in more
        ],
        "declared_gaps": dict(extras.declared_gaps),
        "tolerances": dict(extras.tolerances),
    }


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    # the parent asks a case that hangs where it is
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with (
        os.fdopen(int(sys.argv[1]), encoding="utf-8") as ids,
        os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as stream,
    ):
        run(ids, stream, Target.from_json(sys.argv[3]))
