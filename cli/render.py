"""Plain text for the terminal: aligned columns, sections of keys and values, a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from .progress import size


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0) -> str:
    """Columns as wide as their widest cell; numbers to the right, the last column as long as it is."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(cell_len(line[column]) for line in [list(heads), *cells]) for column in range(len(heads))]
    right = [bool(cells) and all(_is_number(line[column]) for line in cells) for column in range(len(heads))]
    lines = []
    for line in [list(heads), *cells]:
        padded = [
            _padded(cell, width, to_right=to_right)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def _padded(text: str, width: int, *, to_right: bool = False) -> str:
    """Padded to so many columns of the terminal, of which some letters take two."""
    space = " " * (width - cell_len(text))
    return space + text if to_right else text + space


def key_values(pairs: Mapping[str, object], *, indent: int = 0) -> str:
    """`key   value`, aligned."""
    width = max(map(cell_len, pairs), default=0)
    return "\n".join(f"{' ' * indent}{_padded(key, width)}  {value}".rstrip() for key, value in pairs.items())


def render_plan(plan: Mapping[str, Any]) -> str:
    """Any nested mapping: single values first, then a section for each part, as a table where it is one."""
    plan = {**plan, "parameters": _by_fate(plan.get("parameters", {}))}
    single = {key: value for key, value in plan.items() if not _is_nested(value)}
    blocks = [key_values({_title(key): _text(key, value) for key, value in single.items()})] if single else []
    for key, value in plan.items():
        if _is_nested(value) and value:
            blocks.append(f"{_title(key)}\n{_section(key, value, indent=2)}")
    return "\n\n".join(blocks)


def _by_fate(parameters: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each thing that becomes of parameters: how many they are, and the first of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, fate in parameters.items():
        groups.setdefault((fate["state"], fate["reason"]), []).append(name)
    return [
        {"what": state, "why": reason, "tensors": len(names), "first": names[0]}
        for (state, reason), names in groups.items()
    ]


def _section(key: str, value: Any, *, indent: int) -> str:
    if isinstance(value, Mapping):
        if all(isinstance(item, Mapping) for item in value.values()):
            return _records({str(name): item for name, item in value.items()}, indent)
        flat = {str(name): _text(f"{key}.{name}", item) for name, item in value.items()}
        return key_values(flat, indent=indent)
    if all(isinstance(item, Mapping) for item in value):
        heads = list(dict.fromkeys(name for item in value for name in item))
        rows = [[_text(name, item.get(name)) for name in heads] for item in value]
        return table([_title(head) for head in heads], rows, indent=indent)
    return "\n".join(f"{' ' * indent}{_text(key, item)}" for item in value)


def _records(records: Mapping[str, Mapping[str, Any]], indent: int) -> str:
    heads = list(dict.fromkeys(name for record in records.values() for name in record))
    rows = [[name, *(_text(head, record.get(head)) for head in heads)] for name, record in records.items()]
    return table(["", *map(_title, heads)], rows, indent=indent)


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and (key.endswith("bytes") or ".bytes" in key or "_bytes" in key):
        return size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(str(name), item)}" for name, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_text(key, item) for item in value) or "-"
    return str(value)


def _title(key: str) -> str:
    return key.replace("_bytes", "").replace("_", " ")


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").replace("+", "").replace("e", "").replace(",", "").isdigit()
