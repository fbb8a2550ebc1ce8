"""The model card: README.md of a checkpoint, with the front matter that the hub reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from merging.report.escaping import escaped
from merging.report.report import Report
from merging.report.table import scores_markdown


@dataclass(frozen=True)
class Origin:
    """Where a model came from. Of a folder only the last name is shown: paths say nothing to others."""

    name: str
    hub: bool = False
    revision: str | None = None
    licence: str = ""  # as its own model card or files say

    def __str__(self) -> str:
        name = self.name if self.hub else PurePath(self.name).name or self.name
        return f"{name} (revision {self.revision})" if self.revision else name


@dataclass(frozen=True)
class MethodUsed:
    """A strategy or calibrator as it was run."""

    name: str
    summary: str
    paper: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def model_card(
    *,
    title: str,
    base: Origin,
    experts: Mapping[str, Origin],
    methods: Sequence[MethodUsed],
    load: str,
    library: str = "transformers",
    report: Report | None = None,
    inference_note: str = "",
) -> str:
    """Markdown. `load`: Python lines that open the checkpoint; `report`: once the scores are known."""
    sections = [
        _front_matter(base, experts, library),
        f"# {escaped(title)}",
        f"Merged from a base and {len(experts)} {'expert' if len(experts) == 1 else 'experts'}, with "
        f"{' and then '.join(escaped(method.name) for method in methods)}.",
        "## Models",
        _models(base, experts),
        "## Method",
        *(_method(method) for method in methods),
        "## How to load it",
        f"```python\n{load.strip()}\n```",
    ]
    if inference_note:
        sections.append(f"**Beware**: {escaped(inference_note)}")
    papers = list(dict.fromkeys(method.paper for method in methods if method.paper))
    if papers:
        sections += ["## Papers", "\n".join(f"- {_paper(paper)}" for paper in papers)]
    card = "\n\n".join(sections) + "\n"
    return card if report is None else with_results(card, report)


_RESULTS = "## Results"


def with_results(card: str, report: Report) -> str:
    """The card with the report's scores, before papers and what to beware of; in place of earlier ones."""
    before, found, after = card.partition(f"\n{_RESULTS}\n")
    if found:
        rest = after.partition("\n## ")
        card = f"{before}\n## {rest[2]}" if rest[1] else before
    scores = "\n\n".join(scores_markdown(report))
    if not scores:
        return card
    place = min(
        (card.find(f"\n{title}\n") for title in ("## Papers", _HARM) if f"\n{title}\n" in card),
        default=len(card),
    )
    return f"{card[:place]}\n{_RESULTS}\n\n{scores}\n{card[place:]}"


_HARM = "## Beware: drift"  # the last section of a card that has it


def with_harm(card: str, harm: str | None) -> str:
    """The card, ending with what calibrating has harmed; without such a section if there is nothing."""
    before = card.partition(f"\n{_HARM}\n")[0]
    return before if harm is None else f"{before}\n{_HARM}\n\n{escaped(harm)}\n"


def _front_matter(base: Origin, experts: Mapping[str, Origin], library: str) -> str:
    on_hub = list(dict.fromkeys(" ".join(one.name.split()) for one in (base, *experts.values()) if one.hub))
    entries: dict[str, Any] = {"library_name": library, "tags": ["merge"]}
    licences = {one.licence for one in (base, *experts.values())}
    if len(licences) == 1 and (only := licences.pop()) and " " not in only:
        entries = {"license": only} | entries
    if on_hub:
        entries |= {"base_model": on_hub, "base_model_relation": "merge"}
    return f"---\n{yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=math.inf)}---"


def _models(base: Origin, experts: Mapping[str, Origin]) -> str:
    rows = [("base", base), *((f"expert {task}", one) for task, one in experts.items())]
    lines = [
        f"| {escaped(role)} | {escaped(str(one))} | {escaped(one.licence) or 'not stated'} |"
        for role, one in rows
    ]
    if len({one.licence for _, one in rows}) > 1:
        lines.append("\nThe licences differ, or some are not stated: see what each of them allows.")
    return "\n".join(["| | model | licence |", "| --- | --- | --- |", *lines])


def _method(method: MethodUsed) -> str:
    text = f"**{escaped(method.name)}**: {escaped(method.summary)}"
    if not method.settings:
        return text
    settings = json.dumps(dict(method.settings), indent=2, ensure_ascii=False, default=str)
    return f"{text}\n\n```json\n{settings}\n```"


def _paper(paper: str) -> str:
    if paper.startswith("arXiv:"):
        return f"[{escaped(paper)}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"
    return escaped(paper)
