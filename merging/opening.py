"""From a spec to opened models and tasks: headers are read, everything is compared, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from merging.checkpoints.alignment import Alignment, align
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.hub import ResolvedModel, resolve
from merging.checkpoints.lora import open_adapter
from merging.checkpoints.lora_roles import outline_of
from merging.checkpoints.source import CheckpointSource
from merging.components import backbones, calibrators, strategies
from merging.contracts.backbone import Backbone
from merging.contracts.models import Models
from merging.data.heads import expert_head, label_problems, load_head
from merging.data.opening import Purpose, open_examples
from merging.data.task import Examples, LinearHead, Task
from merging.errors import CheckpointError, DataError, MergingError, Problem, SpecError
from merging.evaluation.forward import input_problems
from merging.layer_settings import LayerSettings
from merging.preflight import config_findings, refuse_unless_allowed
from merging.spec import Component, PipelineSpec, TaskSpec
from merging.spec.component import AUTO, AutoSettings
from merging.streaming import StreamedModel


@dataclass(frozen=True)
class Input:
    """One model that a run reads: where it came from, and the files that are read."""

    name: str  # as the spec gives it
    path: Path
    files: tuple[Path, ...]
    hub: bool = False
    revision: str | None = None


@dataclass(frozen=True)
class Opened:
    """Everything that a run works on."""

    base_folder: Path
    models: Models
    inputs: Mapping[str, Input]  # "base", "expert NAME", "merged"
    heads: Mapping[str, Mapping[str, Tensor]] = field(
        default_factory=dict
    )  # the experts' own, read when asked for
    merged: CheckpointSource | None = None  # for the strategy `checkpoint`
    notes: tuple[str, ...] = ()


def open_models(spec: PipelineSpec) -> Opened:
    """Open base and experts and bring all tensors under the base's names.

    Raises CheckpointError that lists every tensor of every expert that does not fit.
    """
    base_at, base = _opened(spec.base.model, spec.base.revision, "base")
    backbone = select_backbone(base_at.path, spec.backbone)
    model = backbone.skeleton() if backbone is not None else None
    is_head = backbone.is_head if backbone is not None else _no_head
    keeps = backbone.keeps if backbone is not None else _no_head
    inputs = {"base": _input(spec.base.model, base_at, base)}
    experts: dict[str, CheckpointSource] = {}
    heads: dict[str, Mapping[str, Tensor]] = {}
    kept = {name for name in base.names() if keeps(name)}
    notes, problems = list(base.notes), []
    if read_config(base_at.path) is None:
        notes.append(f"{base_at.path} has no config.json: from_pretrained will not open the results")
    for task, ref in spec.experts.items():
        label = f'expert "{task}"'
        try:
            if ref.adapter is None:
                place, source = _opened(ref.ref.model, ref.revision, label)
            else:
                place = resolve(ref.adapter, revision=ref.revision, folder=Path.cwd())
                name = spec.base.model
                source = open_adapter(
                    place.path, base, model, label, base_name=name, base_folder=base_at.path
                )
        except MergingError as error:
            problems.append(Problem(f"experts.{task}", error.message, error.remedy))
            problems += error.problems
            continue
        fit = _aligned(base, source, model, keeps, place.path if ref.adapter is None else base_at.path)
        problems += fit.problems
        notes += [*source.notes, *fit.notes]
        kept.update(fit.absent)
        inputs[label] = _input(ref.ref.model, place, source)
        experts[task] = fit.source
        heads[task] = _HeadTensors(source, is_head)
    if problems:
        raise CheckpointError("the experts do not fit the base", problems=problems)
    folders = {label: given.path for label, given in inputs.items() if label != "base"}
    notes += refuse_unless_allowed(config_findings(base_at.path, folders), spec.allow)
    if backbone is not None and _walks(spec):
        StreamedModel(backbone, base.names())  # raises for weights that need more than a renaming
    weights = {task: spec.experts[task].weight for task in experts}
    models = Models(base, experts, weights, backbone, frozenset(kept))
    if unfit := LayerSettings(spec.merge.layers).problems(models, spec.merge.settings):
        raise SpecError("merge.layers does not fit the model", problems=unfit)
    if spec.output.form == "lora":
        outline_of(base_at.path)  # raises where there is no model class to write an adapter for
    merged = None
    if spec.merge.type == "checkpoint":
        settings: Any = spec.merge.settings
        place, source = _opened(settings.model, settings.revision, "merged model")
        fit = _aligned(base, source, model, keeps, place.path)
        if fit.problems:
            raise CheckpointError("the merged model does not fit the base", problems=fit.problems)
        inputs["merged"] = _input(settings.model, place, source)
        merged = fit.source
    return Opened(base_at.path, models, inputs, heads, merged, tuple(dict.fromkeys(notes)))


def _walks(spec: PipelineSpec) -> bool:
    """Whether some method runs models, for which weights must be those of the model class."""
    methods = [strategies.get(spec.merge.type), *(calibrators.get(one.type) for one in spec.calibrate)]
    return any("data" in method.needs for method in methods)


def select_backbone(folder: Path, choice: Component) -> Backbone | None:
    """The backbone by name, or the one that takes the `model_type` of the folder's config; None without a
    config."""
    found = read_config(folder)
    if choice.type != AUTO:
        if found is None:
            raise CheckpointError(f"{folder} has no config.json, so its architecture is not known")
        return backbones.get(choice.type)(_transformers_config(folder), choice.settings, folder=folder)
    if found is None or "model_type" not in found:
        return None
    assert isinstance(choice.settings, AutoSettings)
    kind = str(found["model_type"])
    for name in backbones.names():
        if kind in backbones.get(name).model_types:
            return backbones.get(name)(_transformers_config(folder), folder=folder)
    return backbones.get("transformers")(_transformers_config(folder), folder=folder)


def open_tasks(spec: PipelineSpec, opened: Opened) -> dict[str, Task]:
    """Examples and heads of each expert's task. Raises DataError with every problem of every task."""
    opening = _TaskOpening(spec, opened)
    tasks = {name: opening.task(name) for name in spec.experts or spec.tasks}
    if opening.problems:
        raise DataError("the tasks' data cannot be used", problems=opening.problems)
    return tasks


