"""Writes docs/methods/README.md from what the methods' classes say of themselves.

python docs/table_of_methods.py
"""

from __future__ import annotations

from pathlib import Path

from merging.calibrators import BUILTIN as CALIBRATORS
from merging.components import calibrators, strategies
from merging.strategies import BUILTIN as STRATEGIES

FOLDER = Path(__file__).parent / "methods"
WHERE = "https://arxiv.org/abs/"


def table() -> str:
    """All methods, with needs and memory law, each linked to its page."""
    lines = [
        "# Methods",
        "",
        "Made by `python docs/table_of_methods.py` from the classes; `merging show NAME` tells all of one.",
        "S: the largest tensor, D: the widest linear, N: experts.",
    ]
    for title, registry, names in (
        ("Merge rules", strategies, STRATEGIES),
        ("Calibrators", calibrators, CALIBRATORS),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "| name | what it does | needs | memory | paper |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name in names:
            method = registry.get(name)
            paper = method.paper.removeprefix("arXiv:")
            linked = f"[{paper}]({WHERE}{paper})" if method.paper.startswith("arXiv:") else method.paper
            needs = ", ".join(sorted(method.needs)) or "-"
            lines.append(
                f"| [{name}]({name}.md) | {method.summary()} | {needs} | {method.memory or '-'} | {linked} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(table(), encoding="utf-8")
