"""load_spec and parse_spec: from text or a dict to a PipelineSpec, or to one error with every problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from merging.data.spec import DATA_TYPES, HEAD_TYPES, TaskSpec
from merging.data.zero_shot_spec import ZeroShotHeadSpec
from merging.errors import SpecError
from merging.evaluation.metric_spec import METRIC_TYPES
from merging.file_names import refuse_unnameable
from merging.registry import did_you_mean
from merging.settings import Settings
from merging.spec.component import AUTO, Component, Kind, read_component
from merging.spec.findings import Findings
from merging.spec.overrides import overridden
from merging.spec.paths import Paths, is_stream
from merging.spec.pipeline_spec import ExpertRef, ModelRef, OutputSpec, PipelineSpec
from merging.spec.plugins import import_plugin
from merging.spec.relations import check_relations
from merging.spec.text import parse_text, plain, read_text
from merging.spec.wording import described, join
from merging.working_folder import working_folder

_SCALARS = ("device", "memory", "precision", "seed", "plugins", "allow", "vocabulary", "notes")


def load_spec(path: str | Path, sets: Sequence[str] = ()) -> PipelineSpec:
    """The spec in a JSON or YAML file, or in what a pipe gives, with `--set` overrides.

    Raises SpecError with all problems at once."""
    path = Path(path)
    refuse_unnameable(path if path.is_absolute() else working_folder() / path)
    raw = parse_text(read_text(path), str(path), yaml_syntax=path.suffix.lower() != ".json")
    if is_stream(path):  # it lies nowhere: paths are relative to the working folder, and a name it has not
        return _parsed(raw, working_folder(), None, sets, str(path))
    return _parsed(raw, path.parent, path.stem, sets, str(path))


def parse_spec(raw: Mapping[str, Any], folder: Path, name: str, sets: Sequence[str] = ()) -> PipelineSpec:
    """The same from a dict; relative paths are relative to `folder`, and results go to `<name>-out` in it."""
    if not isinstance(raw, Mapping):
        raise SpecError(f'the spec "{name}" is a {type(raw).__name__}, expected an object')
    label = f'the spec "{name}"'
    refuse_unnameable(folder)
    return _parsed(plain(raw, label), folder, name, sets, label)


def _parsed(
    raw: dict[str, Any], folder: Path, name: str | None, sets: Sequence[str], label: str
) -> PipelineSpec:
    """`name`: of the output folder where the spec gives none; without, there is none."""
    reading = _Reading(overridden(raw, sets), folder)
    values = reading.values(default_output=None if name is None else f"{name}-out")
    if problems := reading.findings.problems():
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SpecError(f"{label} has {count}", problems=problems)
    return PipelineSpec(**values)


class _Reading:
    """One pass over the raw spec; a section that cannot be read is None, and the others are read still."""

    def __init__(self, raw: dict[str, Any], folder: Path) -> None:
        self.raw = raw
        self.findings = Findings()
        self.paths = Paths(folder, self.findings)

    def values(self, default_output: str | None) -> dict[str, Any]:
        """The fields of PipelineSpec."""
        fields = PipelineSpec.model_fields
        self.findings.keys("", PipelineSpec)
        scalars: dict[str, Any] = {
            key: self.findings.read(Annotated[fields[key].annotation, fields[key]], self.raw[key], key)
            for key in _SCALARS
            if key in self.raw
        }
        for index, plugin in enumerate(scalars.get("plugins") or ()):
            import_plugin(plugin, f"plugins.{index}", self.paths, self.findings)
        base = self._base()
        experts = self._experts()
        backbone = self._component("backbones", self.raw.get("backbone", AUTO), "backbone")
        merge = self._merge()
        calibrate = self._calibrate()
        tasks = self._tasks()
        output = self._output(default_output)
        for key in self.raw:
            if key not in fields:
                self.findings.unknown("", key, self.raw[key])
        check_relations(self.raw, base, experts, merge, calibrate, tasks, output, self.findings)
        return {
            **scalars,
            "base": base,
            "experts": experts,
            "backbone": backbone,
            "merge": merge,
            "calibrate": tuple(component for component in calibrate if component is not None),
            "tasks": tasks,
            "output": output,
        }

    def _base(self) -> ModelRef | None:
        if "base" not in self.raw:
            self.findings.add("base", "missing", "The folder or hub id of the model that was fine-tuned.")
            return None
        ref = self._reference(ModelRef, self.raw["base"], "base")
        if ref is None:
            return None
        where = "base" if isinstance(self.raw["base"], str) else "base.model"
        return ref.model_copy(update={"model": self.paths.model(ref.model, where, revision=ref.revision)})

    def _experts(self) -> dict[str, ExpertRef | None]:
        experts: dict[str, ExpertRef | None] = {}
        for name, value in self._object("experts", "task name -> a folder, a hub id or an object").items():
            where = join("experts", name)
            self._check_name(name, where)
            ref = experts[name] = self._reference(ExpertRef, value, where)
            if ref is None:
                continue
            key = "adapter" if ref.adapter is not None else "model"
            place = where if isinstance(value, str) else f"{where}.{key}"
            found = self.paths.model(getattr(ref, key), place, revision=ref.revision)
            experts[name] = ref.model_copy(update={key: found})
        return experts

    def _check_name(self, name: str, where: str) -> None:
        if not name.strip() or name in (".", "..") or not name.isprintable() or set(name) & set("/\\"):
            self.findings.add(
                where,
                "is not a usable name: results of this expert are kept in files named after it",
                'Use letters, digits, "-", "_", and no "/".',
            )
        elif len(name.encode()) > 150:
            self.findings.add(where, f"is too long a name: {len(name.encode())} bytes, expected at most 150")

    def _component(self, kind: Kind, value: object, where: str) -> Component | None:
        return read_component(kind, value, where, self.findings, self.paths)

    def _merge(self) -> Component | None:
        if "merge" not in self.raw:
            self.findings.add(
                "merge", "missing", 'Like {"type": "task_arithmetic"}; see `merging list strategies`.'
            )
            return None
        return self._component("strategies", self.raw["merge"], "merge")

    def _calibrate(self) -> list[Component | None]:
        value = self.raw.get("calibrate")
        if value is None:
            return []
        if not isinstance(value, list):
            return [self._component("calibrators", value, "calibrate")]
        return [
            self._component("calibrators", item, f"calibrate.{index}") for index, item in enumerate(value)
        ]

    def _tasks(self) -> dict[str, TaskSpec | None]:
        described_as = "expert's name -> its calibration, test and head"
        return {
            name: self._task(value, join("tasks", name))
            for name, value in self._object("tasks", described_as).items()
        }

    def _task(self, value: object, where: str) -> TaskSpec | None:
        if not isinstance(value, dict):
            expected = "an object with calibration, test or head"
            self.findings.add(where, f"found {described(value)}, expected {expected}")
            return None
        parts = {
            "calibration": self._variant(DATA_TYPES, value.get("calibration"), join(where, "calibration")),
            "validation": self._variant(DATA_TYPES, value.get("validation"), join(where, "validation")),
            "test": self._variant(DATA_TYPES, value.get("test"), join(where, "test")),
            "head": self._variant(HEAD_TYPES, value.get("head"), join(where, "head")),
        }
        metric = value.get("metric")
        if metric is not None:
            asked = {"type": metric} if isinstance(metric, str) else metric
            parts["metric"] = self._variant(METRIC_TYPES, asked, join(where, "metric"))
        rest = {key: item for key, item in value.items() if key not in (*parts, "metric")}
        task = self.findings.read(TaskSpec, rest, where)
        return task.model_copy(update=parts) if task is not None else None

    def _variant(self, types: Mapping[str, type[Any]], value: object, where: str) -> Settings | None:
        """One of several kinds of object, told apart by `type`, with its path resolved."""
        if value is None:
            return None
        if not isinstance(value, dict):
            self.findings.add(where, f"found {described(value)}, expected an object", 'Like {"type": "..."}.')
            return None
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in types:
            missing = "missing" if "type" not in value else f"found {described(kind)}, which is not a type"
            remedy = did_you_mean(kind, types) if isinstance(kind, str) else f"valid: {', '.join(types)}"
            self.findings.add(join(where, "type"), missing, remedy)
            return None
        spec: Settings | None = self.findings.read(types[kind], value, where)
        if isinstance(spec, ZeroShotHeadSpec):
            return self._zero_shot(spec, where)
        key = "include_path" if kind == "lm_eval" else "path"
        path = getattr(spec, key, None)
        if spec is None or path is None:
            return spec
        wanted: Literal["file", "folder"] = "folder" if kind in ("images", "lm_eval") else "file"
        place = join(where, key)
        if str(value[key]).strip() == "":
            self.findings.add(place, f"found an empty text, expected a {wanted}")
            return None
        if kind == "dataset":
            found: Any = self.paths.model(path, place, revision=getattr(spec, "revision", None))
        else:
            found = self.paths.existing(path, place, wanted)
        return spec.model_copy(update={key: found})

    def _zero_shot(self, spec: ZeroShotHeadSpec, where: str) -> ZeroShotHeadSpec:
        found: dict[str, Any] = {}
        if isinstance(spec.classes, Path):
            found["classes"] = self.paths.existing(spec.classes, join(where, "classes"), "file")
        if spec.model is not None:
            found["model"] = self.paths.model(spec.model, join(where, "model"))
        return spec.model_copy(update=found)

    def _output(self, default: str | None) -> OutputSpec | None:
        value = self.raw.get("output")
        value = {"path": value} if isinstance(value, str) else value
        output = self.findings.read(OutputSpec, {} if value is None else value, "output")
        if output is None:
            return None
        given = output.path or default
        return output.model_copy(update={"path": given and self.paths.absolute(given)})

    def _reference(self, kind: type[Any], value: object, where: str) -> Any:
        if not isinstance(value, str | dict):
            expected = "a folder, a hub id or an object"
            self.findings.keys(where, kind)
            self.findings.add(where, f"found {described(value)}, expected {expected}")
            return None
        return self.findings.read(kind, value, where)

    def _object(self, key: str, meaning: str) -> dict[str, Any]:
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.findings.add(key, f"found {described(value)}, expected an object: {meaning}")
            return {}
        return value
