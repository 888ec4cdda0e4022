"""`report.html`: one file that a person can read, with no script and nothing to load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from halogen_conformance import LEVELS
from halogen_conformance.report import badge

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1d2430}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #d8dde6}
table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.2rem .6rem;border:1px solid #d8dde6;
text-align:left;vertical-align:top}th{background:#f3f5f9}.ok{background:#dff3e3}.some{background:#fff3cf}
.bad{background:#fbdcdc}.none{color:#8a93a3}code{font-size:.92em}.big{font-size:1.25rem;padding:.4rem .8rem;
border-radius:.4rem;display:inline-block}details{margin:.3rem 0}pre{white-space:pre-wrap;background:#f3f5f9;
padding:.5rem}.wide{overflow-x:auto}
"""
ORDER = (
    "PASS", "PASS (fallback)", "FAIL", "CRASH", "TIMEOUT", "XPASS", "NOT_RUN",
    "WAIVED", "XFAIL", "UNSUPPORTED", "FILTERED",
)  # fmt: skip
BAD = {"FAIL", "CRASH", "TIMEOUT", "XPASS", "NOT_RUN"}


def html(report: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        _head(report),
        _summary(report),
        _failures(report),
        _matrix(report),
        _fallbacks(report),
        _worst(report),
        _facts(report),
        _promises(report),
        _plugins(report),
        _machine(report),
    ]
    title = escape(f"{report['backend']}: halogen conformance")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _head(report: dict[str, Any]) -> str:
    level, asked = report["level_certified"], report["level_asked"]
    kind = "ok" if level == asked else "bad" if level < 0 else "some"
    text = badge(report)["message"]
    note = "" if report["complete"] else "<p><b>A selection of cases: certifies nothing.</b></p>"
    return (
        f"<h1>{escape(report['backend'])}</h1><p class='big {kind}'>{escape(text)}"
        f" (asked for L{asked})</p>{note}<p>{escape(report['plugin']['distribution'])} "
        f"{escape(report['plugin']['version'])}, suite {report['suite']['version']}, "
        f"{report['began']}, {_course(report)}</p>"
    )


def _course(report: dict[str, Any]) -> str:
    """How the run went: time, company, starts."""
    text = f"{report['seconds']:.0f} s"
    if (jobs := report.get("jobs", 1)) > 1:
        text += f", {jobs} jobs"
    if resumed := report.get("resumed", 0):
        text += f", {resumed} results of an earlier start"
    return text


def _summary(report: dict[str, Any]) -> str:
    used = [s for s in ORDER if any(row.get(s) for row in report["counts"].values())]
    rows = [
        [f"{level} {LEVELS[int(level[1])]}", *(str(row.get(s, 0) or "") for s in used)]
        for level, row in report["counts"].items()
    ]
    return "<h2>Results by level</h2>" + table(["level", *used], rows)


def _failures(report: dict[str, Any]) -> str:
    bad = [r for r in report["results"] if r["status"] in BAD]
    if not bad:
        return ""
    items = "".join(
        f"<details><summary><code>{escape(r['id'])}</code> {r['status']}: "
        f"{escape(r['reason'][:200])}</summary><pre>{escape(r['reason'])}\n\n"
        f"{escape(r.get('output', ''))}\nhalogen conform repro --backend "
        f"{escape(report['backend'])} {escape(r['id'])}</pre></details>"
        for r in bad[:300]
    )
    return f"<h2>What failed ({len(bad)})</h2>{items}"


def _matrix(report: dict[str, Any]) -> str:
    matrix = report["matrix"]
    columns = sorted({c for row in matrix.values() for c in row})
    rows = [
        f"<tr><th>{escape(op)}</th>" + "".join(_cell(row.get(c)) for c in columns) + "</tr>"
        for op, row in matrix.items()
    ]
    head = "".join(f"<th>{escape(c)}</th>" for c in ("op", *columns))
    return (
        "<h2>Ops by dtype and format</h2><p>Cases passed of cases; f: by fallback; "
        "u: unsupported; –: filtered by a capability.</p>"
        f"<div class='wide'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
    )


def _cell(cell: dict[str, int] | None) -> str:
    if not cell:
        return "<td></td>"
    total, passed = sum(cell.values()), cell.get("PASS", 0) + cell.get("PASS (fallback)", 0)
    if any(cell.get(s) for s in BAD):
        kind = "bad"
    elif passed == 0:
        kind = "none"
    else:
        kind = "ok" if cell.get("PASS") else "some"
    counted = total - cell.get("FILTERED", 0)
    marks = "f" if cell.get("PASS (fallback)") else ""
    marks += "u" if cell.get("UNSUPPORTED") else ""
    text = f"{passed}/{counted} {marks}".rstrip() if counted else "–"
    title = escape(", ".join(f"{k}: {v}" for k, v in cell.items()), quote=True)
    return f"<td class='{kind}' title='{title}'>{text}</td>"


def _fallbacks(report: dict[str, Any]) -> str:
    rows = []
    for opened in report["opened"][:1]:
        rows = [
            [p["op"], p["level"], p["implementation"], "; ".join(p["reasons"])]
            for p in opened["placement"]
        ]
    if not rows:
        return ""
    return "<h2>What runs where</h2>" + table(["op", "level", "implementation", "why"], rows)


def _worst(report: dict[str, Any]) -> str:
    rows = [
        [topic, f"{entry['ratio']:.3f}", entry["id"]]
        for topic, entry in sorted(report["worst"].items(), key=lambda kv: -kv[1]["ratio"])
    ]
    return "<h2>Largest share of the tolerance used</h2>" + table(
        ["topic", "error / allowed", "case"], rows
    )


def _facts(report: dict[str, Any]) -> str:
    rows = [
        [r["id"], name, f"{value:.4g}" if isinstance(value, float) else str(value)]
        for r in report["results"]
        for name, value in r["facts"].items()
    ]
    return "<h2>Measured beside</h2>" + table(["case", "what", "value"], rows) if rows else ""


def _promises(report: dict[str, Any]) -> str:
    rows = [["waiver", w["id"], w["reason"], w["link"], w["expires"]] for w in report["waivers"]]
    rows += [["declared gap", k, v, "", ""] for k, v in report["declared_gaps"].items()]
    rows += [["trouble", "", t, "", ""] for t in report["troubles"]]
    if not rows:
        return ""
    return "<h2>Waivers, declared gaps, troubles</h2>" + table(
        ["kind", "case", "reason", "link", "until"], rows
    )


def _plugins(report: dict[str, Any]) -> str:
    rows = [
        [p["name"], f"{p['distribution']} {p['version']}", p["status"], p["reason"], p["printed"]]
        for p in report["plugins"]
    ]
    return "<h2>Plugins installed beside</h2>" + table(
        ["plugin", "distribution", "status", "why", "printed"], rows
    )


def _machine(report: dict[str, Any]) -> str:
    rows = [[k, str(v)] for k, v in report["versions"].items()]
    rows.append(["must-pass lists (sha256)", report["suite"]["mustpass_sha256"]])
    rows.append(["command", " ".join(report["command"])])
    for opened in report["opened"][:1]:
        rows += [[k, str(v)] for k, v in opened["capabilities"].items()]
    return "<h2>Versions and claims</h2>" + table(["what", "value"], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; everything is escaped."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows
    )
    return f"<div class='wide'><table><tr>{top}</tr>{body}</table></div>"
