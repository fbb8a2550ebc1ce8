"""same_findings: experts that say nothing of their own: the base's weights again, or another expert's."""

from __future__ import annotations

from itertools import combinations

from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.models import Models
from merging.distances import sampled_rows
from merging.errors import Problem
from merging.layer_settings import merged_names
from merging.preflight import Finding

_AT_ONCE = 1 << 22  # entries that are compared at a time
_SAMPLED = ", as far as was looked at (the first rows of each matrix)"


def same_findings(models: Models, *, whole: bool) -> list[Finding]:
    """Warnings that name them. `whole`: what seems the same is compared to its end; else the first rows of
    matrices, and vectors."""
    names = merged_names(models)
    if not names:
        return []
    scope = "" if whole else _SAMPLED
    found, others = [], {}
    for task, expert in models.experts.items():
        if not _same(models.base, expert, names, whole):
            others[task] = expert
        elif any(expert.factors(name) is not None for name in names):
            what = f"its adapter changes nothing: all that it adds to the base is zero{scope}"
            remedy = "See that it was saved after it was trained, or leave it out."
            found.append(_finding(expert.label, what, remedy))
        else:
            what = f"its weights are the base's own{scope}"
            remedy = "Name the model that was fine-tuned, or leave it out."
            found.append(_finding(expert.label, what, remedy))
    for first, second in combinations(others, 2):
        if _same(others[first], others[second], names, whole):
            what = f'its weights are those of expert "{first}"{scope}: what they learnt counts twice'
            remedy = "Name another model for one of them, or leave one out."
            found.append(_finding(others[second].label, what, remedy))
    return found


def _finding(label: str, what: str, remedy: str) -> Finding:
    return Finding("same_weights", Problem(label, what, remedy), stops=False)


def _same(one: CheckpointSource, other: CheckpointSource, names: tuple[str, ...], whole: bool) -> bool:
    """Whether no tensor differs; the first that does ends it."""
    shaped = [name for name in names if one.spec(name).shape]
    if not all(_equal(one, other, name, sampled_rows(one.spec(name))) for name in shaped):
        return False
    return not whole or all(
        _equal(one, other, name, rows) for name in names for rows in _blocks(one.spec(name))
    )


def _equal(one: CheckpointSource, other: CheckpointSource, name: str, rows: slice | None) -> bool:
    first, second = one.read(name, rows), other.read(name, rows)
    return first.shape == second.shape and bool((first == second).all())


def _blocks(spec: TensorSpec) -> list[slice | None]:
    if not spec.shape or not spec.elements:
        return [None]
    step = max(1, _AT_ONCE * spec.shape[0] // spec.elements)
    return [slice(start, min(start + step, spec.shape[0])) for start in range(0, spec.shape[0], step)]
