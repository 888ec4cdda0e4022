"""A report folder: writing it, proving it complete, comparing two."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from halogen_conformance import SUITE_VERSION
from halogen_conformance.case import Status
from halogen_conformance.catalogue import must_pass, must_pass_digest
from halogen_conformance.html import html
from halogen_conformance.junit import junit
from halogen_conformance.report import badge, write_json
from halogen_conformance.verdict import certified_level
from halogen_core.errors import ConfigError

FILES = ("report.json", "report.html", "junit.xml", "badge.json")


def write_folder(folder: Path, report: dict[str, Any]) -> None:
    """All four files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    write_json(folder / "badge.json", badge(report))
    (folder / "report.html").write_text(html(report), encoding="utf-8")
    (folder / "junit.xml").write_text(junit(report), encoding="utf-8")


def read_report(folder: Path) -> dict[str, Any]:
    """`report.json` of a folder; raises `ConfigError` (HRT-6005) when it is not one."""
    path = folder / "report.json" if folder.is_dir() else folder
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = json.loads(
            files("halogen_conformance").joinpath("report.schema.json").read_text(encoding="utf-8")
        )
        jsonschema.validate(report, schema)
    except (OSError, ValueError) as exc:
        raise _unreadable(path, str(exc)) from exc
    except jsonschema.ValidationError as exc:
        raise _unreadable(path, f"{exc.json_path}: {exc.message}") from exc
    return report


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"`{path}` is not a conformance report: {why[:300]}",
        code="HRT-6005",
        fix="point at the folder that `halogen conform --out` wrote",
    )


def objections(folder: Path, today: datetime.date | None = None) -> list[str]:
    """Why the folder proves nothing, a line each; empty: the claimed level is proved."""
    report = read_report(folder)
    return [
        *(f"`{name}` is missing" for name in FILES if not (folder / name).is_file()),
        *_against_the_lists(report),
        *_against_itself(report),
        *_against_the_calendar(report, today or datetime.date.today()),
    ]


def _against_the_lists(report: dict[str, Any]) -> Iterator[str]:
    suite = report["suite"]
    if suite["version"] != SUITE_VERSION or suite["mustpass_sha256"] != must_pass_digest():
        yield (
            f"made by suite {suite['version']} with lists {suite['mustpass_sha256'][:12]}, "
            f"this is {SUITE_VERSION} with {must_pass_digest()[:12]}"
        )
    if not report["complete"]:
        yield "the run was of a selection of cases"
    ids = {r["id"] for r in report["results"]}
    for level in range(report["level_asked"] + 1):
        missing = sorted(set(must_pass(level)) - ids)
        if missing:
            yield f"L{level}: {len(missing)} cases were left out, the first is {missing[0]}"


def _against_itself(report: dict[str, Any]) -> Iterator[str]:
    results = report["results"]
    statuses = {r["id"]: Status(r["status"]) for r in results}
    if len(statuses) != len(results):
        yield "a case is reported twice"
    counted = sum(n for row in report["counts"].values() for n in row.values())
    if counted != len(results):
        yield f"counts add up to {counted}, there are {len(results)} results"
    level = min(
        certified_level(statuses, {r["id"]: r["reason"] for r in results}), report["level_asked"]
    )
    if level != report["level_certified"]:
        yield f"the results certify L{level}, the report claims L{report['level_certified']}"
    for result in results:
        bad = [m for m in result["measurements"] if not m["error"] <= m["allowed"]]
        if result["status"] == "PASS" and bad:
            yield f"{result['id']} passes with error {bad[0]['error']} > {bad[0]['allowed']}"


def _against_the_calendar(report: dict[str, Any], today: datetime.date) -> Iterator[str]:
    for waiver in report["waivers"]:
        if datetime.date.fromisoformat(waiver["expires"]) < today:
            yield f"the waiver for {waiver['id']} expired on {waiver['expires']}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    """What changed between two reports: regressions, repairs, other changes, numbers, cases."""
    before = {r["id"]: r for r in old["results"]}
    after = {r["id"]: r for r in new["results"]}
    out: dict[str, list[str]] = {"regressions": [], "repairs": [], "other": [], "worse": []}
    for case_id in sorted(before.keys() & after.keys()):
        was, now = before[case_id]["status"], after[case_id]["status"]
        if was != now:
            kind = "other"
            if was == "PASS" or now in ("FAIL", "CRASH", "TIMEOUT", "XPASS", "NOT_RUN"):
                kind = "regressions"
            elif now == "PASS":
                kind = "repairs"
            out[kind].append(f"{case_id}: {was} -> {now} {after[case_id]['reason'][:120]}".rstrip())
        elif (more := _worse(before[case_id], after[case_id])) is not None:
            out["worse"].append(f"{case_id}: {more}")
    out["only in the old"] = sorted(before.keys() - after.keys())
    out["only in the new"] = sorted(after.keys() - before.keys())
    return out


def _worse(was: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Whether a passing case uses far more of its tolerance than before."""
    old = max((m["ratio"] for m in was["measurements"]), default=0.0)
    new = max((m["ratio"] for m in now["measurements"]), default=0.0)
    return f"{old:.3f} -> {new:.3f} of the tolerance" if new > 0.2 and new > 1.5 * old else None
