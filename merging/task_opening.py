"""From a spec to the tasks' examples and heads, every problem of all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from merging.backbones.padding import moving_problem
from merging.checkpoints.folder import config as read_config
from merging.components import calibrators, strategies
from merging.contracts.layer_rule import LayerRule
from merging.data.heads import expert_head, head_names, load_head, order_problems, refuse_misfit
from merging.data.numbering import known_classes, number_alike_
from merging.data.opening import Purpose, open_examples
from merging.data.task import Examples, LinearHead, Task
from merging.data.zero_shot import zero_shot_head
from merging.errors import DataError, MergingError, Problem
from merging.evaluation.forward import (
    features_width,
    gives_pooled,
    input_problems,
    odd_input_problem,
    padding_problem,
    picture_problem,
)
from merging.evaluation.metrics import metric
from merging.opened import Opened
from merging.spec import PipelineSpec, TaskSpec


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
        self.problems: list[Problem] = []
        self._tried: set[tuple[int, ...]] = set()

    @cached_property
    def _outline(self) -> nn.Module | None:
        backbone = self._opened.models.backbone
        return backbone.skeleton() if backbone is not None else None

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
        splits = {"test": test, "validation": validation, "calibration": calibration}
        head = self._attempt(f"tasks.{name}.head", self._head, name, given, known_classes(splits))
        if head is not None and metric(given.metric).reads_head:
            self.problems += number_alike_(name, splits, head)
        task = Task(name, calibration, test, head, given.metric, validation)
        self.problems += [
            *metric(task.metric).problems(task, self._opened.models.backbone),
            *order_problems(task),
            *self._unfit(name, given, head),
        ]
        found = {"calibration": calibration, "validation": validation, "test": test}
        for purpose, examples in found.items():
            if examples is not None and self._outline is not None:
                where = f"tasks.{name}.{purpose}"
                unknown = input_problems(examples, self._outline, where)
                self.problems += unknown
                self._try_picture(examples, where)
                if not unknown:
                    self._try_inputs(examples, where, reads=head is not None or self._reads_features)
                if not unknown and purpose == "calibration" and self._walks:
                    self._try_padding(examples, where)
        return task

    def _try_picture(self, examples: Examples, where: str) -> None:
        """Refuse pictures of a size that the model does not take; each size is tried, and told, once."""
        backbone, batch = self._opened.models.backbone, examples.batches()[0]
        shape = tuple(batch["pixel_values"].shape[1:]) if "pixel_values" in batch else ()
        if backbone is None or not shape or shape in self._tried:
            return
        self._tried.add(shape)
        if what := picture_problem(backbone, batch):
            made = hasattr(examples, "files")
            remedy = (
                "The base's preprocessor_config.json says the one, its config.json the other: get both "
                "from one place."
                if made
                else "Make them anew, of the size that the model takes."
            )
            self.problems.append(Problem(where, what, remedy))

    def _try_inputs(self, examples: Examples, where: str, *, reads: bool) -> None:
        """Refuse inputs that the model's forward names and cannot use, and padding where heads read; `reads`:
        whether anything reads features of these examples."""
        backbone = self._opened.models.backbone
        assert backbone is not None
        if what := odd_input_problem(backbone, examples.batches()[0]):
            self.problems.append(Problem(where, what, "Leave it out of the file."))
        elif reads and (what := padding_problem(backbone, examples)):
            remedy = 'Pad texts at their end; "text" data is padded so.'
            self.problems.append(Problem(where, what, remedy))

    def _try_padding(self, examples: Examples, where: str) -> None:
        """Refuse batches that are not what their texts are one by one, as statistics must be."""
        backbone = self._opened.models.backbone
        if backbone is not None and (found := moving_problem(backbone, examples)):
            self.problems.append(Problem(where, found.what, found.remedy))

    @property
    def _walks(self) -> bool:
        used = (
            strategies.get(self._spec.merge.type),
            *(calibrators.get(one.type) for one in self._spec.calibrate),
        )
        return any(issubclass(one, LayerRule) for one in used)

    @property
    def _reads_features(self) -> bool:
        """Whether some calibrator looks at what heads read."""
        used = (calibrators.get(one.type) for one in self._spec.calibrate)
        return any(not issubclass(one, LayerRule) for one in used)

    def _unfit(self, name: str, given: TaskSpec, head: LinearHead | None) -> list[Problem]:
        """A head that is asked for, and reads another number of features than the model gives."""
        tested = given.test is not None and metric(given.metric).reads_head
        if head is None or not (tested or given.head is not None or _needing_heads(self._spec)):
            return []
        try:
            if self._width is not None:
                refuse_misfit(name, head, self._width)
                self._refuse_pooled(name, head)
        except DataError as error:
            return [Problem(f"tasks.{name}.head", error.message, self._head_remedy() or error.remedy)]
        return []

    def _head_remedy(self) -> str:
        """What to do where the model answers with its own output head, which an expert or a metric needs."""
        asked = getattr(self._outline, "get_output_embeddings", lambda: None)
        if asked() is None:
            return ""
        return (
            "The base is run as a language model here, for an expert or a metric that needs its output head: "
            "merge the classifiers in a run of their own, or leave out this task's test and head."
        )

    @cached_property
    def _width(self) -> int | None:
        backbone = self._opened.models.backbone
        return None if backbone is None else features_width(backbone)

    def _refuse_pooled(self, name: str, head: LinearHead) -> None:
        """A head with a layer of its own reads the first token; a base with a pooler gives something else."""
        backbone = self._opened.models.backbone
        if head.dense is not None and backbone is not None and gives_pooled(backbone):
            raise DataError(
                f'task "{name}": the head has a layer of its own that reads the first token, and the base '
                "has a pooler on it, whose answers heads get",
                remedy="Give the base without its pooler, as save_pretrained writes a model that was opened "
                "with add_pooling_layer=False, or one with a classifier of this kind.",
            )

    def _attempt(self, where: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except MergingError as error:
            if any(known.what == error.message for known in self.problems):
                return None  # one file that all sources go by, told at the first of them
            self.problems += [Problem(where, error.message, error.remedy), *error.problems]
            return None

    def _examples(self, name: str, purpose: Purpose, source: Any) -> Examples | None:
        if source is None:
            return None
        return open_examples(
            source,
            task=name,
            purpose=purpose,
            base_folder=self._opened.side_files,
            seed=self._spec.seed,
            labelled=metric(self._spec.tasks[name].metric).reads_head,
        )

    def _own_head(self, name: str) -> LinearHead | None:
        """The expert's classifier, kept though nothing is said of its task."""
        try:
            return self._expert_head(name)
        except DataError:  # it has none, or one that is not linear
            return None

    def _expert_head(self, name: str) -> LinearHead:
        config = read_config(self._path(name)) or read_config(self._opened.side_files)
        found = expert_head(self._opened.heads.get(name, {}), task=name, config=config)
        return self._named(found, name)

    def _path(self, name: str) -> Path:
        return self._opened.inputs[f'expert "{name}"'].path

    def _named(self, head: LinearHead, name: str) -> LinearHead:
        """The expert's head with the names that its config gives to the classes."""
        head.names = head_names(read_config(self._path(name)), head.shape[0])
        return head

    def _head(self, name: str, given: TaskSpec, classes: tuple[str, ...]) -> LinearHead | None:
        if given.head is not None and given.head.type == "linear":
            return load_head(given.head.path, task=name)
        if given.head is not None and given.head.type == "zero_shot":
            base = self._opened.base_folder
            return zero_shot_head(given.head, task=name, base=base, known=classes)
        tensors = self._opened.heads.get(name, {})
        needing = _needing_heads(self._spec)
        tested = given.test is not None and metric(given.metric).reads_head
        if given.head is not None or (tensors and (needing or tested)):
            return self._expert_head(name)
        if tensors:
            return self._own_head(name)
        verb = "needs" if len(needing) == 1 and not tested else "need"
        if tested:
            needing = ["the test examples", *needing]
        if needing:
            raise DataError(
                f"{' and '.join(needing)} {verb} a head, and the expert's checkpoint has none",
                remedy='Give one: "head": {"type": "linear", "path": "..."}'
                + ("." if not tested else '; or a metric that reads none, such as "metric": "choice".'),
            )
        return None


def _needing_heads(spec: PipelineSpec) -> list[str]:
    """Methods of this spec that look at predictions."""
    methods: list[tuple[str, Any, str]] = [("strategy", strategies.get(spec.merge.type), spec.merge.type)]
    methods += [("calibrator", calibrators.get(one.type), one.type) for one in spec.calibrate]
    return [f'{kind} "{name}"' for kind, method, name in methods if "heads" in method.needs]
