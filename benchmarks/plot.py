"""Plots of lines as SVG text: no library, no fonts but the reader's own."""

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
    place = _Axes(_Powers(_values(scaled, 0)), _Powers(_values(scaled, 1)))
    return _drawn(title, across, up, scaled, place)


def curves(title: str, across: str, up: str, lines: Mapping[str, Points], *, powers: bool = False) -> str:
    """A line with dots for each, on even axes; `powers`: x, above 0, in powers of two."""
    scale = _Powers if powers else _Even
    return _drawn(title, across, up, lines, _Axes(scale(_values(lines, 0)), _Even(_values(lines, 1))))


def _values(lines: Mapping[str, Points], side: int) -> list[float]:
    return [point[side] for points in lines.values() for point in points]


def _drawn(title: str, across: str, up: str, lines: Mapping[str, Points], place: _Axes) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, title, size=13),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, across, anchor="middle"),
        _text(8, _TOP - 6, up),
        *place.grid(),
    ]
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 16 * (number + 1), name, colour=colour))
    return "\n".join([*parts, "</svg>\n"])


class _Axes:
    """From values to places in the picture."""

    def __init__(self, across: _Powers | _Even, up: _Powers | _Even) -> None:
        self._across, self._up = across, up

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + wide * self._across.share(x), _HEIGHT - _BOTTOM - high * self._up.share(y)

    def grid(self) -> list[str]:
        parts = []
        for value in self._across.marks:
            x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * self._across.share(value)
            parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM))
            parts.append(_text(x, _HEIGHT - _BOTTOM + 15, f"{value:g}", anchor="middle"))
        for value in self._up.marks:
            y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * self._up.share(value)
            parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y))
            parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        return parts


class _Powers:
    """An axis in powers of two, from one to another: at least a factor of four."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low = math.floor(math.log2(min(values)))
        self._high = max(math.ceil(math.log2(max(values))), self._low + 2)
        step = max(1, (self._high - self._low) // 6)
        self.marks = [2.0**power for power in range(self._low, self._high + 1, step)]

    def share(self, value: float) -> float:
        return (math.log2(value) - self._low) / (self._high - self._low)


class _Even:
    """An axis with marks at round numbers, whose ends are the outermost of them."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(values), max(values)
        rough = (high - low or abs(high) or 1.0) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
        first, last = math.floor(low / step), math.ceil(high / step)
        last = max(last, first + 1)
        self.marks = [round(step * number, 10) for number in range(first, last + 1)]

    def share(self, value: float) -> float:
        return (value - self.marks[0]) / (self.marks[-1] - self.marks[0])


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, colour: str = "#222"
) -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {attributes}>{escape(text)}</text>"
