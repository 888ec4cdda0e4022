"""`report.json`: all that a run found, complete enough to be verified without running anything."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import importlib_metadata

from halogen_conformance import SUITE_VERSION
from halogen_conformance.case import Result, Status
from halogen_conformance.catalogue import must_pass_digest, suite_cases
from halogen_conformance.certify import Outcome
from halogen_conformance.verdict import certified_level, shortcomings
from halogen_core.spi import SPI_VERSION

SCHEMA = 1


def report_of(outcome: Outcome) -> dict[str, Any]:
    """The report as plain data (schema in `report.schema.json`)."""
    statuses = {r.id: r.status for r in outcome.results}
    reasons = {r.id: r.reason for r in outcome.results}
    level = certified_level(statuses, reasons)
    asked = outcome.request.level
    return {
        "schema": SCHEMA,
        "suite": {
            "version": SUITE_VERSION,
            "distribution": _version("halogen-conformance"),
            "mustpass_sha256": must_pass_digest(),
        },
        "command": sys.argv,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(outcome.began)),
        "seconds": round(outcome.seconds, 2),
        "jobs": outcome.request.jobs,
        "resumed": outcome.resumed,
        "versions": {
            "halogen-core": _version("halogen-core"),
            "spi": ".".join(map(str, SPI_VERSION)),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "numpy": _version("numpy"),
            "platform": platform.platform(),
        },
        "backend": outcome.request.backend,
        "plugin": attrs.asdict(outcome.plugin),
        "plugins": [attrs.asdict(p) for p in outcome.plugins],
        "opened": outcome.told.opened,
        "troubles": outcome.told.troubles,
        "level_asked": asked,
        "level_certified": min(level, asked),
        "complete": not outcome.request.only,
        "shortcomings": {str(n): shortcomings(n, statuses, reasons) for n in range(asked + 1)},
        "counts": _counts(outcome.results),
        "placement": dict(Counter(r.level for r in outcome.results if r.level)),
        "matrix": matrix(outcome.results),
        "worst": worst(outcome.results),
        "waivers": [
            {**attrs.asdict(w), "expires": str(w.expires)} for w in outcome.request.waivers
        ],
        "declared_gaps": outcome.told.extras.get("declared_gaps", {}),
        "tightened": outcome.told.extras.get("tolerances", {}),
        "results": [result_data(r) for r in outcome.results],
    }


def result_data(result: Result) -> dict[str, Any]:
    """One result as plain data."""
    data = attrs.asdict(result)
    data["seconds"] = round(result.seconds, 4)
    data["measurements"] = [
        {**attrs.asdict(m), "ratio": min(m.ratio, 1e9)} for m in result.measurements
    ]
    return data


def _counts(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for result in results:
        row = counts.setdefault(f"L{result.id[1]}", {s.value: 0 for s in Status})
        row[result.status.value] += 1
    return counts


def matrix(results: Sequence[Result]) -> dict[str, dict[str, dict[str, int]]]:
    """Op -> dtype or format -> status -> cases, of L1."""
    cases = {case.id: case for case in suite_cases()}
    out: dict[str, dict[str, dict[str, int]]] = {}
    for result in results:
        case = cases.get(result.id)
        if case is None or case.level != 1:
            continue
        cell = out.setdefault(case.topic, {}).setdefault(case.column, {})
        key = result.status.value
        if result.status is Status.PASS and result.level == "fallback":
            key = "PASS (fallback)"
        cell[key] = cell.get(key, 0) + 1
    return out


def worst(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Topic -> the largest share of its tolerance that any passing case used."""
    cases = {case.id: case for case in suite_cases()}
    out: dict[str, dict[str, Any]] = {}
    for result in results:
        if result.status is not Status.PASS or not result.measurements or result.id not in cases:
            continue
        topic = cases[result.id].topic
        if result.worst > out.get(topic, {"ratio": -1.0})["ratio"]:
            out[topic] = {"ratio": round(result.worst, 4), "id": result.id}
    return out


def badge(report: dict[str, Any]) -> dict[str, Any]:
    """A shields.io endpoint: level, native share, waivers."""
    level, asked = report["level_certified"], report["level_asked"]
    native = {p["op"] for o in report["opened"] for p in o["placement"] if p["level"] == "native"}
    total = {p["op"] for o in report["opened"] for p in o["placement"]}
    parts = [f"L{level}" if level >= 0 else "not certified"]
    if total:
        parts.append(f"native {len(native)}/{len(total)}")
    if waived := sum(row["WAIVED"] for row in report["counts"].values()):
        parts.append(f"{waived} waived")
    if gaps := sum(row["XFAIL"] for row in report["counts"].values()):
        parts.append(f"{gaps} declared gaps")
    colour = "brightgreen" if level == asked else "red" if level < 0 else "orange"
    return {
        "schemaVersion": 1,
        "label": f"halogen conformance {report['suite']['version']}",
        "message": ", ".join(parts),
        "color": colour,
    }


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return "not installed"
