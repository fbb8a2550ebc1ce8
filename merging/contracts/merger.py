"""Merger: turns base and experts into one model. TensorMerger sees one parameter at a time.

Shape letters: N experts, S the shape of the parameter (or of a block of its rows).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from merging.contracts.method import Method, Progress, silent
from merging.errors import MergingError, Problem, RuleError, SpecError
from merging.layer_settings import LayerSettings, merged_names

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.contracts.models import Models
    from merging.contracts.vectors import TaskVectors
    from merging.costs.cost import Cost
    from merging.costs.sizes import Sizes
    from merging.data.task import CalibrationData
    from merging.low_rank import LowRank
    from merging.ranks import Ranks

_STOPPED = 143  # exit code that a SIGTERM brings, which is no fault of a rule's


class Merger(Method, ABC):
    """Base and experts in, one model out, written tensor by tensor."""

    by_layer: ClassVar[frozenset[str] | None] = frozenset()  # settings that may differ by tensor; None: all
    layers: LayerSettings = LayerSettings()  # how they differ; whoever runs the merge sets it before
    together: ClassVar[bool] = (
        False  # whether `merge` knows of other processes of its run, and shares the work
    )
    ranks: Ranks | None = None  # these processes; None: there is one

    @abstractmethod
    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        """Write every tensor of the base, merged, to `sink` (which the caller opens and closes)."""

    @property
    def shares(self) -> bool:
        """Whether `merge` does only this process's share; else the first process does all."""
        return self.together

    def settings_for(self, name: str) -> Any:
        """The settings for one tensor of the checkpoint."""
        return self.layers.settings_for(name, self.settings)

    @classmethod
    def coefficients(cls, settings: Any, weights: Mapping[str, float]) -> dict[str, float] | None:
        """Each expert's factor in the result, where the method has such a thing; printed by `plan`."""
        return None

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        """What is wrong with these settings for experts of these weights; asked before any work."""
        if not cls.weighted and any(weight != 1 for weight in weights.values()):
            return [f'{cls.name or cls.__name__} does not use weights; leave out "weight"']
        return []


class MergeNotes(dict[str, object]):
    """What a method wants the report to say about its run (health of solves, tensors left alone, ...)."""


