"""The small record of a conformance report that is kept beside the figures: one JSON and one page.

    python benchmarks/gpu/conformance_summary.py REPORT_FOLDER OUT_FOLDER

Writes `conformance_BACKEND.json` and `.md` into OUT_FOLDER and prints every case that is not good
with all it measured, its output and traceback.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from halogen_conformance.folder import objections, read_report

SILENT = {"PASS", "FILTERED"}
KEPT = (
    *("level_asked", "level_certified", "complete", "shortcomings", "troubles", "declared_gaps"),
    *("waivers", "counts", "placement", "worst", "seconds", "jobs", "resumed", "began", "versions"),
)


def machine() -> dict[str, str]:
    """What the report does not know: the device's name, its driver, Triton."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        name, driver = told.splitlines()[0].split(", ")
        import torch
        import triton
    except (OSError, subprocess.CalledProcessError, ImportError) as exc:
        return {"device": f"unknown: {exc}"}
    return {
        "device": name,
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def command(report: dict) -> str:
    """As it was given, less the folder of the report."""
    words = report["command"][1:]
    at = words.index("--out") if "--out" in words else len(words)
    return " ".join(["halogen", *words[:at], *words[at + 2 :]])


def summary(report: dict, folder: Path) -> dict:
    """What is worth keeping: versions, counts, gaps, cases neither passed nor filtered."""
    filtered = Counter(
        r["reason"].split(": ")[0][:60] for r in report["results"] if r["status"] == "FILTERED"
    )
    return {
        "backend": report["backend"],
        "plugin": {k: report["plugin"][k] for k in ("distribution", "version")},
        "suite": report["suite"],
        "machine": machine(),
        "command": command(report),
        **{key: report[key] for key in KEPT if key in report},
        "objections": objections(folder),
        "filtered_by": dict(filtered.most_common()),
        "facts": {r["id"]: r["facts"] for r in report["results"] if r["facts"]},
        "not_passed": [
            {"id": r["id"], "status": r["status"], "reason": r["reason"][:400]}
            for r in report["results"]
            if r["status"] not in SILENT
        ],
    }


def page(kept: dict) -> str:
    """The same for people."""
    level = (
        f"L{kept['level_certified']} certified" if kept["level_certified"] >= 0 else "not certified"
    )
    machine = ", ".join(f"{k} {v}" for k, v in kept["machine"].items())
    versions, counts = kept["versions"], kept["counts"]
    used = [s for s in counts["L0"] if any(row[s] for row in counts.values())]
    lines = [
        f"# Conformance of `{kept['backend']}`: {level} (asked for L{kept['level_asked']})",
        "",
        f"{machine}; torch {versions['torch']}, Python {versions['python']};",
        f"suite {kept['suite']['version']}; {kept['began']}, {kept['seconds']:.0f} s, "
        f"{kept['jobs']} jobs, {kept['resumed']} results of an earlier start.",
        "",
        f"    {kept['command']}",
        "",
        "| level | " + " | ".join(used) + " |",
        "|---" * (len(used) + 1) + "|",
    ]
    for name, row in counts.items():
        lines.append(f"| {name} | " + " | ".join(str(row[s]) for s in used) + " |")
    lines += ["", "Neither passed nor filtered by a capability:", ""]
    lines += [f"- `{c['id']}` {c['status']}: {c['reason'][:200]}" for c in kept["not_passed"]]
    lines += ["", "Objections of `halogen conform verify`:", ""]
    lines += [f"- {line}" for line in kept["objections"] or ["none"]]
    return "\n".join(lines) + "\n"


def tell(report: dict) -> None:
    """Every case that is not good, in full, and what took long."""
    results = report["results"]
    for result in results:
        if result["status"] in SILENT | {"UNSUPPORTED", "NOT_RUN"}:
            continue
        print(f"=== {result['id']} {result['status']} after {result['seconds']:.1f} s")
        print(result["reason"])
        for m in result["measurements"]:
            print("  {what}: error {error:.4g}, allowed {allowed:.4g}, {reference:.4g}".format(**m))
        print(result["output"])
    slowest = sorted(results, key=lambda r: -r["seconds"])[:25]
    print("slowest:", ", ".join(f"{r['id']} {r['seconds']:.1f} s" for r in slowest))
    missing = Counter(r["id"].rpartition("/")[0] for r in results if r["status"] == "NOT_RUN")
    print("not run:", dict(missing))


if __name__ == "__main__":
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = read_report(source)
    tell(found)
    kept = summary(found, source)
    (out / f"conformance_{kept['backend']}.json").write_text(json.dumps(kept, indent=1) + "\n")
    (out / f"conformance_{kept['backend']}.md").write_text(page(kept))
