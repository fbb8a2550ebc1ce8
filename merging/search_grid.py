"""`--sweep merge.scale=0.1:1.0:0.1`: which values a search tries, and the spec at each of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from merging.errors import Problem, SpecError
from merging.registry import did_you_mean
from merging.settings import Weight
from merging.spec import PipelineSpec
from merging.spec.component import Component, read_component
from merging.spec.findings import Findings
from merging.spec.overrides import parse_set, put_
from merging.spec.relations import check_relations
from merging.spec.text import json_value
from merging.spec.wording import described, join

MAX_POINTS = 200
EXAMPLE = "merge.scale=0.1:1.0:0.1 or merge.density=0.1,0.2,0.5"


@dataclass(frozen=True)
class Axis:
    """One swept value: its path in the spec, and what it takes in turn."""

    path: str
    values: tuple[Any, ...]


def axes_of(sweeps: Mapping[str, Sequence[Any]] | Sequence[str]) -> tuple[Axis, ...]:
    """From texts (`PATH=START:STOP:STEP`, `PATH=A,B,C`) or a mapping. Raises SpecError with all problems."""
    axes: list[Axis] = []
    problems: list[Problem] = []
    texts = [sweeps] if isinstance(sweeps, str) else sweeps
    pairs = texts.items() if isinstance(texts, Mapping) else [(text, None) for text in texts]
    for text, values in pairs:
        try:
            if not isinstance(text, str):
                raise ValueError(f"found {described(text)}, expected a text such as {EXAMPLE}")
            axis = _axis(text) if values is None else _checked(text, _listed(values))
            if any(axis.path == other.path for other in axes):
                raise ValueError("this path is swept twice; give all its values in one --sweep")
            axes.append(axis)
        except ValueError as error:
            problems.append(Problem(f"--sweep {text}", str(error)))
    if not texts:
        problems.append(Problem("--sweep", f"there is nothing to try; expected {EXAMPLE}"))
    if problems:
        raise SpecError("what --sweep asks for cannot be tried", problems=problems)
    # The merge changes slowest: a point that differs in its calibration only is not merged again.
    return tuple(sorted(axes, key=lambda axis: axis.path.startswith("calibrate")))


def grid(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """All points; the last axis changes fastest. Raises SpecError if they are too many."""
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MAX_POINTS:
        sizes = " x ".join(f"{len(axis.values)} of {axis.path}" for axis in axes)
        raise SpecError(
            f"--sweep asks for {count} points ({sizes}); at most {MAX_POINTS} are tried",
            remedy="Take larger steps, or sweep one value after the other.",
        )
    paths = [axis.path for axis in axes]
    return [
        dict(zip(paths, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
    ]


def specs_at(spec: PipelineSpec, points: Sequence[Mapping[str, Any]]) -> list[PipelineSpec]:
    """The spec at each point, checked like any other. Raises SpecError with every problem of any point."""
    specs: list[PipelineSpec] = []
    problems: list[Problem] = []
    for values in points:
        findings = Findings()
        specs.append(_at(spec, values, findings))
        problems += findings.problems()
    if problems:
        raise SpecError("what --sweep asks for is not a spec", problems=list(dict.fromkeys(problems)))
    return specs


def _at(spec: PipelineSpec, values: Mapping[str, Any], findings: Findings) -> PipelineSpec:
    raw = spec.model_dump(mode="json")
    single = len(raw["calibrate"]) == 1
    if single:
        raw["calibrate"] = raw["calibrate"][0]
    for path, value in values.items():
        steps, _ = parse_set(f"{path}=0")
        if steps[0] == "calibrate" and steps[1].isdecimal() and single:
            raw["calibrate"] = [raw["calibrate"]]
            single = False
        try:
            put_(raw, steps, value)
        except ValueError as error:
            findings.add(path, str(error))
            return spec
    merge = read_component("strategies", raw["merge"], "merge", findings)
    calibrate = _calibrators(raw["calibrate"], findings)
    for name in raw["experts"].keys() - spec.experts.keys():
        findings.add(
            join("experts", name), "there is no expert of this name", did_you_mean(name, spec.experts)
        )
    experts = {
        name: ref.model_copy(update={"weight": _weight(raw["experts"][name], name, findings)})
        for name, ref in spec.experts.items()
    }
    if findings or merge is None:
        return spec
    check_relations(raw, spec.base, experts, merge, calibrate, spec.tasks, spec.output, findings)
    kept = tuple(component for component in calibrate if component is not None)
    return spec.model_copy(update={"merge": merge, "calibrate": kept, "experts": experts})


def _calibrators(raw: Any, findings: Findings) -> list[Component | None]:
    if not isinstance(raw, list):
        return [read_component("calibrators", raw, "calibrate", findings)]
    return [
        read_component("calibrators", item, f"calibrate.{place}", findings) for place, item in enumerate(raw)
    ]


def _weight(raw: Mapping[str, Any], name: str, findings: Findings) -> Any:
    return findings.read(Weight, raw["weight"], join("experts", name, "weight"))


def _axis(text: str) -> Axis:
    try:
        steps, value = parse_set(text)
    except ValueError:
        raise ValueError(f"expected PATH=VALUES, such as {EXAMPLE}") from None
    path, values = join("", *steps), text[_end_of_path(text) + 1 :].strip()
    if not values:
        raise ValueError(f"no values are given; expected {EXAMPLE}")
    if isinstance(value, list):
        return _checked(path, value)
    if ":" in values:
        return _checked(path, _range(values))
    return _checked(path, [_plain(part.strip()) for part in values.split(",")])


def _listed(values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"found {described(values)}, expected a list of the values to try")
    return list(values)


def _end_of_path(text: str) -> int:
    match = re.match(r"""(?:"[^"]*"|'[^']*'|[^"'=])*""", text)
    return match.end() if match else 0


