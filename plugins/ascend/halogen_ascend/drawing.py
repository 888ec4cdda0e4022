"""Timelines for people (SVG) and for chrome://tracing or Perfetto (trace JSON)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from halogen_ascend.sim.profiles import Profile
from halogen_ascend.sim.timeline import OpSpan

_ROW, _LEFT, _WIDTH, _TOP = 9, 74, 1100, 46
_COLOURS = (
    *("#4472c4", "#d9782d", "#5a9e4b", "#b5485d", "#7a5fb0", "#3a9aa8", "#a38431", "#c23b9b"),
    *("#e0a3c8", "#1d3557", "#b7c94b", "#8c564b"),
)


def chrome_trace(spans: Sequence[OpSpan], part: Profile) -> str:
    """Trace Event Format: one process per kind of core, one thread per core, microseconds."""
    events: list[dict[str, object]] = []
    for pid, unit in ((1, "cube"), (2, "vector")):
        name = {"name": f"{part.name} {unit} cores (simulated)"}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": name})
    for span in spans:
        for placed in span.schedule.placed:
            events.append(
                {
                    "ph": "X",
                    "name": span.label(placed),
                    "cat": span.op,
                    "pid": 1 if placed.unit == "cube" else 2,
                    "tid": placed.core,
                    "ts": round((span.start + placed.start) * 1e6, 3),
                    "dur": round((placed.end - placed.start) * 1e6, 3),
                    "args": {"op": span.op, "crossed_banks": placed.crossed},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def svg(spans: Sequence[OpSpan], part: Profile, title: str) -> str:
    """A row per core, a box per task, a colour per op; grey is idle."""
    start, end = spans[0].start, max(s.end for s in spans)
    scale = _WIDTH / (end - start)
    rows = part.cube_cores + part.vector_cores
    height = _TOP + rows * _ROW + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
        *_units(part),
    ]
    names = list(dict.fromkeys(s.op for s in spans))
    for span in spans:
        colour = _COLOURS[names.index(span.op) % len(_COLOURS)]
        for placed in span.schedule.placed:
            row = placed.core + (0 if placed.unit == "cube" else part.cube_cores)
            x = _LEFT + (span.start + placed.start - start) * scale
            width = max((placed.end - placed.start) * scale, 0.2)
            out.append(
                f'<rect x="{x:.2f}" y="{_TOP + row * _ROW}" width="{width:.2f}" '
                f'height="{_ROW - 1}" fill="{colour}"><title>{escape(span.label(placed))}: '
                f"{(placed.end - placed.start) * 1e6:.2f} us</title></rect>"
            )
    out += _axis(end - start, _TOP - 6)
    out += _legend(spans, names, _TOP + rows * _ROW + 20, end - start)
    return "\n".join([*out, "</svg>"])


def _units(part: Profile) -> list[str]:
    """A grey band per kind of core, named."""
    out, y = [], _TOP
    for unit, cores in (("cube", part.cube_cores), ("vector", part.vector_cores)):
        out.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{cores * _ROW - 1}" '
            'fill="#ececec"/>'
        )
        out.append(f'<text x="8" y="{y + 10}">{cores} {unit}</text>')
        y += cores * _ROW
    return out


def _axis(total: float, y: int) -> list[str]:
    """Marks at a round number of microseconds, about ten of them."""
    raw = total * 1e6 / 10
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    marks = [step * i for i in range(int(total * 1e6 / step) + 1)]
    return [
        f'<text x="{_LEFT + at / (total * 1e6) * _WIDTH:.1f}" y="{y}" font-size="9">'
        f"| {at:g} us</text>"
        for at in marks
    ]


def _legend(spans: Sequence[OpSpan], names: list[str], y: int, total: float) -> list[str]:
    out, x = [], 8
    for index, name in enumerate(names):
        share = sum(s.schedule.makespan for s in spans if s.op == name) / total
        text = f"{name} {share:.0%}"
        colour = _COLOURS[index % len(_COLOURS)]
        out.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 14}" y="{y + 9}">{escape(text)}</text>')
        x += 22 + 6 * len(text)
    out.append(f'<text x="8" y="{y + 30}">{total * 1e6:.1f} us simulated; grey is idle</text>')
    return out
