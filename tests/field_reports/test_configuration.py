"""The spec: what people report, and what they see here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from merging_cli.main import main
from small_models import (
    change_config,
    expert,
    llama,
    run,
    saved,
    spec_of,
    tensors_in,
)
from torch import Tensor

from merging.checkpoints.safetensors import SafetensorsSource
from merging.errors import CheckpointError, SpecError
from merging.pipeline import Pipeline

ADD = {"type": "task_arithmetic", "scale": 0.3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("models"), llama()
    saved(base, folder / "base")
    for seed, name in enumerate(("one", "two", "three"), start=1):
        saved(expert(base, seed), folder / name)
    return folder


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a whole weight fails the test; the first rows of one tell whose it is, and may be read."""
    few = SafetensorsSource.read

    def read(source: SafetensorsSource, name: str, rows: slice | None = None) -> Tensor:
        assert rows is not None, f"{name} was read"
        return few(source, name, rows)

    def reading(source: SafetensorsSource, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(SafetensorsSource, "read", read)
    monkeypatch.setattr(SafetensorsSource, "reading", reading, raising=False)


def copied(folder: Path, target: Path, **config: Any) -> Path:
    import shutil

    shutil.copytree(folder, target)
    change_config(target, **config)
    return target


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name].double(), wanted[name].double(), atol=1e-6) for name in wanted)


@pytest.mark.usefixtures("unread")
def test_four_typos_are_told_in_one_answer_before_any_weight_is_read(models: Path) -> None:
    began = time.monotonic()

    with pytest.raises(SpecError) as caught:
        Pipeline.from_spec(
            spec_of(
                models / "base",
                {"one": models / "ome", "two": models / "tvo"},
                {"type": "dare-tiess"},
                calibrate={"type": "featcall"},
                output={"dtype": "bf61"},
            )
        )

    assert time.monotonic() - began < 2
    text = str(caught.value)
    for words in ("experts.one", "experts.two", '"dare_ties"', '"featcal"', '"bfloat16"'):
        assert words in text


