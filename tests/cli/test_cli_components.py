"""`merging list`, `merging show`, help and version."""

from __future__ import annotations

import pytest

import merging


def test_list_names_every_method(merging_command):
    answer = merging_command("list")

    for kind in ("strategies", "calibrators", "backbones"):
        for name in merging.available(kind):
            assert name in answer.out


def test_list_of_one_kind_as_json(merging_command):
    answer = merging_command("list", "strategies", "--json")

    found = {method["name"]: method for method in answer.json()["strategies"]}
    assert tuple(found) == merging.available("strategies")
    assert found["regmean"]["needs"] == ["base", "data"]


def test_show_tells_settings_with_defaults_and_bounds(merging_command):
    answer = merging_command("show", "featcal")

    for words in ("ridge", "0.05", "0 <= number <= 1", "arXiv:2605.13030", '"calibrate": {"type": "featcal"'):
        assert words in answer.out


@pytest.mark.parametrize(
    "name", [name for kind in ("strategies", "calibrators", "backbones") for name in merging.available(kind)]
)
def test_every_method_has_a_page(name, merging_command):
    answer = merging_command("show", name)

    assert answer.code == 0
    assert answer.out.startswith(f"{name}\n")
    assert "cannot be loaded" not in answer.out


def test_version(merging_command):
    assert merging_command("--version").out == f"merging {merging.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "demo",
        "list",
        "show",
        "inspect",
        "compare",
        "pipeline",
        "pipeline run",
        "pipeline plan",
        "pipeline validate",
        "pipeline schema",
    ],
)
def test_help_ends_with_an_example(command, merging_command):
    answer = merging_command(*command.split(), "--help")

    assert answer.code == 0
    assert "Example: merging" in answer.out.strip().splitlines()[-1] + answer.out.strip().splitlines()[-2]


def test_the_bare_command_shows_help(merging_command):
    answer = merging_command()

    assert answer.code == 0
    assert "pipeline" in answer.out
