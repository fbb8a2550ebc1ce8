"""Labels stand for the head's rows by the names of their classes, whichever classes a split lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZE
from tiny_pictures import CLASSES, picture_suite, pictures

from merging.data.numbering import known_classes, number_alike_
from merging.data.task import Examples, LinearHead
from merging.errors import DataError
from merging.pipeline import Pipeline


def opened(spec: dict[str, Any]) -> Any:
    return Pipeline.from_spec(spec).tasks()["digits"]


def names_of(examples: Any) -> list[tuple[str, int]]:
    """Folder and label of each picture."""
    found = zip(examples.files, examples.labels.tolist(), strict=True)
    return sorted({(file.parent.name, label) for file, label in found})


def test_a_class_that_the_test_lacks_shifts_no_other(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    shutil.rmtree(tmp_path / "img" / "digits" / "test" / "a")

    task = opened(spec)

    assert names_of(task.test) == [("b", 1), ("c", 2), ("d", 3), ("e", 4)]
    assert names_of(task.calibration) == [(name, at) for at, name in enumerate(CLASSES)]
    assert 'task "digits": test data has nothing of class a' in task.test.notes


def test_scores_are_those_of_an_empty_folder_in_its_place(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    gone = tmp_path / "img" / "digits" / "test" / "a"
    shutil.rmtree(gone)
    lacking = Pipeline.from_spec(spec).run(tmp_path / "one").tasks["digits"].scores

    gone.mkdir()

    assert Pipeline.from_spec(spec).run(tmp_path / "two").tasks["digits"].scores == lacking


def test_all_complete_is_as_it_was(tmp_path: Path) -> None:
    task = opened(picture_suite(tmp_path))

    assert names_of(task.test) == [(name, at) for at, name in enumerate(CLASSES)]
    assert not task.test.notes


def test_more_rows_than_folders_and_no_names_stop(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    shutil.rmtree(tmp_path / "img" / "digits" / "test" / "a")
    del spec["tasks"]["digits"]["calibration"]

    with pytest.raises(DataError) as caught:
        opened(spec)

    assert "tasks.digits.test: the test examples have 4 class folders (b, c, d, e)" in str(caught.value)
    assert "the head has 5 classes" in str(caught.value)
    assert "an empty one where there are no pictures" in str(caught.value)


def test_a_folder_of_another_name_stops(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    test = tmp_path / "img" / "digits" / "test"
    (test / "a").rename(test / "zz")

    with pytest.raises(DataError, match=r"with the task's other examples 6 \(a, b, c, d, e, zz\)"):
        opened(spec)


def test_calibration_in_one_folder_of_no_class_says_nothing(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    spec["tasks"]["digits"]["calibration"]["path"] = str(pictures(tmp_path / "unsorted", ["all"], each=9))

    assert names_of(opened(spec).test) == [(name, at) for at, name in enumerate(CLASSES)]


def test_the_test_and_the_validation_are_numbered_alike(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    task = spec["tasks"]["digits"]
    task["validation"] = {"type": "images", "path": str(pictures(tmp_path / "held", ["c", "e"], seed=9))}
    shutil.rmtree(tmp_path / "img" / "digits" / "test" / "b")

    found = opened(spec)

    assert names_of(found.validation) == [("c", 2), ("e", 4)]
    assert names_of(found.test) == [("a", 0), ("c", 2), ("d", 3), ("e", 4)]


class Numbered(Examples):
    """Labels by the names that were met, or as a source gives them."""

    def __init__(self, *classes: str, found: bool = True) -> None:
        self.classes, self.found_classes = classes, found

    def __len__(self) -> int:
        return len(self.classes)

    def batches(self) -> Any:
        return ()

    labels = None
    fingerprint = ""

    def hashes(self) -> tuple[str, ...]:
        return ()

    def renumber_(self, names: Any) -> None:
        self.classes = tuple(names)


def head(rows: int, *names: str) -> LinearHead:
    made = LinearHead(torch.zeros(rows, SIZE["hidden_size"]))
    made.names = names
    return made


def test_the_heads_own_names_decide() -> None:
    test = Numbered("big_bird", "dog")

    assert not number_alike_("x", {"test": test}, head(4, "ant", "Big bird", "cat", "dog"))

    assert test.classes == ("ant", "big_bird", "cat", "dog")


def test_names_of_a_head_in_another_order_are_no_ground_to_renumber() -> None:
    test = Numbered("ant", "dog")

    (problem,) = number_alike_("x", {"test": test}, head(3, "dog", "cat", "ant"))

    assert "2 classes (ant, dog), the head has 3 classes (dog, cat, ant)" in problem.what
    assert '"labels": ["...", "..."]' in problem.remedy
    assert test.classes == ("ant", "dog")


def test_numbers_that_the_source_gives_stay() -> None:
    test = Numbered("zebra", "ant", found=False)

    assert not number_alike_("x", {"test": test}, head(5))
    assert test.classes == ("zebra", "ant")


def test_a_split_whose_source_names_all_classes_numbers_the_others() -> None:
    test, calibration = Numbered("ant", "cat"), Numbered("zebra", "cat", "ant", found=False)
    splits = {"test": test, "calibration": calibration}

    assert known_classes(splits) == ("zebra", "cat", "ant")
    assert not number_alike_("x", splits, head(3))
    assert test.classes == ("zebra", "cat", "ant")


def test_names_that_the_head_does_not_have_are_told_with_the_classes_that_they_count_as() -> None:
    test = Numbered("ant", "car", "dog")

    assert not number_alike_("x", {"test": test}, head(3, "ant", "automobile", "dog"))

    (note,) = test.notes
    assert "test data has classes of other names than the head" in note
    assert "car as automobile." in note
    assert "ant as" not in note


def test_names_that_the_head_has_or_a_head_without_names_need_no_word() -> None:
    spelt, unnamed = Numbered("big_bird", "dog"), Numbered("ant", "dog")

    assert not number_alike_("x", {"test": spelt}, head(2, "Big bird", "dog"))
    assert not number_alike_("x", {"test": unnamed}, head(2))

    assert spelt.notes == unnamed.notes == ()


def test_classes_that_are_numbers_are_told_where_their_text_stands_in_another_order() -> None:
    many = sorted(str(number) for number in range(12))
    folders, column = Numbered(*many), Numbered("0.0", "1.0", "10.0", "2.0")
    folders.files = ()  # type: ignore[attr-defined]

    assert not number_alike_("x", {"test": folders}, head(12))
    assert not number_alike_("x", {"test": column}, head(4))

    assert folders.classes == tuple(many)
    (note,) = folders.notes
    assert "class folders that are numbers" in note
    assert "order of their text: 0, 1, 10, 11, 2, 3" in note
    assert "name them with as many digits each: 00, 01, 02" in note
    (note,) = column.notes
    assert "order of their text: 0.0, 1.0, 10.0, 2.0." in note
    assert '"labels": ["0.0", "1.0", "2.0", "10.0"]' in note


def test_numbers_in_their_order_or_in_the_heads_need_no_word() -> None:
    few, named = Numbered("0", "1", "2"), Numbered("1", "10", "2")

    assert not number_alike_("x", {"test": few}, head(3))
    assert not number_alike_("x", {"test": named}, head(3, "1", "10", "2"))

    assert few.notes == named.notes == ()
