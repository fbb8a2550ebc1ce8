"""The documentation says what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from merging.calibrators import BUILTIN as CALIBRATORS
from merging.strategies import BUILTIN as STRATEGIES

DOCS = Path(__file__).parent.parent / "docs"
BUILT_IN = [*STRATEGIES, *CALIBRATORS]


def test_the_table_of_methods_is_what_the_classes_say() -> None:
    made = runpy.run_path(str(DOCS / "table_of_methods.py"))["table"]()

    assert (DOCS / "methods" / "README.md").read_text(encoding="utf-8") == made, (
        "run docs/table_of_methods.py"
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_has_a_page_with_a_spec_to_copy(name: str) -> None:
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")

    assert f'"type": "{name}"' in page
    assert "```json" in page


def test_links_between_pages_lead_somewhere() -> None:
    import re

    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
