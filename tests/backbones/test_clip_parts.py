"""CLIP as people have it: a whole CLIPModel beside its vision tower, and CLIPs of two libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from open_clip_models import END, MODEL, built, saved
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, TEXT, expert_of, pixels

from merging.errors import CheckpointError
from merging.pipeline import Pipeline

WEIGHTS = "model.safetensors"
VISION = transformers.CLIPVisionConfig(**SIZE, **PICTURE, projection_dim=16)
FORMS = {
    "whole": transformers.CLIPModel,
    "tower": transformers.CLIPVisionModel,
    "projected": transformers.CLIPVisionModelWithProjection,
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base-FORM and expert-FORM: the same two CLIPs, each in every form."""
    folder = tmp_path_factory.mktemp("clips")
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(**SIZE, **TEXT).to_dict()
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION.to_dict(), projection_dim=16)
    base = transformers.CLIPModel(config)
    for name, tensors in {"base": base.state_dict(), "expert": expert_of(base, 1)}.items():
        for form, kind in FORMS.items():
            model = kind(config if form == "whole" else VISION)
            inner = "vision_model." if form == "tower" else ""  # which its own names lack
            model.load_state_dict({key: tensors[f"{inner}{key}"] for key in model.state_dict()})
            model.save_pretrained(folder / f"{name}-{form}")
    save_file(pixels(8), folder / "images.safetensors")
    return folder


def spec_of(clips: Path, base: str, expert: str, **changes: Any) -> dict[str, Any]:
    data = {"type": "tensors", "path": str(clips / "images.safetensors")}
    return {
        "base": str(clips / f"base-{base}"),
        "experts": {"one": str(clips / f"expert-{expert}")},
        "merge": {"type": "task_arithmetic", "scale": 1.0},
        "tasks": {"one": {"calibration": data}},
        "device": "cpu",
        **changes,
    }


@pytest.mark.parametrize("expert", FORMS)
@pytest.mark.parametrize("base", FORMS)
def test_a_clip_and_its_tower_fit_each_other(clips: Path, tmp_path: Path, base: str, expert: str) -> None:
    pipeline = Pipeline.from_spec(spec_of(clips, base, expert))

    notes = pipeline.validate()
    report = pipeline.run(tmp_path / "out")

    found, ours, theirs = (
        {name.removeprefix("vision_model."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        for folder in (Path(report.checkpoint), clips / f"base-{base}", clips / f"expert-{expert}")
    )
    assert found.keys() == ours.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, theirs.get(name, ours[name]), rtol=0, atol=1e-6, msg=name)
    assert bool(notes) == (ours.keys() != theirs.keys())
    copied = {name: fate.reason for name, fate in report.parameters.items() if fate.state == "copied"}
    assert {name.removeprefix("vision_model.") for name in copied} == ours.keys() - theirs.keys()
    assert all("for want of one in an expert" in reason for reason in copied.values())


def test_each_parameter_of_a_whole_clip_is_in_the_report_once(clips: Path, tmp_path: Path) -> None:
    calibrate = {"type": "featcal"}
    report = Pipeline.from_spec(spec_of(clips, "whole", "projected", calibrate=calibrate)).run(
        tmp_path / "out"
    )

    fates = report.parameters
    assert fates.keys() == load_file(clips / "base-whole" / WEIGHTS).keys()
    assert fates["vision_model.encoder.layers.0.self_attn.q_proj.weight"].state == "solved"
    for outside in ("vision_model.pre_layrnorm.weight", "vision_model.post_layernorm.bias"):
        assert (fates[outside].state, fates[outside].reason) == ("merged", "outside the blocks")
    assert fates["visual_projection.weight"].state == "merged"
    assert fates["text_model.encoder.layers.0.self_attn.q_proj.weight"].state == "copied"


def test_text_towers_of_other_activations_are_found(clips: Path, tmp_path: Path) -> None:
    other = transformers.CLIPModel.from_pretrained(clips / "expert-whole")
    other.config.text_config.hidden_act = "gelu"
    other.save_pretrained(tmp_path / "gelu")
    spec = spec_of(clips, "whole", "whole", experts={"one": str(tmp_path / "gelu")})

    with pytest.raises(CheckpointError, match=r"text_config\.hidden_act 'gelu', the base has 'quick_gelu'"):
        Pipeline.from_spec(spec).validate()


@pytest.mark.parametrize("base", ["open_clip", "transformers"])
def test_clips_of_two_libraries_are_refused_with_the_reason(clips: Path, tmp_path: Path, base: str) -> None:
    saved(tmp_path / "open_clip", built().state_dict())
    ours, theirs = str(tmp_path / "open_clip"), str(clips / "expert-whole")
    pair = (ours, theirs) if base == "open_clip" else (theirs, ours)
    spec = {**spec_of(clips, "whole", "whole"), "base": pair[0], "experts": {"one": pair[1]}, "tasks": {}}

    with pytest.raises(CheckpointError, match="q, k and v of attention as") as caught:
        Pipeline.from_spec(spec).validate()

    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].remedy.startswith("Use base and experts of one library")


def test_the_page_shows_how_a_clip_of_transformers_becomes_one_of_open_clip() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clip.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision, text = (MODEL[f"{tower}_cfg"] for tower in ("vision", "text"))
    config = transformers.CLIPConfig(
        vision_config={**sizes, "image_size": vision["image_size"], "patch_size": vision["patch_size"]},
        text_config={
            **sizes,
            "intermediate_size": 128,
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["context_length"],
            "eos_token_id": END,
        },
        projection_dim=MODEL["embed_dim"],
    )
    torch.manual_seed(0)
    theirs = transformers.CLIPModel(config).eval()
    ours = built(1)

    ours.load_state_dict(names["as_open_clip"](theirs.state_dict()))

    pictures, ids = torch.randn(2, 3, 32, 32), torch.randint(1, 90, (2, 16))
    ids[:, 9] = END
    with torch.no_grad():
        answers = theirs(pixel_values=pictures, input_ids=ids)
        torch.testing.assert_close(
            ours.encode_image(pictures, normalize=True), answers.image_embeds, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            ours.encode_text(ids, normalize=True), answers.text_embeds, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("policy", ["union", "base", "backbone"])
def test_a_policy_for_tokens_is_refused_for_open_clip_by_name(tmp_path: Path, policy: str) -> None:
    for name, seed in (("base", 0), ("expert", 1)):
        saved(tmp_path / name, built(seed).state_dict())
    spec = {
        "base": str(tmp_path / "base"),
        "experts": {"one": str(tmp_path / "expert")},
        "merge": "average",
        "vocabulary": policy,
    }

    with pytest.raises(CheckpointError, match=f'"vocabulary": "{policy}" is for rows of tokens'):
        Pipeline.from_spec(spec).validate()
