"""`junit.xml`, for CI systems that read nothing else."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

BAD = {
    "FAIL": "failure",
    "XPASS": "failure",
    "CRASH": "error",
    "TIMEOUT": "error",
    "NOT_RUN": "error",
}


def junit(report: dict[str, Any]) -> str:
    """A suite per level; FILTERED and UNSUPPORTED are skipped with their reason, crashes errors."""
    root = ET.Element("testsuites", name="halogen-conformance")
    for level, counts in report["counts"].items():
        results = [r for r in report["results"] if r["id"].startswith(level + "/")]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=level,
            tests=str(len(results)),
            failures=str(counts["FAIL"] + counts["XPASS"]),
            errors=str(counts["CRASH"] + counts["TIMEOUT"] + counts["NOT_RUN"]),
            skipped=str(sum(counts[s] for s in ("FILTERED", "UNSUPPORTED", "WAIVED", "XFAIL"))),
        )
        for result in results:
            _case(suite, level, result)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, level: str, result: dict[str, Any]) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"{level}.{result['id'].split('/')[1]}",
        name=result["id"],
        time=f"{result['seconds']:.3f}",
    )
    status, text = result["status"], _printable(f"{result['status']}: {result['reason']}")
    if status in BAD:
        element = ET.SubElement(case, BAD[status], message=text)
        element.text = _printable(result.get("output", ""))
    elif status != "PASS":
        ET.SubElement(case, "skipped", message=text)


def _printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
