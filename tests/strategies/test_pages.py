"""The methods' pages against the methods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from merging.components import strategies

PAGES = Path(__file__).parents[2] / "docs" / "methods"
RULES = (
    "average",
    "task_arithmetic",
    "ties",
    "dare",
    "dare_ties",
    "della",
    "breadcrumbs",
    "sce",
    "slerp",
    "karcher",
    "model_stock",
    "fisher",
    "ada_merging",
    "knots",
    "core_space",
    "checkpoint",
)


@pytest.mark.parametrize("name", RULES)
def test_page_lists_every_setting_with_its_default(name):
    page = (PAGES / f"{name}.md").read_text()
    fields = strategies.get(name).Settings.model_fields

    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    listed = {cells[1].strip(" `"): cells[2].strip() for cells in rows}

    assert listed.keys() == fields.keys()
    for key, field in fields.items():
        given = listed[key]
        assert given == "required" if field.is_required() else _read(given) == _plain(field.default)


@pytest.mark.parametrize("name", RULES)
def test_page_names_the_paper(name):
    assert strategies.get(name).paper in (PAGES / f"{name}.md").read_text()


def _read(cell: str) -> object:
    return json.loads(cell)


def _plain(default: object) -> object:
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json")
    return list(default) if isinstance(default, tuple) else default