def _plain(text: str) -> Any:
    if not text:
        raise ValueError("there is an empty value between two commas")
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return text


def _range(text: str) -> list[float | int]:
    """Both ends included; in decimal, so that 0.1:0.5:0.1 holds 0.3 and not 0.30000000000000004."""
    parts = [part.strip() for part in text.split(":")]
    try:
        numbers = [Decimal(part) for part in parts]
    except InvalidOperation:
        numbers = []
    if len(numbers) != 3 or not all(number.is_finite() for number in numbers):
        raise ValueError(f'"{text}" is not a range of numbers; expected START:STOP:STEP, such as 0.1:1.0:0.1')
    start, stop, step = numbers
    if not step or (stop - start) * step < 0:
        raise ValueError(
            f'the range "{text}" holds nothing: steps of {step} do not lead from {start} to {stop}'
        )
    count = int((stop - start) / step) + 1
    if count > MAX_POINTS:
        raise ValueError(f'the range "{text}" has {count} values; at most {MAX_POINTS} points are tried')
    whole = all(re.fullmatch(r"[-+]?\d+", part) for part in parts)
    values = [start + step * place for place in range(count)]
    return [int(value) for value in values] if whole else [float(value) for value in values]


def _checked(path: str, values: list[Any]) -> Axis:
    steps, _ = parse_set(f"{path}=0")
    weight = steps[0] == "experts" and len(steps) == 3 and steps[2] == "weight"
    if not weight and (steps[0] not in ("merge", "calibrate") or len(steps) < 2):
        raise ValueError("a sweep changes settings: merge.NAME, calibrate.NAME, or experts.NAME.weight")
    if steps[-1] in ("type", "model", "revision", "match"):
        raise ValueError(f'"{steps[-1]}" cannot be swept, only values of settings can')
    if not values:
        raise ValueError("there are no values to try")
    bad = next((value for value in values if isinstance(value, dict)), None)
    if bad is not None:
        raise ValueError(f"found {described(bad)}, expected single values")
    unique = [value for place, value in enumerate(values) if value not in values[:place]]
    return Axis(path, tuple(unique))
