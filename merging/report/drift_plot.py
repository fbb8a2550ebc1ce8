"""Drift as a picture: SVG text, no library, no fonts but the reader's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from merging.report.drift import Distance, DriftReport, DriftRow

_WIDTH, _HEIGHT = 400, 250  # of one panel
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 34, 14, 38
_MODELS = (("merged", "#c0392b"), ("calibrated", "#1b6ca8"))

_PANELS: tuple[tuple[str, Callable[[Distance], float | None]], ...] = (
    ("drift: |h - h_expert| / |h_expert|", lambda one: one.distance),
    ("local mismatch / |h_expert|", lambda one: one.local),
    ("upstream propagation / |h_expert|", lambda one: one.upstream),
    ("cosine to the expert", lambda one: one.cosine),
    ("Frechet distance, relative", lambda one: one.frechet_relative),
)


def drift_plot(drift: DriftReport) -> str:
    """Panels over the blocks, before and after calibrating: thick lines are means over the tasks, thin ones
    the tasks. What was not measured has no panel."""
    shown = [(title, value) for title, value in _PANELS if _values(drift.mean, value)]
    columns = 2 if len(shown) > 1 else 1
    wide, high = columns * _WIDTH, -(-len(shown) // columns) * _HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        *_legend(drift),
    ]
    for number, (title, value) in enumerate(shown):
        x, y = (number % columns) * _WIDTH, (number // columns) * _HEIGHT + 34
        parts += [f'<g transform="translate({x},{y})">', *_panel(drift, title, value), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _panel(drift: DriftReport, title: str, value: Callable[[Distance], float | None]) -> list[str]:
    every = [*drift.tasks.values(), drift.mean]
    found = [one for rows in every for one in _values(rows, value)]
    low, high = (min(0.0, *found) if min(found) < 0.5 else min(found)), max(found)
    high = high if high > low else low + 1.0
    blocks = [row.block for row in drift.mean]
    across = {
        block: _LEFT + (_WIDTH - _LEFT - _RIGHT) * (number + 0.5) / len(blocks)
        for number, block in enumerate(blocks)
    }

    def up(one: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (one - low) / (high - low)

    parts = [_text(_LEFT, 18, title, size=13)]
    for share in (0.0, 0.5, 1.0):
        mark = low + share * (high - low)
        level = f"{up(mark):.1f}"
        parts.append(f'<line x1="{_LEFT}" y1="{level}" x2="{_WIDTH - _RIGHT}" y2="{level}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, up(mark) + 4, f"{mark:.3g}", anchor="end"))
    for block in dict.fromkeys((blocks[0], blocks[-1])):
        at = across[block]
        anchor = "start" if block == blocks[0] else "end"
        parts.append(_text(at, _HEIGHT - 16, block, anchor=anchor))
    for model, colour in _MODELS:
        for rows in every:
            mean = rows is drift.mean
            points = [
                (across[row.block], up(height))
                for row in rows
                if (height := _value(row, model, value)) is not None
            ]
            if not points or (not mean and len(drift.tasks) == 1):
                continue
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = 'stroke-width="2.5"' if mean else 'stroke-width="1" opacity="0.35"'
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {style}/>')
            if mean:
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


def _legend(drift: DriftReport) -> list[str]:
    known = [
        (model, colour)
        for model, colour in _MODELS
        if any(getattr(row, model) is not None for row in drift.mean)
    ]
    parts = [
        _text(_LEFT + 120 * number, 22, model, size=13, colour=colour)
        for number, (model, colour) in enumerate(known)
    ]
    if len(drift.tasks) > 1:
        about = f"thick: mean of {len(drift.tasks)} tasks, thin: {', '.join(drift.tasks)}"
        parts.append(_text(_LEFT + 250, 22, about))
    return parts


def _values(rows: Sequence[DriftRow], value: Callable[[Distance], float | None]) -> list[float]:
    found = (_value(row, model, value) for row in rows for model, _ in _MODELS)
    return [one for one in found if one is not None]


def _value(row: DriftRow, model: str, value: Callable[[Distance], float | None]) -> float | None:
    distance: Distance | None = getattr(row, model)
    return None if distance is None else value(distance)


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
