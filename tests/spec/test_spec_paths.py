"""Local paths: any characters, found beside the spec, and never taken for a download when misspelt."""

from __future__ import annotations

import socket

import pytest

from merging.errors import SpecError
from merging.spec import parse_spec


def spec_of(folder, **changes):
    return parse_spec(
        {"base": "org/base", "experts": {"a": "org/a"}, "merge": "average", **changes}, folder, "s"
    )


@pytest.mark.parametrize("name", ["run+1", "exp@v2", "my model", "日本", "x" * 200, "a:b", "100%", "c\\d"])
@pytest.mark.parametrize("key", ["base", "model", "adapter"])
def test_any_characters_work_in_paths(name, key, folder):
    (folder / name).mkdir()
    changes = {"base": name} if key == "base" else {"experts": {"a": {key: f"./{name}"}}}

    spec = spec_of(folder, **changes)

    ref = spec.base if key == "base" else spec.experts["a"].ref
    assert ref.model == str(folder / name)
    assert ref.is_local


@pytest.mark.parametrize(
    "text",
    [
        "./models/bse",
        "models/bse",
        "../nowhere/x",
        "/nowhere/x",
        "~/nowhere-at-all",
        "models/a/b",
        "x.pt",
        "a b",
    ],
)
def test_a_missing_path_is_answered_without_network(text, folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket, "socket", refuse)

    with pytest.raises(SpecError, match="no such folder"):
        spec_of(folder, base=text)


def test_the_nearest_sibling_is_offered_at_any_depth(folder):
    with pytest.raises(SpecError, match=r'did you mean "models/mnist"\?') as caught:
        spec_of(folder, base="modles/mnist/", experts={"a": "models/minst"})

    assert 'did you mean "models/mnist"' in caught.value.problems[0].remedy


@pytest.mark.parametrize("text", ["org/name", "gpt2", "org-1/name.v2_x"])
def test_a_hub_id_stays_one(text, folder):
    spec = spec_of(folder, base=text)

    assert spec.base.model == text
    assert not spec.base.is_local


def test_a_bare_name_much_like_a_folder_is_a_misspelt_folder(folder):
    with pytest.raises(SpecError, match=r'"models"\?.*"revision"'):
        spec_of(folder, base="model")


def test_a_revision_speaks_for_the_hub(folder):
    spec = spec_of(folder, base={"model": "models/remote", "revision": "main"})

    assert spec.base.model == "models/remote"


def test_a_revision_of_a_local_folder_is_refused(folder):
    with pytest.raises(SpecError, match=r"base\.model: found a revision"):
        spec_of(folder, base={"model": "models/base", "revision": "main"})


def test_data_and_heads_must_exist_and_be_of_their_kind(folder):
    tasks = {
        "a": {
            "calibration": {"type": "images", "path": "data/mnits"},
            "test": {"type": "tensors", "path": "data/mnist"},
            "head": {"type": "linear", "path": ""},
        }
    }

    with pytest.raises(SpecError) as caught:
        spec_of(folder, tasks=tasks)

    found = {problem.where: str(problem) for problem in caught.value.problems}
    assert 'did you mean "data/mnist"' in found["tasks.a.calibration.path"]
    assert "is a folder, expected a file" in found["tasks.a.test.path"]
    assert "found an empty text" in found["tasks.a.head.path"]


def test_a_link_that_leads_nowhere_is_not_taken_for_a_misspelling(folder):
    (folder / "heads" / "x.safetensors").symlink_to("lost.safetensors")
    head = {"type": "linear", "path": "heads/x.safetensors"}

    with pytest.raises(SpecError) as caught:
        spec_of(folder, tasks={"a": {"head": head}})

    assert 'is a link to "lost.safetensors", which is not there' in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["y" * 300, "y" * 5000])
def test_a_name_that_no_file_system_holds_is_a_missing_path(name, folder):
    with pytest.raises(SpecError, match="no such folder"):
        spec_of(folder, base=f"./{name}")
