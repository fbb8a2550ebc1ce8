"""Plug-ins that a spec names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from merging.errors import SpecError
from merging.spec import parse_spec

RULE = """
import merging
from pydantic import Field
{extra}
@merging.strategy("{name}")
class Rule(merging.TensorMerger):
    "A rule from outside."

    class Settings(merging.Settings):
        sharpness: float = Field({default}, ge=0, description="How sharp.")

    def combine(self, name, base_S, deltas_NS):
        return base_S
"""


def write_rule(path: Path, name: str, default: float = 1.0, extra: str = "") -> None:
    path.write_text(RULE.format(name=name, default=default, extra=extra))


def spec_of(folder, plugin, rule, **settings):
    raw = {
        "base": "org/base",
        "experts": {"a": "org/a"},
        "merge": {"type": rule, **settings},
        "plugins": [plugin],
    }
    return parse_spec(raw, folder, "spec")


@pytest.mark.parametrize("plugin", ["rule_a", "rule_a.py", "./rule_a.py"])
def test_a_plugin_beside_the_spec_is_found(plugin, folder):
    write_rule(folder / "rule_a.py", f"rule_{len(plugin)}")

    spec = spec_of(folder, plugin, f"rule_{len(plugin)}", sharpness=2)

    assert spec.merge.settings.sharpness == 2
    assert str(folder) not in sys.path


def test_a_plugin_may_import_its_neighbours(folder):
    (folder / "neighbour_of_rule.py").write_text("VALUE = 3\n")
    write_rule(folder / "rule_n.py", "rule_n", extra="from neighbour_of_rule import VALUE")

    assert spec_of(folder, "rule_n", "rule_n").merge.type == "rule_n"


def test_a_plugin_called_like_a_module_of_python_replaces_nothing(folder):
    import json

    write_rule(folder / "json.py", "rule_json")

    spec_of(folder, "json", "rule_json")

    assert sys.modules["json"] is json


def test_each_folder_has_its_own_plugin_of_the_name(folder):
    for name, default in (("one", 1.0), ("two", 2.0)):
        (folder / name).mkdir()
        write_rule(folder / name / "rule_f.py", "rule_f", default)

    found = [
        spec_of(folder / name, "rule_f", "rule_f").merge.settings.sharpness for name in ("one", "two", "one")
    ]

    assert found == [1.0, 2.0, 1.0]


def test_a_spec_is_equal_to_itself_with_its_plugins(folder):
    write_rule(folder / "rule_e.py", "rule_e")

    assert spec_of(folder, "rule_e", "rule_e") == spec_of(folder, "rule_e", "rule_e")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import not_there_at_all",
            r'"rule_bad" cannot be imported: ModuleNotFoundError.*rule_bad\.py, line 1',
        ),
        ("def f(:", r'"rule_bad" cannot be imported: SyntaxError'),
        ("raise SystemExit(3)", r'"rule_bad" cannot be imported: SystemExit'),
        ("import merging\n@merging.strategy('ties')\nclass A: pass", "already defined"),
    ],
)
def test_a_plugin_that_fails_is_named(text, words, folder):
    (folder / "rule_bad.py").write_text(text)

    with pytest.raises(SpecError, match=words):
        spec_of(folder, "rule_bad", "average")


@pytest.mark.parametrize("plugin", ["no_such_module_here", "no_such.py", "no/such.py", "", "a b"])
def test_a_plugin_that_is_missing_is_named(plugin, folder):
    with pytest.raises(SpecError, match=r"plugins\.0"):
        spec_of(folder, plugin, "average")


def test_settings_of_plugins_are_checked_like_others(folder):
    write_rule(folder / "rule_s.py", "rule_s")

    with pytest.raises(SpecError, match=r"(?s)merge\.sharpnes: unknown key.*sharpness"):
        spec_of(folder, "rule_s", "rule_s", sharpnes=1)


def test_a_file_that_is_not_called_py_is_no_plugin(folder):
    (folder / "rules.txt").write_text("import nothing")

    with pytest.raises(SpecError, match=r'"\./rules\.txt" is not called \.py'):
        spec_of(folder, "./rules.txt", "average")