class _TaskOpening:
    """Opens task after task and collects what is wrong."""

    def __init__(self, spec: PipelineSpec, opened: Opened) -> None:
        self._spec, self._opened = spec, opened
        backbone = opened.models.backbone
        self._outline = backbone.skeleton() if backbone is not None else None
        self.problems: list[Problem] = []

    def task(self, name: str) -> Task:
        given = self._spec.tasks.get(name)
        if given is None:
            return Task(name, head=self._own_head(name))
        calibration = self._attempt(
            f"tasks.{name}.calibration", self._examples, name, "calibration", given.calibration
        )
        test = self._attempt(f"tasks.{name}.test", self._examples, name, "test", given.test)
        validation = self._attempt(
            f"tasks.{name}.validation", self._examples, name, "validation", given.validation
        )
        head = self._attempt(f"tasks.{name}.head", self._head, name, given)
        task = Task(name, calibration, test, head, given.metric, validation)
        self.problems += label_problems(task)
        found = {"calibration": calibration, "validation": validation, "test": test}
        for purpose, examples in found.items():
            if examples is not None and self._outline is not None:
                self.problems += input_problems(examples, self._outline, f"tasks.{name}.{purpose}")
        return task

    def _attempt(self, where: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except MergingError as error:
            self.problems += [Problem(where, error.message, error.remedy), *error.problems]
            return None

    def _examples(self, name: str, purpose: Purpose, source: Any) -> Examples | None:
        if source is None:
            return None
        return open_examples(
            source, task=name, purpose=purpose, base_folder=self._opened.base_folder, seed=self._spec.seed
        )

    def _own_head(self, name: str) -> LinearHead | None:
        """The expert's classifier, kept though nothing is said of its task."""
        try:
            return expert_head(self._opened.heads.get(name, {}), task=name)
        except DataError:  # it has none, or one that is not linear
            return None

    def _head(self, name: str, given: TaskSpec) -> LinearHead | None:
        if given.head is not None and given.head.type == "linear":
            return load_head(given.head.path, task=name)
        tensors = self._opened.heads.get(name, {})
        if given.head is not None or tensors:
            return expert_head(tensors, task=name)
        needing = _needing_heads(self._spec)
        verb = "needs" if len(needing) == 1 and given.test is None else "need"
        if given.test is not None:
            needing = ["the test examples", *needing]
        if needing:
            raise DataError(
                f"{' and '.join(needing)} {verb} a head, and the expert's checkpoint has none",
                remedy='Give one: "head": {"type": "linear", "path": "..."}.',
            )
        return None


def _needing_heads(spec: PipelineSpec) -> list[str]:
    """Methods of this spec that look at predictions."""
    methods: list[tuple[str, Any, str]] = [("strategy", strategies.get(spec.merge.type), spec.merge.type)]
    methods += [("calibrator", calibrators.get(one.type), one.type) for one in spec.calibrate]
    return [f'{kind} "{name}"' for kind, method, name in methods if "heads" in method.needs]


class _HeadTensors(Mapping[str, Tensor]):
    """The tensors of an expert's heads, read when asked for."""

    def __init__(self, source: CheckpointSource, is_head: Callable[[str], bool]) -> None:
        self._source = source
        self._names = tuple(name for name in source.names() if is_head(name))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _opened(model: str, revision: str | None, label: str) -> tuple[ResolvedModel, CheckpointSource]:
    place = resolve(model, revision=revision, folder=Path.cwd())
    return place, open_checkpoint(place.path, label)


def _aligned(
    base: CheckpointSource,
    source: CheckpointSource,
    model: nn.Module | None,
    is_head: Callable[[str], bool],
    folder: Path,
) -> Alignment:
    return align(base, source, model, is_head, tied=_ties(folder))


def _ties(folder: Path) -> bool:
    """Whether the folder's config ties head and embedding; where transformers knows its default, that
    counts."""
    found = read_config(folder)
    if found is None:
        return False
    if "tie_word_embeddings" in found or "model_type" not in found:
        return bool(found.get("tie_word_embeddings", False))
    return bool(getattr(_transformers_config(folder), "tie_word_embeddings", False))


def _input(name: str, place: ResolvedModel, source: CheckpointSource) -> Input:
    folder = place.path if place.path.is_dir() else place.path.parent
    beside = [folder / "config.json"] if (folder / "config.json").is_file() else []
    return Input(name, place.path, (*source.files, *beside), place.repo_id is not None, place.revision)


def _no_head(name: str) -> bool:
    return False


def _transformers_config(folder: Path) -> Any:
    from transformers import AutoConfig

    place = folder if folder.is_dir() else folder.parent
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise SpecError(
            f"the config of {place} cannot be used: {str(error).splitlines()[0]}",
            remedy="Tensor-wise rules need no config; others need one that this transformers release knows.",
        ) from error
