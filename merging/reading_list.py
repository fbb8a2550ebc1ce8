"""What a run reads beside models: examples, heads and plug-ins, as inputs for the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from merging.data.spec import DataSpec
from merging.data.task import Examples, Task
from merging.opened import Input
from merging.spec import PipelineSpec
from merging.spec.plugins import plugin_file

MEASURED_ON = ("validation", "test")  # examples that decide scores, and no checkpoint


def deciding_inputs(spec: PipelineSpec, tasks: Mapping[str, Task]) -> dict[str, Input]:
    """What decides checkpoints: calibration examples and heads of the tasks, and the code of plug-ins."""
    found = dict(_examples(spec, tasks, ("calibration",)))
    for name, given in spec.tasks.items():
        if given.head is not None and given.head.type == "linear":
            found[f'task "{name}": head'] = Input(str(given.head.path), given.head.path, (given.head.path,))
    return {**found, **plugin_inputs(spec)}


def measuring_inputs(spec: PipelineSpec, tasks: Mapping[str, Task]) -> dict[str, Input]:
    """What only scores are measured on."""
    return dict(_examples(spec, tasks, MEASURED_ON))


def plugin_inputs(spec: PipelineSpec) -> dict[str, Input]:
    """The file of each plug-in; a package has its first one."""
    files = {name: plugin_file(name) for name in spec.plugins}
    return {
        f'plug-in "{name}"': Input(name, file.parent, (file,))
        for name, file in files.items()
        if file is not None
    }


def _examples(
    spec: PipelineSpec, tasks: Mapping[str, Task], purposes: tuple[str, ...]
) -> Iterator[tuple[str, Input]]:
    for name, given in spec.tasks.items():
        for purpose in purposes:
            source, task = getattr(given, purpose), tasks.get(name)
            examples: Examples | None = getattr(task, purpose) if task is not None else None
            if source is not None and examples is not None:
                yield f'task "{name}": {purpose}', _input(source, examples)


def _input(source: DataSpec, examples: Examples) -> Input:
    """Pictures are named one by one; of a data set on the hub there is only the revision asked for."""
    path, name = Path(source.path), str(source.path)
    if path.is_file():
        return Input(name, path, (path,))
    drawn = [file for file in getattr(examples, "files", ()) if isinstance(file, Path)]
    files = drawn or (sorted(path.rglob("*")) if path.is_dir() else [])
    revision = source.revision if source.type == "dataset" else None
    return Input(name, path, tuple(file for file in files if file.is_file()), not path.exists(), revision)
