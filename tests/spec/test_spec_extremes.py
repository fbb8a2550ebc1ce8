"""Numbers, sizes and paths of a spec beyond all measure: told by their place, in few words."""

from __future__ import annotations

from pathlib import Path

import pytest

from merging.errors import SpecError
from merging.spec.reading import parse_spec
from merging.spec.text import parse_text


def refused(text: str, sets: tuple[str, ...] = (), *, yaml_syntax: bool = False) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(parse_text(text, "spec", yaml_syntax=yaml_syntax), Path("/nowhere"), "spec", sets)
    assert len(str(caught.value)) < 1500
    return str(caught.value)


@pytest.mark.parametrize("memory", ["1e300", "1e308", "9" * 900, "1e19"])
def test_a_size_that_is_too_large_is_told_as_that(memory: str) -> None:
    said = refused(f'{{"memory": {memory}}}')

    assert "memory: found" in said
    assert "expected less than 2^63" in said
    assert "at least one byte" not in said


@pytest.mark.parametrize("memory", ["0", "-5", "0.5"])
def test_a_size_that_is_too_small_is_told_as_that(memory: str) -> None:
    assert "expected at least one byte" in refused(f'{{"memory": {memory}}}')


@pytest.mark.parametrize("memory", ["१२GB", "１２GB", "12ＧＢ"])
def test_digits_of_other_scripts_are_no_size(memory: str) -> None:
    assert "memory: found the text" in refused(f'{{"memory": "{memory}"}}')


@pytest.mark.parametrize("yaml_syntax", [False, True])
def test_a_number_of_thousands_of_digits_is_told_with_its_place(yaml_syntax: bool) -> None:
    text = '{"merge": {"type": "ties", "scale": [1, ' + "9" * 5000 + "]}}"

    said = refused(text, yaml_syntax=yaml_syntax)

    assert "merge.scale.1: found a number of 5000 digits" in said


def test_such_a_number_from_the_command_line_too() -> None:
    assert "memory: found a number of 5000 digits" in refused('{"seed": 1}', ("memory=" + "9" * 5000,))


@pytest.mark.parametrize(
    "asked",
    ["a" + ".a" * 5000, "base." + "a." * 5000 + "a=1", "seed." + "a." * 3000 + "a=1", "x" * 5000 + "=1"],
    ids=["no value", "into an object", "into a number", "a long key"],
)
def test_what_set_asks_for_is_not_echoed_in_full(asked: str) -> None:
    refused('{"base": "b", "seed": 1}', (asked,))
