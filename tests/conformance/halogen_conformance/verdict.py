"""Is a level certified? From results and the frozen must-pass lists alone."""

from __future__ import annotations

from collections.abc import Mapping

from halogen_conformance.case import Status
from halogen_conformance.catalogue import must_pass

GOOD = frozenset({Status.PASS, Status.WAIVED})
ACCEPTED = GOOD | {Status.XFAIL, Status.FILTERED, Status.UNSUPPORTED}
DTYPE_FILTER = "compute_dtypes:"


def shortcomings(
    level: int, statuses: Mapping[str, Status], reasons: Mapping[str, str]
) -> list[str]:
    """Why `level` is not certified, a line each; empty: it is."""
    out = []
    listed = must_pass(level)
    for case_id, required in listed.items():
        status = statuses.get(case_id, Status.NOT_RUN)
        allowed = GOOD | {Status.FILTERED} if required else ACCEPTED
        if status not in allowed:
            out.append(f"{case_id}: {status} {reasons.get(case_id, '')[:160]}".rstrip())
    for case_id, status in statuses.items():
        if case_id not in listed and case_id[1] == str(level) and status not in ACCEPTED:
            out.append(f"{case_id} (of the plugin): {status}")
    if level == 1 and not out:
        out += _no_dtype_at_all(statuses)
    return out


def _no_dtype_at_all(statuses: Mapping[str, Status]) -> list[str]:
    """FILTERED must not let a backend pass that runs nothing."""
    ops = {i.split("/")[1] for i in must_pass(1)}
    ran = {i.split("/")[1] for i, s in statuses.items() if i[1] == "1" and s in GOOD}
    return [f"op `{op}` passed in no dtype" for op in sorted(ops - ran)]


def certified_level(statuses: Mapping[str, Status], reasons: Mapping[str, str]) -> int:
    """The highest level certified with all below it; -1: not even L0."""
    level = -1
    while level < 5 and not shortcomings(level + 1, statuses, reasons):
        level += 1
    return level
