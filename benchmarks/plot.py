"""A plot of straight lines in log-log axes, as SVG text: no library, no fonts but the reader's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 320, 64, 36, 190, 44
_COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d08700", "#555555")


def log_log(title: str, across: str, up: str, lines: Mapping[str, Points]) -> str:
    """A line with dots for each; values are above 0. The x axis is in multiples of each line's first."""
    scaled = {name: [(x / points[0][0], y) for x, y in points] for name, points in lines.items()}
    place = _Axes(
        [x for points in scaled.values() for x, _ in points],
        [y for points in scaled.values() for _, y in points],
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, title, size=13),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, across, anchor="middle"),
        _text(8, _TOP - 6, up),
        *place.grid(),
    ]
    for number, (name, points) in enumerate(scaled.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 16 * (number + 1), name, colour=colour))
    return "\n".join([*parts, "</svg>\n"])


class _Axes:
    """From values to places in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x, self._y = _range(xs), _range(ys)

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + wide * _share(x, self._x), _HEIGHT - _BOTTOM - high * _share(y, self._y)

    def grid(self) -> list[str]:
        parts = []
        for value in _marks(self._x):
            x, _ = self(value, self._y[0])
            parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM))
            parts.append(_text(x, _HEIGHT - _BOTTOM + 15, f"{value:g}", anchor="middle"))
        for value in _marks(self._y):
            _, y = self(self._x[0], value)
            parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y))
            parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        return parts


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From a power of two to one: at least a factor of four."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return 2.0**low, 2.0 ** max(high, low + 2)


def _marks(ends: tuple[float, float]) -> list[float]:
    first, last = round(math.log2(ends[0])), round(math.log2(ends[1]))
    step = max(1, (last - first) // 6)
    return [2.0**power for power in range(first, last + 1, step)]


def _share(value: float, ends: tuple[float, float]) -> float:
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, colour: str = "#222"
) -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {attributes}>{escape(text)}</text>"
