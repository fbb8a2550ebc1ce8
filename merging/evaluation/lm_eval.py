"""lm_eval: scores of EleutherAI's harness (extra `lm-eval`), which brings its own data and prompts."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from merging.contracts.backbone import Backbone
from merging.data.task import Task
from merging.data.tokenizer import TextReader, text_reader
from merging.errors import DataError, Problem
from merging.evaluation.metric import Adapt, Metric, TaskScore
from merging.registry import did_you_mean


class LmEval(Metric):
    """The mean over the harness's tasks, one step in all."""

    reads_examples = False

    def measures(self, task: Task) -> bool:
        return True

    def problems(self, task: Task, backbone: Backbone | None) -> list[Problem]:
        where = f"tasks.{task.name}.metric"
        problems = []
        try:
            known = self._manager().all_tasks
            unknown = [name for name in self.settings.tasks if name not in known]
            problems += [
                Problem(f"{where}.tasks", f'the harness has no task "{name}"', did_you_mean(name, known))
                for name in unknown
            ]
            if _reader(backbone, where).kind == "encoder":
                what = 'metric "lm_eval" needs a model that writes text, and the base only reads it'
                problems.append(Problem(where, what, 'Use metric "accuracy" with a head.'))
        except DataError as error:
            problems.append(Problem(where, error.message, error.remedy))
        return problems

    def steps(self, task: Task) -> int:
        return 1

    def score(
        self, model: nn.Module, backbone: Backbone, task: Task, adapt: Adapt | None, step: Callable[[], None]
    ) -> TaskScore:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        asked = self.settings
        reader = _reader(backbone, f"tasks.{task.name}.metric")
        with contextlib.redirect_stdout(sys.stderr):  # the harness talks, and stdout is for results
            wrapped = HFLM(
                pretrained=model,
                tokenizer=reader.tokenizer,
                backend=reader.kind,
                batch_size=asked.batch_size,
                device=str(next(model.parameters()).device),
            )
            found = simple_evaluate(
                model=wrapped,
                tasks=list(asked.tasks),
                task_manager=self._manager(),
                num_fewshot=asked.shots,
                limit=asked.limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        step()
        return self._read(found, task.name)

    def _read(self, found: Any, task: str) -> TaskScore:
        """The mean of the wanted scores, out of all that the harness answers."""
        values, lower = [], set()
        for name in self.settings.tasks:
            row = found["results"][name]
            value = row.get(self.settings.metric)
            if not isinstance(value, int | float) or not math.isfinite(value):
                numbers = [key for key, one in row.items() if isinstance(one, int | float) and "," in key]
                raise DataError(
                    f'task "{task}": the harness gives no score "{self.settings.metric}" for "{name}"',
                    remedy=f"There are: {', '.join(numbers)}.",
                )
            values.append(float(value))
            higher = found.get("higher_is_better", {}).get(name, {})
            lower.add(higher.get(self.settings.metric.partition(",")[0]) is False)
        if len(lower) > 1:
            raise DataError(f'task "{task}": of some of the harness\'s tasks more is better, of others less')
        examples = sum(one["effective"] for one in found["n-samples"].values())
        return TaskScore("lm_eval", sum(values) / len(values), examples, lower_is_better=lower == {True})

    def _manager(self) -> Any:
        """Knows the wanted tasks: those of `include_path` alone where they are all there."""
        place = self.settings.include_path
        if place is not None:
            own = _task_manager(place, False)
            if all(name in own.all_tasks for name in self.settings.tasks):
                return own
        return _task_manager(place, True)


@lru_cache(maxsize=8)
def _task_manager(include_path: Path | None, with_defaults: bool) -> Any:
    """Reading the harness's own ten thousand tasks takes seconds."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DataError(
            'metric "lm_eval" needs the lm-eval harness', remedy="pip install 'merging[lm-eval]'"
        ) from error
    place = str(include_path) if include_path is not None else None
    return TaskManager(include_path=place, include_defaults=with_defaults)


def _reader(backbone: Backbone | None, where: str) -> TextReader:
    if backbone is None or backbone.folder is None:
        raise DataError(f"{where}: the base's architecture is not known")
    return text_reader(backbone.folder, where)
