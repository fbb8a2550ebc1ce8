"""Text through a prompt and the base's own tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from tiny_texts import saved, sentences, tokenizer, written

from merging.data.hashing import overlap
from merging.data.opening import open_examples
from merging.data.prompts import Template
from merging.data.text_spec import TextData
from merging.errors import DataError

PROMPT = "{text}\nAnswer:"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for name in ("t5", "llama", "bert"):
        saved(folder / name, name)
    return {name: folder / name / "base" for name in ("t5", "llama", "bert")}


def opened(
    path: Path, base: Path, *, purpose: Any = "calibration", task: str = "movie", seed: int = 0, **keys: Any
):
    spec = TextData(path=path, **keys)
    return open_examples(spec, task=task, purpose=purpose, base_folder=base, seed=seed, labelled=False)


@pytest.fixture
def movie(tmp_path: Path) -> Path:
    return written(tmp_path / "movie.jsonl", sentences(12))


def test_a_prompt_is_what_the_bases_tokenizer_makes_of_it(movie: Path, bases: dict[str, Path]) -> None:
    examples = opened(movie, bases["llama"], prompt=PROMPT, batch_size=5)

    batches = list(examples.batches())
    assert [len(batch["input_ids"]) for batch in batches] == [5, 5, 2]
    first, mask = batches[0]["input_ids"][0], batches[0]["attention_mask"][0]
    text = tokenizer("causal").decode(first[mask.bool()])
    assert text.startswith("<s>")
    assert text.endswith("Answer :")
    assert bool((mask.diff() <= 0).all())  # padded at the end


@pytest.mark.parametrize(("base", "has_decoder"), [("llama", False), ("bert", False), ("t5", True)])
def test_only_an_encoder_decoder_gets_decoder_inputs(
    movie: Path, bases: dict[str, Path], base: str, has_decoder: bool
) -> None:
    (batch,) = opened(movie, bases[base]).batches()

    assert ("decoder_input_ids" in batch) == has_decoder
    if has_decoder:
        assert batch["decoder_input_ids"].tolist() == [[0]] * 12


def test_a_decoder_reads_its_start_and_the_target(tmp_path: Path, bases: dict[str, Path]) -> None:
    path = written(
        tmp_path / "x.jsonl", [{"text": "good", "said": "a fine film"}, {"text": "bad", "said": "dull"}]
    )

    (batch,) = opened(path, bases["t5"], target="said").batches()

    rows = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(batch["decoder_input_ids"], batch["decoder_attention_mask"], strict=True)
    ]
    spoken = sorted(tokenizer("seq2seq").decode(row[1:]) for row in rows)
    assert [row[0] for row in rows] == [0, 0]
    assert spoken == ["a fine film", "dull"]


def test_draws_are_balanced_fixed_and_depend_on_seed_and_task(tmp_path: Path, bases: dict[str, Path]) -> None:
    rows = sentences(40)
    for row in rows[:30]:
        row["label"] = "pos"
    path = written(tmp_path / "x.jsonl", rows)

    def drawn(**keys: Any) -> Any:
        return opened(path, bases["llama"], label="label", examples=10, **keys)

    one = drawn()
    assert sorted(one.labels.tolist()) == [0] * 5 + [1] * 5
    assert one.fingerprint == drawn().fingerprint == drawn(batch_size=3).fingerprint
    assert len({drawn(**keys).fingerprint for keys in ({}, {"seed": 1}, {"task": "other"})}) == 3
    assert one.prompts == opened(path, bases["llama"], label="label", examples=20).prompts[:10]


def test_cutting_spares_the_template(movie: Path, bases: dict[str, Path]) -> None:
    examples = opened(movie, bases["llama"], prompt="the {text}\nAnswer:", max_length=6)

    texts = [prompt.text for prompt in examples.prompts]
    assert all(text.startswith("the ") and text.endswith("\nAnswer:") for text in texts)
    assert max(len(prompt.ids) for prompt in examples.prompts) <= 6
    assert sum(prompt.cut for prompt in examples.prompts) > 6
    assert any("were cut to 6 tokens" in note for note in examples.notes)


def test_the_longest_column_is_cut_first() -> None:
    template = Template("{a} and {b} .")
    values = {"a": "one two", "b": "three four five six seven eight"}

    prompt = template.prompt(values, str.split, 7)  # type: ignore[arg-type]

    assert prompt is not None
    assert prompt.text == "one two and three four five ."
    assert template.prompt(values, str.split, 1) is None  # type: ignore[arg-type]


def test_a_template_longer_than_max_length(movie: Path, bases: dict[str, Path]) -> None:
    with pytest.raises(DataError, match=r'own text has 3 tokens, "max_length" is 2'):
        opened(movie, bases["llama"], prompt=PROMPT, max_length=2)
    with pytest.raises(DataError, match="reads 64 tokens at most"):
        opened(movie, bases["llama"], max_length=65)


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
def test_every_format_gives_the_same_examples(tmp_path: Path, bases: dict[str, Path], ending: str) -> None:
    rows = [{"text": 'so, it "was"\nfine', "label": 1}, {"text": "a dull film", "label": 0}]
    expected = opened(written(tmp_path / "x.jsonl", rows), bases["llama"], label="label")
    table, path = pandas.DataFrame(rows), tmp_path / f"y.{ending}"
    if ending == "parquet":
        table.to_parquet(path)
    elif ending == "jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_csv(path, index=False, sep="\t" if ending == "tsv" else ",")

    found = opened(path, bases["llama"], label="label")

    assert found.fingerprint == expected.fingerprint
    assert found.labels.tolist() == expected.labels.tolist()


BAD = {
    "no file": ("{}", {"path": "missing.jsonl"}, "does not exist"),
    "empty": ("\n\n", {}, "is empty"),
    "not JSON": ('{"text": "good"}\n{"text": }', {}, r"x\.jsonl:2: is not JSON"),
    "one list": ('[\n{"text": "good"}\n]', {}, r"x\.jsonl is one JSON list, expected JSON lines"),
    "half a character": ('{"text": "a \\ud83d"}', {}, r'x\.jsonl:1: column "text" holds half a character'),
    "endless number": ('{"text": ' + 5000 * "1" + "}", {}, r"x\.jsonl:1: cannot be read"),
    "endless nesting": ('{"text": ' + 100_000 * "[", {}, r"x\.jsonl:1: cannot be read"),
    "not an object": ('{"text": "good"}\n["good"]', {}, r"x\.jsonl:2: is a list, expected one object"),
    "no column": ('{"txt": "good"}', {}, r'(?s)no column "text"; it has txt.*did you mean "txt"'),
    "missing cell": ('{"text": "good"}\n{"text": null}', {}, r'x\.jsonl:2: column "text" is missing'),
    "a list": ('{"text": "good"}\n{"text": ["good"]}', {}, r'x\.jsonl:2: column "text" is a list'),
    "unknown class": (
        '{"text": "good", "label": "pos"}\n{"text": "bad", "label": "neu"}',
        {"label": "label", "labels": {"neg": "bad", "pos": "good"}},
        r'x\.jsonl:2: column "label" is "neu", which is not one of neg, pos',
    ),
    "no class": (
        '{"text": "good", "label": 1}\n{"text": "bad", "label": null}',
        {"label": "label"},
        r'x\.jsonl:2: column "label" is missing or empty',
    ),
}


@pytest.mark.parametrize(("content", "keys", "message"), BAD.values(), ids=BAD)
def test_bad_rows_are_named_by_file_and_line(
    tmp_path: Path, bases: dict[str, Path], content: str, keys: dict[str, Any], message: str
) -> None:
    (tmp_path / "x.jsonl").write_text(content)

    with pytest.raises(DataError, match=message):
        opened(tmp_path / keys.pop("path", "x.jsonl"), bases["llama"], **keys)


def test_bytes_that_are_not_utf8(tmp_path: Path, bases: dict[str, Path]) -> None:
    (tmp_path / "x.csv").write_bytes("text\ngood\ncaf\xe9\n".encode("latin-1"))

    with pytest.raises(DataError, match=r"x\.csv:3 is not UTF-8 \(byte 0xe9\)"):
        opened(tmp_path / "x.csv", bases["llama"])


def test_two_columns_of_one_name(tmp_path: Path, bases: dict[str, Path]) -> None:
    (tmp_path / "x.csv").write_text("text,text,,\ngood,bad,,\n")

    with pytest.raises(DataError, match=r'x\.csv has two columns of one name: "text"'):
        opened(tmp_path / "x.csv", bases["llama"])


def test_a_cell_may_be_as_long_as_an_article(tmp_path: Path, bases: dict[str, Path]) -> None:
    (tmp_path / "x.csv").write_text('text\n"' + 20_000 * "good film " + '"\n')

    assert opened(tmp_path / "x.csv", bases["llama"]).prompts[0].cut


def test_a_row_of_another_width(tmp_path: Path, bases: dict[str, Path]) -> None:
    (tmp_path / "x.csv").write_text('text,label\n"good\nfilm",1\nbad\n')

    with pytest.raises(DataError, match=r"x\.csv:4: has 1 cells, the header has 2"):
        opened(tmp_path / "x.csv", bases["llama"])


def test_a_base_without_tokenizer(movie: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bases["llama"] / "config.json").read_text())

    with pytest.raises(DataError, match="has no tokenizer"):
        opened(movie, tmp_path)


def test_too_few_and_repeated_rows_are_told(tmp_path: Path, bases: dict[str, Path]) -> None:
    path = written(tmp_path / "x.jsonl", [*sentences(3), *sentences(1)])

    notes = opened(path, bases["llama"], examples=9).notes

    assert any("9 examples asked for, 4 used" in note for note in notes)
    assert any("1 of 4 examples repeat another one" in note for note in notes)


def test_overlap_is_counted_whatever_the_answer_is(tmp_path: Path, bases: dict[str, Path]) -> None:
    rows = [{**row, "said": "good"} for row in sentences(6)]
    calibration = opened(written(tmp_path / "a.jsonl", rows[:4]), bases["t5"], target="said")
    test = opened(written(tmp_path / "b.jsonl", rows[2:]), bases["t5"], label="label")

    assert overlap(calibration, test) == 2


@pytest.mark.parametrize(
    ("labels", "column", "expected"),
    [
        ({"1": "good", "0": "bad"}, [0, 1], [1, 0]),
        (["bad", "good"], [1, 0], [1, 0]),
        ([" bad", " good"], ["good", "bad"], [1, 0]),
        (None, [3, 7], [3, 7]),
        (None, ["zebra", "ant"], [1, 0]),
        ({"true": "good", "false": "bad"}, [True, False], [0, 1]),
    ],
)
def test_classes(
    tmp_path: Path, bases: dict[str, Path], labels: Any, column: Any, expected: list[int]
) -> None:
    rows = [{"text": "good", "label": column[0]}, {"text": "bad", "label": column[1]}]
    keys = {} if labels is None else {"labels": tuple(labels) if isinstance(labels, list) else labels}

    examples = opened(written(tmp_path / "x.jsonl", rows), bases["llama"], label="label", **keys)

    found = dict(zip([prompt.text for prompt in examples.prompts], examples.labels.tolist(), strict=True))
    assert [found["good"], found["bad"]] == expected
    assert examples.labels.dtype == torch.long


def test_a_t5_reads_longer_texts_than_its_tokenizer_advises(
    movie: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(bases["t5"], folder)
    place = folder / "tokenizer_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "model_max_length": 4}))

    def longest(**columns: Any) -> int:
        return max(len(prompt.ids) for prompt in opened(movie, folder, **columns).prompts)

    assert longest() == 4
    assert longest(max_length=9) > 4
