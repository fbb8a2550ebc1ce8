from __future__ import annotations

import pytest
import yaml

from merging.report.card import MethodUsed, Origin, model_card
from merging.report.escaping import escaped

TIES = MethodUsed("ties", "Trim, elect signs, merge.", "arXiv:2306.01708", {"scale": 1.0, "density": 0.2})
LOAD = 'from transformers import CLIPVisionModel\nmodel = CLIPVisionModel.from_pretrained("merged")'


def card(**changes):
    given = {
        "title": "mnist and svhn",
        "base": Origin("openai/clip-vit-base-patch32", hub=True),
        "experts": {
            "mnist": Origin("org/mnist", hub=True, revision="abc"),
            "svhn": Origin("/home/me/runs/svhn"),
        },
        "methods": [TIES],
        "load": LOAD,
    }
    return model_card(**{**given, **changes})


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_front_matter_is_what_the_hub_reads():
    assert front_matter(card()) == {
        "library_name": "transformers",
        "tags": ["merge"],
        "base_model": ["openai/clip-vit-base-patch32", "org/mnist"],
        "base_model_relation": "merge",
    }


def test_folders_are_named_without_their_path():
    text = card(base=Origin("/home/me/models/base"), experts={"svhn": Origin("/home/me/runs/svhn")})

    assert "base_model" not in front_matter(text)
    assert "/home" not in text
    assert "| expert svhn | svhn |" in text


def test_method_settings_paper_and_loading_are_there():
    text = card()

    assert '"density": 0.2' in text
    assert "[arXiv:2306.01708](https://arxiv.org/abs/2306.01708)" in text
    assert f"```python\n{LOAD}\n```" in text
    assert "org/mnist (revision abc)" in text


def test_scores_are_there_once_known(report):
    assert "## Results" not in card()
    assert "| mnist | 10.0 | 90.0 |" in card(report=report)


def test_what_inference_needs_is_said():
    assert "**Beware**: The task must be known" in card(inference_note="The task must be known")


def test_names_cannot_become_markup():
    text = card(title="<script>\n# x", experts={"a|b](http://x)": Origin("<img>")})

    assert "# &lt;script> # x\n" in text
    assert "| expert a\\|b\\](http://x) | &lt;img> |" in text
    assert "<script" not in text


def test_names_cannot_end_the_front_matter():
    text = card(base=Origin("a\n---\nb", hub=True))

    assert front_matter(text)["base_model"][0] == "a --- b"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("# a", "\\# a"),
        ("1. a", "1\\. a"),
        ("66.7", "66.7"),
        ("a_b", "a\\_b"),
        ("- a", "\\- a"),
        ("a & <b>", "a &amp; &lt;b>"),
    ],
)
def test_escaping(text, safe):
    assert escaped(text) == safe
