"""Findings in a line."""

from __future__ import annotations

from halogen_core.spi import Finding, Severity


def finding(code: str, severity: Severity, what: str, fix: str = "", seen: str = "") -> Finding:
    """Something to be told; `seen` is the evidence."""
    return Finding(code=code, severity=severity, text=what, fix=fix, evidence=seen)


def found(code: str, what: str) -> Finding:
    """Something that is as it should be."""
    return finding(code, Severity.OK, what)
