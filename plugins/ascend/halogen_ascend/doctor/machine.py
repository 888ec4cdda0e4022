"""Driver and toolkit pairs, the PCIe link, the chips' health."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files

from packaging.version import InvalidVersion, Version

from halogen_ascend import npu_smi
from halogen_ascend.captured import Captured
from halogen_core.spi import Finding, Severity

_CANN = "usr/local/Ascend/ascend-toolkit/latest/version.cfg"
_DRIVER = "usr/local/Ascend/driver/version.info"
_LINK = re.compile(r"Lnk(?P<what>Cap|Sta):.*?Speed (?P<speed>[\d.]+)GT/s.*?Width x(?P<width>\d+)")


def findings(source: Captured) -> Iterator[Finding]:
    """All of this file."""
    table = source.output("npu-smi info")
    if table is not None:
        yield from _chips(table)
    yield from _pair(source, table)
    if (links := source.output("lspci -vv -d 19e5:")) is not None:
        yield from pcie_findings(links)


def _chips(table: str) -> Iterator[Finding]:
    chips = npu_smi.table(table)
    if not chips:
        yield Finding(
            code="HRT-7117",
            severity=Severity.WARNING,
            text="`npu-smi info` lists no chip",
            fix="check the driver with `dmesg | grep -i davinci`",
            evidence=table[:200],
        )
    for chip in chips:
        healthy = chip.health == "OK"
        yield Finding(
            code="HRT-7117",
            severity=Severity.OK if healthy else Severity.ERROR,
            text=f"chip {chip.index} ({chip.name}): health {chip.health}, "
            f"HBM {chip.hbm_used} of {chip.hbm_total} MB used",
            fix="" if healthy else "`npu-smi info -t health -i INDEX` names the fault",
        )


def _pair(source: Captured, table: str | None) -> Iterator[Finding]:
    cann = _first(source, _CANN, r"(?:version|installed_version)\S*=\[?(?:\S*?:)?([\w.]+)")
    driver = _first(source, _DRIVER, r"Version=([\w.]+)") or (table and npu_smi.version(table))
    if not cann and not driver:
        return
    if not cann or not driver:
        have, lacks = ("driver", "toolkit (CANN)") if driver else ("toolkit (CANN)", "driver")
        yield Finding(
            code="HRT-7111",
            severity=Severity.WARNING,
            text=f"the {have} is installed, the {lacks} is not found",
            fix="install both from one release of the vendor's table",
        )
        return
    yield pair_finding(cann, driver)


def pair_finding(cann: str, driver: str) -> Finding:
    """What is known of a toolkit with a driver."""
    text = files("halogen_ascend.doctor").joinpath("versions.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["cann"]
    row = next((r for r in rows if cann.lower().startswith(r["match"].lower())), None)
    both = f"CANN {cann} with driver {driver}"
    if row is None:
        return _said(Severity.INFO, f"{both}: not in our table", "check the vendor's release notes")
    if "bad" in row:
        return _said(Severity.ERROR, f"{both}: {row['bad']}", "install CANN 6.3.RC3 or newer")
    if _older(driver, row["driver"]):
        return _said(
            Severity.ERROR,
            f"{both}: this toolkit wants driver {row['driver']} or newer",
            f"upgrade the driver to {row['driver']}, then run `halogen doctor` again",
        )
    return _said(Severity.OK, both, "")


def pcie_findings(text: str) -> Iterator[Finding]:
    """Links that run narrower or slower than they could (a NIC sharing lanes, a bad seat)."""
    for device in re.split(r"\n(?=\S)", text):
        links = {m["what"]: m for m in _LINK.finditer(device)}
        if set(links) != {"Cap", "Sta"}:
            continue
        able, now = ((float(links[k]["speed"]), int(links[k]["width"])) for k in ("Cap", "Sta"))
        slow = now[0] < able[0] or now[1] < able[1]
        yield Finding(
            code="HRT-7114",
            severity=Severity.WARNING if slow else Severity.OK,
            text=f"PCIe {device.split(maxsplit=1)[0]}: x{now[1]} at {now[0]:g} GT/s of "
            f"x{able[1]} at {able[0]:g} GT/s",
            fix="reseat the card, or move it off lanes shared with a NIC" if slow else "",
        )


def _first(source: Captured, pattern: str, expression: str) -> str | None:
    for _, text in source.files(pattern):
        if found := re.search(expression, text):
            return found[1]
    return None


def _older(have: str, want: str) -> bool:
    try:
        return Version(have) < Version(want)
    except InvalidVersion:
        return False


def _said(severity: Severity, text: str, fix: str) -> Finding:
    return Finding(code="HRT-7111", severity=severity, text=text, fix=fix)
