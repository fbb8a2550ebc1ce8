"""Results as adapters: base and adapter together are the merged model, within the error that is stated."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import adapted, loaded
from safetensors.torch import load_file
from tiny_models import GROUPED, expert_of, pixels

from merging.errors import CheckpointError, SpecError
from merging.pipeline import Pipeline

ALL = {"type": "task_arithmetic", "scale": 1.0}


class Workshop:
    def __init__(self, folder: Path) -> None:
        import transformers as hf

        self.folder = folder
        torch.manual_seed(0)
        self.base = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()
        self.base.save_pretrained(folder / "base")
        targets = ["q_proj", "v_proj", "down_proj"]
        self.folded = {
            "a": adapted(self.base, folder / "a", seed=1, r=2, lora_alpha=1, target_modules=targets),
            "b": adapted(
                self.base, folder / "b", seed=2, r=4, lora_alpha=3, target_modules=targets, use_rslora=True
            ),
        }
        full = hf.LlamaForCausalLM(self.base.config)
        full.load_state_dict(expert_of(self.base, 5))
        full.save_pretrained(folder / "full")

    def spec(self, output: dict[str, Any], **changes: Any) -> dict[str, Any]:
        experts = {task: {"adapter": str(self.folder / task)} for task in self.folded}
        spec = {"base": str(self.folder / "base"), "experts": experts, "merge": ALL, "device": "cpu"}
        return {**spec, "output": output, **changes}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("llama"))


def test_one_rank_stabilised_adapter_of_weight_one_comes_out_as_it_went_in(
    llama: Workshop, tmp_path: Path
) -> None:
    experts = {"b": {"adapter": str(llama.folder / "b")}}

    Pipeline.from_spec(llama.spec({"form": "lora", "rank": "exact"}, experts=experts)).run(tmp_path / "out")

    config = json.loads((tmp_path / "out" / "merged" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 4, False)
    found = loaded(llama.base, tmp_path / "out" / "merged")
    assert all(
        torch.allclose(found[name], tensor, rtol=0, atol=1e-6) for name, tensor in llama.folded["b"].items()
    )


@pytest.mark.parametrize("rule", [ALL, {"type": "core_space"}, {"type": "knots"}])
def test_rules_that_keep_the_rank_low_come_out_exactly(
    llama: Workshop, tmp_path: Path, rule: dict[str, Any]
) -> None:
    Pipeline.from_spec(llama.spec({}, merge=rule)).run(tmp_path / "model")

    report = Pipeline.from_spec(llama.spec({"form": "lora", "rank": "exact"}, merge=rule)).run(
        tmp_path / "lora"
    )

    found, wanted = (
        loaded(llama.base, tmp_path / "lora" / "merged"),
        load_file(tmp_path / "model/merged/model.safetensors"),
    )
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-6) for name, tensor in wanted.items())
    about = json.loads((tmp_path / "lora" / "merged" / "manifest.json").read_text())["notes"]["adapter"]
    assert about["relative_error"] < 1e-6
    assert set(about["ranks"].values()) <= {5, 6}  # of 2 + 4; the rule of core_space keeps 3 of each
    assert any("adapter of rank" in warning for warning in report.warnings)


def test_the_stated_error_is_that_of_the_model_which_peft_loads(llama: Workshop, tmp_path: Path) -> None:
    rule = {"type": "ties", "density": 0.5}
    experts = {"full": str(llama.folder / "full"), "a": {"adapter": str(llama.folder / "a")}}
    Pipeline.from_spec(llama.spec({}, merge=rule, experts=experts)).run(tmp_path / "model")

    Pipeline.from_spec(llama.spec({"form": "lora", "rank": 8}, merge=rule, experts=experts)).run(
        tmp_path / "lora"
    )

    folder = tmp_path / "lora" / "merged"
    about = json.loads((folder / "manifest.json").read_text())["notes"]["adapter"]
    found, wanted = loaded(llama.base, folder), load_file(tmp_path / "model" / "merged" / "model.safetensors")
    base = llama.base.state_dict()
    lost = change = 0.0
    for name, tensor in wanted.items():
        if name in about["relative_errors"]:
            gap, size = float((found[name] - tensor).norm()), float((tensor - base[name]).norm())
            assert gap / size == pytest.approx(about["relative_errors"][name], rel=1e-3)
            lost, change = lost + gap**2, change + size**2
        else:
            assert torch.equal(found[name], tensor), name
    assert 0.01 < about["relative_error"] < 1
    assert (lost / change) ** 0.5 == pytest.approx(about["relative_error"], rel=1e-3)
    assert "model.embed_tokens.weight" in about["stored_whole"]
    assert "PeftModel.from_pretrained" in (folder / "README.md").read_text()


def test_a_change_of_full_rank_cannot_be_exact_and_is_named(llama: Workshop, tmp_path: Path) -> None:
    spec = llama.spec({"form": "lora", "rank": "exact"}, experts={"full": str(llama.folder / "full")})

    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight: its change has rank 32 of 32, which is not low"
    ):
        Pipeline.from_spec(spec).run(tmp_path / "out")

    assert not (tmp_path / "out" / "merged").exists()


def test_an_expert_whose_vocabulary_grew_is_refused_as_that(llama: Workshop, tmp_path: Path) -> None:
    import transformers as hf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        larger = hf.LlamaForCausalLM.from_pretrained(llama.folder / "full")
        larger.resize_token_embeddings(66)
    larger.save_pretrained(tmp_path / "larger")
    spec = llama.spec({"form": "lora", "rank": 8}, experts={"larger": str(tmp_path / "larger")})

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec).run(tmp_path / "out")

    assert "model.embed_tokens.weight has 66 rows, the base's 64" in str(caught.value)
    assert '"backbone"' in str(caught.value)


def test_a_finished_adapter_is_not_made_again_and_can_be_calibrated_from(tmp_path: Path, clip: Any) -> None:
    first = Pipeline.from_spec(clip).run(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}

    second = Pipeline.from_spec(clip).run(tmp_path / "out")

    assert second == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")} == before
    assert first.checkpoint == str(tmp_path / "out" / "calibrated")
    for stage in ("merged", "calibrated"):
        names = {path.name for path in (tmp_path / "out" / stage).iterdir()}
        assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors", "manifest.json"}


@pytest.fixture
def clip(tmp_path: Path) -> dict[str, Any]:
    from safetensors.torch import save_file
    from tiny_models import PICTURE, SIZE
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**SIZE, **PICTURE)).eval()
    base.save_pretrained(tmp_path / "base")
    adapted(base, tmp_path / "a", target_modules=["q_proj", "fc1"])
    save_file(pixels(12), tmp_path / "a.safetensors")
    return {
        "base": str(tmp_path / "base"),
        "experts": {"a": {"adapter": str(tmp_path / "a")}},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": {"a": {"calibration": {"type": "tensors", "path": str(tmp_path / "a.safetensors")}}},
        "output": {"form": "lora", "rank": 4},
        "device": "cpu",
    }


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"rank": 8}, r'"rank" is for adapters'),
        ({"form": "lora", "shard_size": "1GB"}, "an adapter is one file"),
        ({"form": "lora", "rank": 0}, r"output\.rank: found the number 0"),
        ({"form": "adapter"}, r'output\.form: found .*"adapter"'),
    ],
)
def test_an_output_that_cannot_be_is_refused(llama: Workshop, output: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Pipeline.from_spec(llama.spec(output))


def test_a_base_without_a_config_cannot_be_written_as_an_adapter(llama: Workshop, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(llama.folder / "base", tmp_path / "base")
    (tmp_path / "base" / "config.json").unlink()
    spec = llama.spec({"form": "lora"}, base=str(tmp_path / "base"))

    with pytest.raises(SpecError, match="needs a base of transformers"):
        Pipeline.from_spec(spec).validate()


def test_the_plan_knows_that_an_adapter_is_small(llama: Workshop) -> None:
    small = Pipeline.from_spec(llama.spec({"form": "lora", "rank": 2})).plan()
    whole = Pipeline.from_spec(llama.spec({})).plan()

    assert 0 < small.disk_bytes < whole.disk_bytes
