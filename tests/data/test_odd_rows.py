"""Rows of JSON lines that are odd: NaN, keys given twice, texts that are empty or without end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_texts import saved

from merging.data.opening import open_examples
from merging.data.text_spec import TextData
from merging.errors import DataError


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for name in ("t5", "llama"):
        saved(folder / name, name)
    return {name: folder / name / "base" for name in ("t5", "llama")}


def opened(folder: Path, base: Path, lines: list[str], **keys: Any):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = TextData(path=path, **keys)
    return open_examples(spec, task="movie", purpose="test", base_folder=base, seed=0, labelled=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": NaN, "label": 1}', 'rows.jsonl:2: column "text" is NaN, expected text'),
        ('{"text": -Infinity, "label": 1}', 'rows.jsonl:2: column "text" is infinite, expected text'),
        ('{"text": 1e999, "label": 1}', 'rows.jsonl:2: column "text" is infinite, expected text'),
        ('{"text": "good", "label": NaN}', 'rows.jsonl:2: column "label" is NaN, expected a class'),
        ('{"text": "good", "label": Infinity}', 'rows.jsonl:2: column "label" is infinite, expected a class'),
        ('{"text": "good", "label": " "}', 'rows.jsonl:2: column "label" is missing or empty, expected a cl'),
        (
            '{"text": "a", "text": "b", "label": 1}',
            'rows.jsonl:2: cannot be read (the key "text" is given twice',
        ),
        ('{"text": "a", "label": 1, "more": {"x": 1, "x": 2}}', 'the key "x" is given twice in one object'),
    ],
)
def test_an_odd_row_is_refused_with_its_place(
    tmp_path: Path, bases: dict[str, Path], line: str, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        opened(tmp_path, bases["llama"], ['{"text": "fine", "label": 0}', line], label="label")

    assert said in str(caught.value)
    assert "1 of 2 rows cannot be used" in str(caught.value)


def test_nan_in_a_column_that_nobody_reads_is_no_trouble(tmp_path: Path, bases: dict[str, Path]) -> None:
    examples = opened(tmp_path, bases["llama"], ['{"text": "fine", "score": NaN}', '{"text": "dull"}'])

    assert len(examples) == 2
    assert examples.notes == ()


def test_empty_texts_are_told_and_those_without_tokens_refused(
    tmp_path: Path, bases: dict[str, Path]
) -> None:
    lines = ['{"text": "fine"}', '{"text": ""}', '{"text": "  "}']

    examples = opened(tmp_path, bases["llama"], lines)

    assert [note for note in examples.notes if "2 of 3 texts are empty; mend or remove" in note]
    pair = ['{"text": "fine", "more": ""}']
    assert opened(tmp_path, bases["llama"], pair, prompt="{text} {more}").notes == ()


def test_empty_targets_are_told(tmp_path: Path, bases: dict[str, Path]) -> None:
    lines = ['{"text": "fine", "answer": "good"}', '{"text": "dull", "answer": ""}']

    examples = opened(tmp_path, bases["t5"], lines, target="answer")

    assert [note for note in examples.notes if "1 of 2 targets are empty" in note]


def test_a_text_without_end_is_cut_and_told_in_time(tmp_path: Path, bases: dict[str, Path]) -> None:
    start = time.monotonic()

    examples = opened(tmp_path, bases["llama"], ['{"text": "' + "good film " * 100_000 + '"}'], max_length=16)

    assert [len(prompt.ids) for prompt in examples.prompts] == [16]
    assert [note for note in examples.notes if "1 of 1 texts were cut to 16 tokens" in note]
    assert time.monotonic() - start < 30
