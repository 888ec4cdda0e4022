"""A line plot as SVG, in as little code as it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 36, 48
COLOURS = ("#1b6ca8", "#c0392b", "#2d8a4e", "#8e5ea2", "#b7791f", "#555555")


def line_plot(title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """An SVG document with one line per series, both axes from 0; points not finite are left out.

    Raises `ValueError` if nothing is finite.
    """
    lines = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    flat = [point for points in lines.values() for point in points]
    if not flat:
        raise ValueError("nothing to plot")
    x_top, y_top = (_round_up(max(values)) for values in zip(*flat, strict=True))
    body = [*_axes(x_top, y_top), *_labels(title, x_label, y_label)]
    for i, (name, points) in enumerate(lines.items()):
        body += _line(name, [_place(x / x_top, y / y_top) for x, y in points], i)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = ' font-family="sans-serif" font-size="12">'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head + style, ground, *body, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= value * 0.999999)


def _place(x: float, y: float) -> tuple[float, float]:
    """Pixel of a point given in shares of the axes."""
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _axes(x_top: float, y_top: float) -> list[str]:
    parts = []
    for i in range(6):
        x_text, y_text = f"{x_top * i / 5:g}", f"{y_top * i / 5:g}"
        (x, bottom), (_, top) = _place(i / 5, 0), _place(i / 5, 1)
        (left, y), (right, _) = _place(0, i / 5), _place(1, i / 5)
        stroke = 'stroke="#ddd"' if i else 'stroke="#333"'
        parts += [
            f'<line x1="{x:.1f}" y1="{bottom:.1f}" x2="{x:.1f}" y2="{top:.1f}" {stroke}/>',
            f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" {stroke}/>',
            f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x_text}</text>',
            f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{y_text}</text>',
        ]
    return parts


def _labels(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        f'<text x="{middle}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
        f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]


def _line(name: str, points: Points, index: int) -> list[str]:
    colour = COLOURS[index % len(COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    y = TOP + 12 + 18 * index
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y_:.1f}" r="3" fill="{colour}"/>' for x, y_ in points),
        f'<text x="{WIDTH - RIGHT + 12}" y="{y}" fill="{colour}">{escape(name)}</text>',
    ]
