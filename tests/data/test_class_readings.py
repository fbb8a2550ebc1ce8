"""What a column of classes means: the answers that are listed, or their places; and no class by mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny_texts import saved, sentences, written

from merging.data.classes import read_classes
from merging.data.hugging_face import text_rows
from merging.data.rows import Row, read_rows
from merging.data.spec import DatasetData, TextData
from merging.data.text import TextExamples
from merging.data.tokenizer import text_reader
from merging.errors import DataError

STARS = ("1", "2", "3", "4", "5")
WHERE = 'task "shop": test data'


def rows(values: list[Any]) -> list[Row]:
    return [Row(f"shop.csv:{line}", {"label": value}) for line, value in enumerate(values, start=2)]


@pytest.mark.parametrize(
    ("labels", "column", "expected"),
    [
        (STARS, ["1", "2", "3", "4", "5"], (0, 1, 2, 3, 4)),
        (STARS, [5, 1.0, 3], (4, 0, 2)),
        (("1", "0"), [0, 1], (1, 0)),
        ((" one", " two"), [0, 1], (0, 1)),
        ((" one", " two"), ["two", "one"], (1, 0)),
    ],
)
def test_answers_count_before_places(labels: Any, column: list[Any], expected: tuple[int, ...]) -> None:
    assert read_classes(rows(column), "label", labels, WHERE).labels == expected


@pytest.mark.parametrize(
    ("labels", "column", "named", "others"),
    [
        (STARS, [0, 1, 2, 3, 4], '("1", "2", "3", "4")', '("0")'),
        (("neg", "pos"), ["neg", "1"], '("neg")', '("1")'),
    ],
)
def test_a_column_that_is_neither_throughout_is_refused(
    labels: Any, column: list[Any], named: str, others: str
) -> None:
    with pytest.raises(DataError) as caught:
        read_classes(rows(column), "label", labels, WHERE)

    assert named in caught.value.message
    assert others in caught.value.message
    assert f'"labels": {{"0": "{labels[0]}"' in caught.value.remedy


def test_a_value_of_no_class_is_told_as_before() -> None:
    with pytest.raises(DataError, match=r'shop.csv:3: column "label" is "bad", which is not one of'):
        read_classes(rows(["neg", "bad", "1"]), "label", ("neg", "pos"), WHERE)


def test_numbers_of_a_data_sets_own_classes_stay_places(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list([{"text": "good", "label": number} for number in (1, 4, 2)])
    names = [f"{star} star" for star in STARS]
    made.cast_column("label", datasets.ClassLabel(names=names)).save_to_disk(tmp_path / "data")
    spec = DatasetData(path=str(tmp_path / "data"), label="label", labels=STARS)

    found = read_classes(text_rows(spec, WHERE), "label", spec.labels, WHERE)

    assert found.labels == (1, 4, 2)


@pytest.mark.parametrize("value", [1e20, 10**20, "1" * 5000, 10**6])
def test_a_number_that_is_no_class_index_is_told_with_its_row(value: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_classes(rows([0, value, 1]), "label", None, WHERE)

    (problem,) = caught.value.problems
    assert problem.where == "shop.csv:3"
    assert "expected a class index below 1000000" in problem.what


def test_no_overflow_where_the_examples_are_made(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    path = written(tmp_path / "shop.jsonl", [{**row, "label": 1e20} for row in sentences(2)])
    reader = text_reader(tmp_path / "base", WHERE)

    with pytest.raises(DataError, match=r"shop.jsonl:1: column .label. is 100000000000000000000"):
        TextExamples(
            read_rows(path, WHERE),
            TextData(path=path, label="label"),
            reader,
            where=WHERE,
            task="shop",
            seed=0,
        )
