"""Pre-flight: what may be wrong with experts whose names and shapes fit, found before the work begins.

Every finding has a name; the spec's `allow` lets findings of that name through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from merging.checkpoints.source import CheckpointSource
from merging.config_comparison import compare_configs
from merging.contracts.backbone import Backbone
from merging.contracts.layer_rule import LayerRule
from merging.contracts.method import Method
from merging.contracts.models import Models
from merging.distances import distance
from merging.errors import CheckpointError, DataError, MergingError, OutputError, Problem, TracingError
from merging.processor_comparison import compare_processors
from merging.spec.pipeline_spec import FindingName
from merging.streaming import StreamedModel
from merging.threads import in_threads, threads_over
from merging.unmade import Unmade

OTHER_BASE = 0.3  # cosine of the matrices: fine-tuning leaves it near 1, another start gives about 0
FAR = 0.5  # of the base's own size: fine-tuning moves matrices by a few hundredths of it

_UNFIT = "Config and weights do not belong together: get both from one place."
_OF_MODELS = ("config", "other_base", "processor")


class Finding(NamedTuple):
    """`name` is what `allow` may list; `stops`: a run, else it is a warning."""

    name: FindingName
    problem: Problem
    stops: bool = True


def refusal(findings: Sequence[Finding]) -> MergingError:
    """The error for findings that stop a run, each with its name, and how to let them through."""
    names = ", ".join(f'"{name}"' for name in dict.fromkeys(finding.name for finding in findings))
    problems = [finding.problem.named(finding.name) for finding in findings]
    remedy = f'If that is meant, let it through with "allow": [{names}] in the spec.'
    found = {finding.name for finding in findings}
    if not found.isdisjoint(_OF_MODELS):
        what = "the experts and the base do not belong together"
        return CheckpointError(what, problems=problems, remedy=remedy)
    if "overlap" in found:
        what = "the test would not show what the calibration is worth"
        return DataError(what, problems=problems, remedy=remedy)
    return OutputError("this machine has too little room for the run", problems=problems, remedy=remedy)


def config_problems(
    model: nn.Module | None, names: Mapping[str, str], base: CheckpointSource
) -> list[Problem]:
    """Tensors of the base that are not of the shape which its config gives them: no result would load.

    `names`: stored name -> name in the model."""
    state = {} if model is None else model.state_dict()
    differing = [
        f"{name} is {_sizes(base.spec(name).shape)}, by the config {_sizes(state[inside].shape)}"
        for name, inside in names.items()
        if inside in state and tuple(state[inside].shape) != base.spec(name).shape
    ]
    return [Problem("base", _listed(differing), _UNFIT)] if differing else []


def unfilled_problems(model: nn.Module, lost: Sequence[str]) -> list[Problem]:
    """Parameters that the base does not store: no result would load with them."""
    if not lost:
        return []
    total = len(dict(model.named_parameters(remove_duplicate=False)))
    what = (
        f"{len(lost)} of {total} parameters that {type(model).__name__} has by the config are not stored, "
        f"and would be drawn at random: {_names(lost)}"
    )
    return [Problem("base", what, _UNFIT)]


def unmade_problems(model: nn.Module, found: Unmade) -> list[Problem]:
    """Tensors of the base that its config takes away from the model: they would be merged and written, and
    never run, calibrated or scored."""
    if not found.certain:
        return []
    what = (
        f"{len(found.certain)} stored tensors are of modules that {type(model).__name__} does not make from "
        f"the config (too few layers, or a bias that is switched off): {_names(found.certain)}"
    )
    return [Problem("base", what, _UNFIT)]


def unmade_notes(model: nn.Module, found: Unmade) -> tuple[str, ...]:
    """A remark on tensors that lie among the model's modules and are not the class's."""
    if not found.doubtful:
        return ()
    return (
        f"base: {len(found.doubtful)} stored tensors lie among the modules of {type(model).__name__}, which "
        f"makes no such ones from the config: {_names(found.doubtful)}; they are merged as they stand, and "
        "never run: see that the config is the one of the weights",
    )


def _names(names: Sequence[str]) -> str:
    more = f", and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def config_findings(base: Path, experts: Mapping[str, Path]) -> list[Finding]:
    """Config fields that change what the weights mean, where an expert's differ from the base's; those that
    only one of them has are warned of."""
    findings = []
    for label, folder in experts.items():
        found = compare_configs(base, folder)
        remedy = "Name the base that it was trained from, or mend the config that is wrong."
        if found.both:
            problem = Problem(label, f"its config says otherwise: {_listed(found.both)}", remedy)
            findings.append(Finding("config", problem))
        if found.single:
            what = f"only one of its config and the base's says it: {_listed(found.single)}"
            remedy = "See whether the model reads it; then both configs must say it."
            findings.append(Finding("config", Problem(label, what, remedy), stops=False))
    return findings


def processor_findings(base: Path, experts: Mapping[str, Path], fed: Collection[str]) -> list[Finding]:
    """Experts whose image processor or tokenizer makes other inputs than the base's, which all examples go
    through and every result gets; `fed`: those of whom there are examples that it makes."""
    findings = []
    for label, folder in experts.items():
        found = compare_processors(base, folder)
        if not found.said and not found.shapes:
            continue
        stops = bool(found.shapes) and label in fed
        shapes = f"{found.shapes}; " if found.shapes else ""
        what = f"it was not trained on what the base's processor makes: {shapes}{_listed(found.said)}"
        remedy = (
            "Examples of all tasks go through the base's, and results get it. Give the expert's inputs as "
            '{"type": "tensors"}, or put the files of the expert beside the base if they are right for all.'
        )
        findings.append(Finding("processor", Problem(label, what, remedy), stops))
    return findings


def _listed(fields: Sequence[str]) -> str:
    more = f"; and {len(fields) - 5} more" if len(fields) > 5 else ""
    return "; ".join(fields[:5]) + more


def weight_findings(models: Models) -> list[Finding]:
    """Experts whose matrices have nothing in common with the base's, and such as are far from it, from the
    first rows of each matrix."""
    findings = []
    experts = tuple(models.experts.values())
    distances = in_threads(partial(distance, models), experts, threads_over((models.base, *experts)))
    for expert, found in zip(experts, distances, strict=True):
        if found is not None and found.of_zeros:
            what = "its matrices hold nothing but zeros: it was never trained, or never filled"
            remedy = "Get it again, or leave it out."
            findings.append(Finding("other_base", Problem(expert.label, what, remedy)))
            continue
        if found is not None and found.emptied:
            shown = ", ".join(found.emptied[:5]) + (", ..." if len(found.emptied) > 5 else "")
            what = (
                f"{len(found.emptied)} of its matrices hold nothing but zeros (in the rows looked at), where "
                f"the base's do not: {shown}; a download that ended early leaves such"
            )
            remedy = "Get it again; its file may lack its end."
            findings.append(Finding("other_base", Problem(expert.label, what, remedy)))
        if found is not None and found.cosine < OTHER_BASE:
            what = (
                f"its matrices have a cosine of {found.cosine:.2f} to the base's: it was trained from "
                "another base"
            )
            remedy = "Name the base that it was trained from, or leave it out."
            findings.append(Finding("other_base", Problem(expert.label, what, remedy)))
        elif found is not None and found.relative > FAR:
            what = (
                f"its matrices differ from the base's by {found.relative:.2f} of their size (cosine "
                f"{found.cosine:.2f}); fine-tuning moves them by a few hundredths"
            )
            remedy = "See that the base is the one it was trained from; `merging compare` shows each block."
            findings.append(Finding("far_from_base", Problem(expert.label, what, remedy), stops=False))
    return findings


def refuse_unwalkable(
    backbone: Backbone | None, base: CheckpointSource, folder: Path, methods: Mapping[str, type[Method]]
) -> None:
    """Raise CheckpointError where a method runs models, or walks their blocks, and the base cannot be."""
    runs = [name for name, method in methods.items() if "data" in method.needs]
    if not runs:
        return
    named = " and ".join(runs)
    if backbone is None:
        raise CheckpointError(
            f"{named} cannot run the model: {folder} has no config.json that says its architecture",
            remedy="Put the model's config.json beside its weights, or use a method that needs no data.",
        )
    model = StreamedModel(backbone, base.names())  # raises for weights that need more than a renaming
    if any(issubclass(method, LayerRule) for method in methods.values()):
        try:
            backbone.stacks(model.module)
        except TracingError as error:
            raise CheckpointError(
                f"{named} cannot walk the model: {error.message}", remedy=error.remedy
            ) from error


def running_statistics(base: CheckpointSource) -> tuple[str, ...]:
    """A remark on batch norms, whose statistics belong to one model's activations."""
    found = [name for name in base.names() if name.endswith((".running_mean", ".running_var"))]
    if not found:
        return ()
    return (
        f"{len(found)} running statistics of batch norms ({found[0]}, ...) are merged as weights are, though "
        "they describe activations that the merged model does not have: run it over training data in "
        "training mode to set them anew",
    )
