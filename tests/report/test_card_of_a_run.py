"""The model card that a run leaves: terms of use of what was merged, and the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from test_requests import suite
from tiny_models import made

import merging
from merging.licences import licence_of
from merging.pipeline import Pipeline
from merging.report.card import with_results


def card_of(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# A", "apache-2.0"),
        ("---\r\nlicense: mit\r\n---\r\n# A", "mit"),
        ("---\nlicense: [mit, cc-by-4.0]\n---\n", "mit, cc-by-4.0"),
        ("---\nlicense: other\nlicense_name: llama3\n---\n", "llama3"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nlicense: {a: b}\n---\n", ""),
        ("---\nlicense: [\n---\n", ""),
        ("# license: mit", ""),
        ("---\nlicense: " + "x" * 500 + "\n---\n", "x" * 80),
        ("---\n" + "a: " + "[" * 5000 + "\n---\n", ""),
        ("---\nlicense: 1\n---\n", ""),
    ],
)
def test_the_licence_is_what_the_front_matter_says(tmp_path: Path, text: str, licence: str) -> None:
    assert licence_of(card_of(tmp_path / "model", text)) == licence


def test_files_with_the_terms_count_where_the_card_says_nothing(tmp_path: Path) -> None:
    folder = card_of(tmp_path / "model", "# A")
    (folder / "LICENSE.txt").write_text("terms")

    assert licence_of(folder) == "see LICENSE.txt"
    assert licence_of(tmp_path) == ""


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    _, model, batches = made("vit_classifier")
    pixels = batches[0]["pixel_values"]
    spec = suite(tmp_path, model, {"pixel_values": pixels})
    for task in ("one", "two"):
        test = {"pixel_values": pixels + 1, "labels": torch.arange(len(pixels))}
        save_file(test, tmp_path / f"{task}-test.safetensors")
        source = {"type": "tensors", "path": str(tmp_path / f"{task}-test.safetensors")}
        spec["tasks"][task]["test"] = source
    card_of(tmp_path / "base", "---\nlicense: apache-2.0\n---\n")
    card_of(tmp_path / "one", "---\nlicense: <b>mine</b>\n---\n")
    return spec


def test_cards_have_licences_scores_and_papers_and_verify_as_written(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    for stage in ("merged", "calibrated"):
        text = (tmp_path / "out" / stage / "README.md").read_text()
        assert "| base | base | apache-2.0 |" in text
        assert "| expert one | one | &lt;b>mine&lt;/b> |" in text
        assert "| expert two | two | not stated |" in text
        assert "license" not in yaml.safe_load(text.split("---\n")[1])
        assert text.count("## Results") == 1
        assert "of expert: calibrated" in text
        assert "time and peak memory" not in text
    assert text.index("## Results") < text.index("## Papers")
    assert merging.verify(tmp_path / "out").unchanged
    assert Pipeline.from_spec(spec).run(tmp_path / "out") == report


def test_one_licence_of_all_is_that_of_the_result(tmp_path: Path, spec: dict[str, Any]) -> None:
    for name in ("one", "two"):
        card_of(tmp_path / name, "---\nlicense: apache-2.0\n---\n")

    Pipeline.from_spec({**spec, "calibrate": [], "tasks": {}}).run(tmp_path / "out")

    text = (tmp_path / "out" / "merged" / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "apache-2.0"
    assert "licences differ" not in text


def test_a_card_that_was_written_into_is_no_reason_to_merge_again(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    Pipeline.from_spec(spec).run(tmp_path / "out")
    weights = tmp_path / "out" / "calibrated" / "model.safetensors"
    card, before = weights.with_name("README.md"), weights.stat().st_mtime_ns
    card.write_text(card.read_text().replace("## How to load it", "My own words.\n\n## How to load it"))
    (tmp_path / "out" / "report.json").unlink()

    Pipeline.from_spec(spec).run(tmp_path / "out")

    assert weights.stat().st_mtime_ns == before
    assert "My own words." in card.read_text()
    assert merging.verify(tmp_path / "out").unchanged


def test_results_are_replaced_where_they_are(report: Any) -> None:
    card = "# A\n\ntext\n\n## Papers\n\n- one\n"

    once = with_results(card, report)
    twice = with_results(once, report)

    assert once == twice
    assert once.index("## Results") < once.index("## Papers")
    assert once.endswith("- one\n")
