"""Files that are not a spec: one or two lines each, with the place."""

from __future__ import annotations

import pytest

from merging.errors import SpecError
from merging.spec import load_spec, parse_spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "spec.json is empty"),
        ("  \n", "spec.json is empty"),
        ('{\n "base": "b",\n}', r"line 3, column 1: .*(comma|trailing)"),
        ('{\n "base": "b"\n "merge": {}}', r"line 3, column 2"),
        ('["a"]', "found a list at the top"),
        ("3", "found the number 3 at the top"),
        ("base: b\n", r"line 1, column 1: .*\n.*Is it YAML\? Then its name has to end in \.yaml"),
        ('{"seed": 1, "seed": 2}', '"seed" is given twice'),
        ('{"seed": NaN}', "NaN"),
        ('{"seed": -Infinity}', "-Infinity"),
        ('{"seed": 1e999}', "finite"),
        ('{"notes": "\\ud800"}', "not proper text"),
        ('{"base": "a\\u0000b"}', "not proper text"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 60 + "1" + "}" * 60, "nested too deeply"),
        ('{"seed": ' + "9" * 5000 + "}", "spec.json"),
        (" " * (1 << 20) + "{}", "too large for a spec"),
    ],
)
def test_bad_json_is_one_clear_error(text, words, write):
    with pytest.raises(SpecError, match=words) as caught:
        load_spec(write(text))

    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", "nothing but comments"),
        ("base: b\n  merge: {", r"line 2, column \d+"),
        ("base: b\nbase: c\n", r"line 2, column 1: the key \"base\" is given twice"),
        ("- a\n", "found a list at the top"),
        ("just words\n", "found the text"),
        ("1: x\n", "the number 1 as a key"),
        ("experts:\n  yes: x\n", "experts: true as a key"),
        ("? [a]\n: x\n", "line 1"),
        ("seed: .nan\n", "finite"),
        ("seed: !!python/object:os.system x\n", "line 1"),
        ("seed: !!set {a, b}\n", "found a set"),
        ("notes: &a [*a]\n", "nested too deeply"),
        ("[" * 20_000, "nested too deeply"),
        ("base: !!binary x\n", "spec.yaml"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n"
                for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "too large",
        ),
    ],
)
def test_bad_yaml_is_one_clear_error(text, words, write):
    with pytest.raises(SpecError, match=words) as caught:
        load_spec(write(text, "spec.yaml"))

    assert len(str(caught.value).splitlines()) <= 2


def test_a_missing_file_is_answered_with_its_nearest_sibling(write, folder, good):
    write(good)

    with pytest.raises(SpecError, match=r"did you mean \".*spec\.json\""):
        load_spec(folder / "spce.json")


def test_a_folder_is_no_spec(folder, write, good):
    write(good)

    with pytest.raises(SpecError, match=r"is a folder.*\n.*spec\.json"):
        load_spec(folder)


def test_a_binary_file_is_no_spec(folder):
    (folder / "spec.json").write_bytes(b"\x80\x04\x95")

    with pytest.raises(SpecError, match="not UTF-8"):
        load_spec(folder / "spec.json")


def test_a_byte_order_mark_is_no_problem(folder, write, good):
    path = write(good)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert load_spec(path).seed == 0


def test_a_dict_with_objects_in_it_is_refused(good, folder):
    with pytest.raises(SpecError, match=r"seed: found a object"):
        parse_spec({**good, "seed": object()}, folder, "spec")


def test_a_dict_may_hold_paths_and_tuples(good, folder):
    spec = parse_spec({**good, "base": folder / "models/base", "allow": ("config",)}, folder, "spec")

    assert spec.allow == ("config",)
