"""What the last passed selftest of each backend ran under, so that doctor can ask for a new one."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halogen_core.spi import Finding, Severity

log = logging.getLogger(__name__)

FOLDER = "selftest"


def fingerprint(versions: Mapping[str, str], device: str) -> dict[str, str]:
    """What results depend on: versions, the kernel (drivers come with it) and the device."""
    return {**versions, "kernel": platform.release(), "device": device}


def keep_record(cache_dir: Path, report: Mapping[str, Any]) -> None:
    """Remember a selftest that passed; one that failed forgets the last."""
    path = cache_dir / FOLDER / f"{report['backend']}.json"
    if not report["passed"]:
        path.unlink(missing_ok=True)
        return
    told = fingerprint(report["versions"], report["device"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        log.warning("doctor will not know of this selftest: `%s`: %s", path, exc.strerror)


def record_findings(cache_dir: Path, versions: Mapping[str, str]) -> Iterator[Finding]:
    """A warning for each backend whose selftest ran under something else than what is here now."""
    for path in sorted((cache_dir / FOLDER).glob("*.json")):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            now = fingerprint(versions, before["device"])
            changed = [f"{k} {before.get(k)} → {now[k]}" for k in now if before.get(k) != now[k]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            changed = ["its record cannot be read"]
        if changed:
            yield Finding(
                code="core.selftest",
                severity=Severity.WARNING,
                text=f"`{path.stem}` passed its selftest before a change: {', '.join(changed)}",
                fix=f"halogen selftest --backend {path.stem}",
            )
