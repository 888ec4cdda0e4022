"""Reading what `npu-smi` prints. Layouts as of npu-smi 23 and 24, from captured text."""

from __future__ import annotations

import re

import attrs

from halogen_ascend.heat import Reading

_TOP = re.compile(
    r"^\|\s*(?P<index>\d+)\s+(?P<name>\S+)\s*\|\s*(?P<health>\w+)\s*\|\s*(?P<power>[\d.-]+)\s+"
    r"(?P<temperature>\d+)\s"
)
_BOTTOM = re.compile(
    r"^\|\s*\d+(\s+\d+)?\s*\|\s*(?P<bus>[\dA-Fa-f]+:[\dA-Fa-f]+:[\dA-Fa-f]+\.\d)\s*\|\s*"
    r"(?P<busy>\d+)\s+\d+\s*/\s*\d+\s+(?P<used>\d+)\s*/\s*(?P<total>\d+)"
)
_FIELD = re.compile(r"^\s*(?P<key>[^:|]+?)\s*:\s*(?P<value>.+?)\s*$")


@attrs.frozen(kw_only=True)
class Npu:
    """One chip in the table; temperature in degrees C, HBM in MB."""

    index: int
    name: str
    health: str
    temperature: int
    bus: str = ""
    hbm_used: int = 0
    hbm_total: int = 0


def version(text: str) -> str | None:
    """The driver version in the table's head."""
    found = re.search(r"Version:\s*([\w.]+)", text)
    return found[1] if found else None


def table(text: str) -> list[Npu]:
    """The chips of `npu-smi info`."""
    chips: list[Npu] = []
    for line in text.splitlines():
        if top := _TOP.match(line):
            chips.append(
                Npu(
                    index=int(top["index"]),
                    name=top["name"],
                    health=top["health"],
                    temperature=int(top["temperature"]),
                )
            )
        elif chips and (low := _BOTTOM.match(line)):
            chips[-1] = attrs.evolve(
                chips[-1],
                bus=low["bus"],
                hbm_used=int(low["used"]),
                hbm_total=int(low["total"]),
            )
    return chips


def fields(text: str) -> dict[str, str]:
    """`key : value` lines of `npu-smi info -t common`, keys in lower case."""
    rows = (_FIELD.match(line) for line in text.splitlines())
    return {row["key"].lower(): row["value"] for row in rows if row}


def reading(text: str) -> Reading:
    """Temperature, share of the nominal clock and whether it works, of `npu-smi info -t common`."""
    told, pair = fields(text), clocks(text)
    busy = told.get("aicore usage rate(%)", "")
    degrees = told.get("temperature(c)", "")
    return Reading(
        celsius=float(degrees) if degrees.lstrip("-").isdecimal() else None,
        clock_share=pair[0] / pair[1] if pair and pair[1] else None,
        # a tool that does not tell the load is taken to mean a working part
        busy=busy != "0",
    )


def clocks(text: str) -> tuple[int, int] | None:
    """(current, nominal) AI core clock in MHz; `curFreq` alone hides throttling."""
    told = fields(text)
    current = next((v for k, v in told.items() if re.search(r"aicore cur ?freq", k)), None)
    nominal = next((v for k, v in told.items() if re.search(r"aicore freq", k)), None)
    if current is None or nominal is None or not (current.isdecimal() and nominal.isdecimal()):
        return None
    return int(current), int(nominal)