@pytest.mark.parametrize(
    ("merge", "where", "words"),
    [
        ({"type": "task_arithmetic", "lamda": 0.3}, "merge.lamda", "scale"),
        ({"type": "ties", "densty": 0.2}, "merge.densty", "density"),
        ({"type": "ties", "settings": {"density": 0.2}}, "merge.settings", ""),
        ({"type": "dare", "random_seed": 3}, "merge.random_seed", "seed"),
    ],
)
def test_an_unknown_key_is_never_a_merge_with_the_default(
    models: Path, tmp_path: Path, merge: dict[str, Any], where: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        run(tmp_path / "out", spec_of(models / "base", {"one": models / "one"}, merge))

    assert f"{where}: unknown key" in str(caught.value)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"base": "base", "experts": {"one": {"model": "one", "weight": "0.2"}}}',
            ["experts.one.weight", "0.2"],
        ),
        ('{"base": "base", "experts": [["one"]], "merge": {"type": "ties"}}', ["experts", "list"]),
        ('{"base": "base",\n "experts": {"one": "one"},\n}', ["line 3"]),
        ("", ["empty"]),
        ('["base"]', ["list"]),
    ],
    ids=["weight as text", "experts as list", "trailing comma", "empty", "list at the top"],
)
def test_a_wrong_shape_is_told_in_few_lines_without_a_traceback(
    models: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    (models / "spec.json").write_text(text)

    code = main(["pipeline", "validate", str(models / "spec.json")])

    err = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in err
    assert "pydantic" not in err
    assert len(err.splitlines()) <= 8
    for word in words:
        assert word in err


def test_the_base_may_be_listed_and_adds_nothing_to_a_sum(models: Path, tmp_path: Path) -> None:
    experts = {name: models / name for name in ("one", "two")}

    without = run(tmp_path / "without", spec_of(models / "base", experts, ADD))
    listed = run(tmp_path / "with", spec_of(models / "base", {**experts, "base": models / "base"}, ADD))

    assert close(tensors_in(listed), tensors_in(without))


def test_in_an_average_the_base_counts_only_if_listed_and_the_plan_says_how_many(models: Path) -> None:
    experts = {name: models / name for name in ("one", "two")}
    three = {**experts, "base": models / "base"}

    plans = [
        Pipeline.from_spec(spec_of(models / "base", listed, {"type": "average"})).plan()
        for listed in (experts, three)
    ]

    assert [len(plan.experts) for plan in plans] == [2, 3]
    assert [plan.experts["one"].coefficient for plan in plans] == pytest.approx([1 / 2, 1 / 3])


def test_weights_are_divided_by_their_sum_only_where_asked_and_the_plan_tells(
    models: Path, tmp_path: Path
) -> None:
    one = str(models / "one")
    experts = {"a": {"model": one, "weight": 0.1}, "b": {"model": one, "weight": 1.0}}
    spec = spec_of(models / "base", experts, {"type": "average", "normalize": False})

    plan = Pipeline.from_spec(spec).plan()
    found = tensors_in(run(tmp_path / "out", spec))

    assert [expert.coefficient for expert in plan.experts.values()] == pytest.approx([0.1, 1.0])
    assert close(found, {name: 1.1 * tensor.double() for name, tensor in tensors_in(models / "one").items()})
    normalised = Pipeline.from_spec({**spec, "merge": {"type": "average"}}).plan()
    assert [one.coefficient for one in normalised.experts.values()] == pytest.approx([0.1 / 1.1, 1 / 1.1])


@pytest.mark.usefixtures("unread")
def test_weights_that_sum_to_zero_are_refused_and_not_divided(models: Path) -> None:
    experts = {
        "a": {"model": str(models / "one"), "weight": 1.0},
        "b": {"model": str(models / "two"), "weight": -1.0},
    }

    with pytest.raises(SpecError, match="sum to 0"):
        Pipeline.from_spec(spec_of(models / "base", experts, {"type": "average"}))


@pytest.mark.parametrize("rule", ["dare", "ties", "della", "breadcrumbs", "sce"])
@pytest.mark.parametrize("density", [-0.1, 1.5])
def test_a_share_outside_of_0_and_1_is_refused(models: Path, rule: str, density: float) -> None:
    with pytest.raises(SpecError, match=r"merge\.density"):
        Pipeline.from_spec(
            spec_of(models / "base", {"one": models / "one"}, {"type": rule, "density": density})
        )


def test_density_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    for rule in ("dare", "ties", "della", "breadcrumbs", "sce"):
        assert main(["show", rule]) == 0
        lines = capsys.readouterr().out.splitlines()
        about = next(number for number, text in enumerate(lines) if text.strip().startswith("density"))
        assert any(word in " ".join(lines[about : about + 3]) for word in ("kept", "keep", "selected"))


@pytest.mark.usefixtures("unread")
def test_experts_of_other_sizes_are_listed_together_before_weights_are_read(
    models: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = hf.AutoConfig.from_pretrained(models / "base")
    config.intermediate_size = 80
    saved(hf.LlamaForCausalLM(config), tmp_path / "wide")
    from safetensors.torch import load_file, save_file

    odd = copied(models / "two", tmp_path / "odd")
    tensors = load_file(odd / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 63)
    save_file(tensors, odd / "model.safetensors", {"format": "pt"})
    experts = {"wide": tmp_path / "wide", "odd": odd, "right": models / "three"}

    with pytest.raises(CheckpointError) as caught:
        run(tmp_path / "out", spec_of(models / "base", experts, ADD))

    text = str(caught.value)
    for projection in ("gate", "up", "down"):
        for layer in (0, 1):
            assert f"model.layers.{layer}.mlp.{projection}_proj.weight" in text
    assert 'expert "wide"' in text
    assert 'expert "odd"' in text
    assert "right" not in text
    assert not (tmp_path / "out").exists()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "rope": ({"rope_theta": 500000.0, "rope_parameters": None}, "500000"),
    "activation": ({"hidden_act": "gelu"}, "'gelu', the base has 'silu'"),
    "heads": ({"num_attention_heads": 8, "head_dim": 4}, "num_attention_heads 8, the base has 4"),
}


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_that_give_equal_shapes_another_meaning_stop_the_run(
    models: Path, tmp_path: Path, kind: str
) -> None:
    change, words = CONFIGS[kind]
    other = copied(models / "one", tmp_path / "other", **change)
    spec = spec_of(models / "base", {"one": other, "two": models / "two"}, ADD)

    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec).validate()

    assert words in str(caught.value)
    assert '"allow": ["config"]' in str(caught.value)
    assert 'expert "two"' not in str(caught.value)
    notes = Pipeline.from_spec({**spec, "allow": ["config"]}).validate()
    assert any(words in note for note in notes)