class TensorMerger(Merger):
    """A rule for one parameter at a time. Subclass it and write `combine`; nothing else is needed.

    In `combine`, `self.settings` are the validated settings, `self.experts` the experts' names in the order
    of `deltas_NS` (sorted, so that the order of listing changes nothing), `self.weights_N` their weights.
    """

    needs = frozenset({"base"})
    by_layer = None
    precision: ClassVar[Literal["float32", "float64"]] = "float32"
    differences: ClassVar[bool] = True  # False: `deltas_NS` are the experts' weights, not their task vectors;
    # and if "base" is not in `needs`, `base_S` has a shape and no data
    linear: ClassVar[bool] = False  # True: the result is the base plus the task vectors times `coefficients`,
    # or the experts' weights times them; changes of low rank are then added up as factors
    experts: tuple[str, ...] = ()
    weights_N: Tensor
    vectors: TaskVectors  # what is being walked: in `prepare`, and behind `combine`

    @property
    def elementwise(self) -> bool:
        """True: `combine` may be handed row blocks of a parameter, valid during the call, to bound memory.

        Parameters may then be merged in several threads at once, and blocks are not checked for NaN and
        infinity: `combine` must pass them on, for the sink to find.
        """
        return False

    passes: ClassVar[float] = 8.0  # operations that an entry of each model goes through, for `plan`

    @property
    def walks(self) -> int:
        """How often all models are read, for `plan`."""
        return 1

    def arrays(self, experts: int) -> float:
        """How many arrays of a parameter (or of a row block) are held at most, in `precision`, for `plan`."""
        return 2.0 * experts + 4.0

    def cost(self, sizes: Sizes) -> Cost:
        from merging.costs.tensor_law import tensor_rule_cost

        return tensor_rule_cost(self, sizes)

    def prepare(self, vectors: TaskVectors) -> None:
        """An optional look at all task vectors before the first `combine`, for whole-model quantities.

        With `together = True` it must add up what each process visits (`vectors.total_`, `vectors.gathered`).
        """

    @property
    def shares(self) -> bool:
        return self.together or type(self).prepare is TensorMerger.prepare

    def survey(self, name: str) -> None:
        """An optional look at one parameter (`self.vectors.blocks(name)`) before it is combined."""

    @abstractmethod
    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        """The merged parameter, of the base's shape; `deltas_NS` are expert minus base, in `precision`."""

    def uniforms(self, name: str, deltas_NS: Tensor) -> Tensor:
        """Random numbers in (0, 1), one per entry of `deltas_NS`, for the block that is being walked.

        They depend on the seed, the names of expert and tensor, and the entry's place; on nothing else.
        """
        import torch

        from merging.draws import uniforms

        shape, place = deltas_NS.shape[1:], self.vectors.offset
        return torch.stack([uniforms(shape, place, self.seed, expert, name) for expert in self.experts])

    def draws(self, name: str, deltas_NS: Tensor, probability: float) -> Tensor:
        """Mask of the entries whose random number is below `probability`: `uniforms` < it, in less time."""
        import torch

        from merging.draws import below

        shape, place = deltas_NS.shape[1:], self.vectors.offset
        return torch.stack(
            [below(probability, shape, place, self.seed, expert, name) for expert in self.experts]
        )

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.threads import in_threads

        rules = self._rules(merged_names(models))
        for rule in dict.fromkeys(rules.values()):
            rule._look_at(models, progress)
        names = _share(models, self.ranks)
        total = sum(models.base.spec(name).bytes for name in names)
        done = 0

        def write(name: str) -> int:
            rule = rules.get(name)
            change = _change(name, rule, models) if sink.takes_changes else None
            if change is not None:
                sink.write_change(name, change)
            elif rule is not None:
                rule._write(name, sink)
            else:
                sink.write(name, models.base.read(name))
            return models.base.spec(name).bytes

        for written in in_threads(
            write, names, min((rule.vectors.threads for rule in rules.values()), default=1)
        ):
            done += written
            progress("merge", done, total)
        return MergeNotes()

    @property
    def surveys(self) -> bool:
        """Whether a parameter is read twice in turn, by `survey` and for `combine`."""
        return type(self).survey is not TensorMerger.survey

    def _write(self, name: str, sink: CheckpointSink) -> None:
        with self.vectors.kept() if self.surveys else nullcontext():
            self.survey(name)
            for rows, base_S, deltas_NS in self.vectors.blocks(name):
                sink.write(name, self._combined(name, base_S, deltas_NS), rows)

    def _rules(self, names: Iterable[str]) -> dict[str, TensorMerger]:
        """Tensor -> the rule that merges it: this one, or a copy of it with the tensor's own settings.

        Each of them looks at the whole model, as if all of it were merged with its settings.
        """
        rules, known = {}, [self]
        for name in names:
            settings = self.settings_for(name)
            rule = next((one for one in known if one.settings == settings), None)
            if rule is None:
                rule = copy(self)
                rule.settings = settings
                known.append(rule)
            rules[name] = rule
        return rules

    def _look_at(self, models: Models, progress: Progress) -> None:
        import torch

        from merging.contracts.vectors import TaskVectors
        from merging.ranks import ALONE

        problems = [Problem("merge", problem) for problem in self.check(self.settings, models.weights)]
        if problems:
            raise SpecError(f'strategy "{self.name}" cannot merge these experts', problems=problems)
        vectors = TaskVectors(
            models,
            getattr(torch, self.precision),
            blocked=self.elementwise,
            differences=self.differences,
            base="base" in self.needs,
            progress=progress,
            ranks=self.ranks or ALONE,
            limits=self.limits,
        )
        self.vectors, self.experts = vectors, vectors.experts
        self.weights_N = torch.tensor([models.weights[task] for task in self.experts], dtype=vectors.dtype)
        self.prepare(vectors)

    def _combined(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        try:
            merged_S = self.combine(name, base_S, deltas_NS)
        except (MergingError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code == _STOPPED:
                raise
            raise RuleError(
                f'strategy "{self.name}" failed on tensor "{name}": {type(error).__name__}: {error}',
                remedy="Run with --debug for the traceback.",
            ) from error
        if not _fits(merged_S, base_S):
            raise RuleError(
                f'strategy "{self.name}" returned {_described(merged_S)} for tensor "{name}", '
                f"expected a floating-point tensor of shape {tuple(base_S.shape)} that holds values"
            )
        return merged_S


def _share(models: Models, ranks: Ranks | None) -> list[str]:
    """The tensors that this process is to write."""
    names = list(models.base.names())
    return names if ranks is None else ranks.mine(names, [models.base.spec(name).bytes for name in names])


def _change(name: str, rule: TensorMerger | None, models: Models) -> LowRank | None:
    """What a merge changes of the base's tensor, as factors; None where it must be computed by entries."""
    from merging.finite import refuse_unless_finite
    from merging.low_rank import summed, zero

    if rule is None:
        spec = models.base.spec(name)
        rows = spec.shape[0] if spec.shape else 1
        return zero(rows, spec.elements // max(1, rows))
    shares = rule.coefficients(rule.settings, models.weights) if rule.linear else None
    if shares is None or not (rule.differences or math.isclose(sum(shares.values()), 1.0, abs_tol=1e-12)):
        return None
    terms = []
    for task in rule.experts:
        term = models.experts[task].factors(name)
        if term is None:
            return None
        for factor in (term.left_OR, term.right_RI):
            refuse_unless_finite(factor, label=models.experts[task].label, name=name)
        terms.append(term)
    return summed(terms, [shares[task] for task in rule.experts])


def _fits(value: object, base_S: Tensor) -> bool:
    """Whether a sink can take it for the base's tensor."""
    import torch

    if not isinstance(value, torch.Tensor) or value.shape != base_S.shape or value.is_meta:
        return False
    return value.is_floating_point() or not base_S.is_floating_point()


def _described(value: object) -> str:
    import torch

    if not isinstance(value, torch.Tensor):
        shape = getattr(value, "shape", None)
        named = f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")
        return f"{named} of shape {tuple(shape)}" if isinstance(shape, tuple) else named
    empty = " without values (on the meta device)" if value.is_meta else ""
    return f"shape {tuple(value.shape)}, dtype {str(value.dtype).removeprefix('torch.')}{empty}"
