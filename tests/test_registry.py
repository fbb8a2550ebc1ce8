"""Names to classes."""

from __future__ import annotations

import pytest

from merging.contracts.merger import TensorMerger
from merging.errors import SpecError
from merging.registry import Registry, did_you_mean, nearest


def fresh() -> Registry:
    return Registry("strategy", "merging.no_such_group", {"path": "pathlib:Path", "pure": "pathlib:PurePath"})


def test_built_in_classes_are_loaded_when_asked_for():
    from pathlib import Path

    registry: Registry = Registry("kind", "merging.no_such_group", {"path": f"{Path.__module__}:Path"})

    assert registry.names() == ("path",)


def test_a_decorated_class_is_usable_by_name():
    registry = fresh()

    @registry.register("mine")
    class Mine:
        pass

    assert registry.get("mine") is Mine
    assert Mine.name == "mine"
    assert registry.names() == ("path", "pure", "mine")


def test_a_built_in_name_cannot_be_taken_over():
    with pytest.raises(SpecError, match="already defined by pathlib:Path"):

        @fresh().register("path")
        class Mine:
            pass


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(SpecError, match=r'unknown strategy "pth"(.|\n)*"path"'):
        fresh().get("pth")


def test_hyphens_and_case_do_not_hide_a_name():
    assert nearest("DARE-ties", ["ties", "dare_ties"]) == "dare_ties"
    assert did_you_mean("zzz", ["b", "a"]) == "valid: a, b"


def test_a_class_that_lacks_methods_is_refused_where_it_is_defined():
    with pytest.raises(SpecError, match=r'strategy "half", .*Half, lacks combine') as caught:

        @fresh().register("half")
        class Half(TensorMerger):
            pass

    assert "abstract" in caught.value.remedy
