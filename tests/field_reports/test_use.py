"""Using it: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import save_file
from small_models import clip_tower, expert, llama, run, saved, spec_of, tensors_in

import merging
from merging.checkpoints.safetensors import SafetensorsSource
from merging.components import calibrators, strategies
from merging.errors import RuleError
from merging.pipeline import Pipeline

TASKS = ("one", "two")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and a CLIP tower with two experts each, examples and heads."""
    folder = tmp_path_factory.mktemp("models")
    for kind, base in (("llama", llama()), ("clip", clip_tower())):
        saved(base, folder / kind / "base")
        for seed, name in enumerate(TASKS, start=1):
            saved(expert(base, seed), folder / kind / name)
    generator = torch.Generator().manual_seed(0)
    save_file({"pixel_values": torch.randn(8, 3, 32, 32, generator=generator)}, folder / "x.safetensors")
    save_file({"weight": torch.randn(5, 32, generator=generator)}, folder / "head.safetensors")
    return folder


def spec(models: Path, kind: str, merge: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return spec_of(models / kind / "base", {name: models / kind / name for name in TASKS}, merge, **changes)


def test_a_run_into_a_file_tells_phase_amount_and_time_in_few_lines(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec(models, "llama", {"type": "average"})))

    code = main(["pipeline", "run", str(tmp_path / "spec.json"), "--out", str(tmp_path / "out"), "--json"])

    out, err = capsys.readouterr()
    lines = err.splitlines()
    merge = [line for line in lines if line.startswith("merge ")]
    assert code == 0
    assert any("%" in line and " of " in line and "/s" in line for line in merge)
    assert len(lines) < 20  # not one for each tensor
    assert "\x1b" not in err
    assert json.loads(out)["checkpoint"] == str(tmp_path / "out" / "merged")  # for machines


def test_quiet_is_quiet(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec(models, "llama", {"type": "average"})))

    code = main(["pipeline", "run", str(tmp_path / "spec.json"), "--out", str(tmp_path / "out"), "--quiet"])

    assert code == 0
    assert capsys.readouterr().err == ""


def test_progress_never_goes_back_and_ends_whole(models: Path, tmp_path: Path) -> None:
    """As a bar in someone else's program would draw it."""
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    Pipeline.from_spec(spec(models, "llama", {"type": "ties"})).run(tmp_path / "out", progress=note)

    assert {"hash inputs", "scan", "merge"} <= seen.keys()
    for events in (seen["hash inputs"], seen["merge"]):
        assert [done for done, _ in events] == sorted(done for done, _ in events)
        assert events[-1][0] == events[-1][1]


@pytest.mark.parametrize("rule", [name for name in merging.available("strategies") if name != "checkpoint"])
def test_the_plan_of_every_rule_tells_memory_disk_and_examples_and_reads_no_weights(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    read = SafetensorsSource.read

    def first_rows(source: SafetensorsSource, name: str, rows: slice | None = None) -> torch.Tensor:
        assert rows is not None, f"{name} was read"
        return read(source, name, rows)

    monkeypatch.setattr(SafetensorsSource, "read", first_rows)
    needs = strategies.get(rule).needs
    data = {
        "calibration": {"type": "tensors", "path": str(models / "x.safetensors")},
        "head": {"type": "linear", "path": str(models / "head.safetensors")},
    }
    asked = spec(models, "clip", {"type": rule}, output={"path": str(tmp_path / "out")})
    if rule == "slerp":
        asked["experts"].pop("two")
    tasks = dict.fromkeys(asked["experts"], data) if "data" in needs else {}

    plan = Pipeline.from_spec({**asked, "tasks": tasks}).plan()

    assert plan.peak_bytes > plan.start_bytes > 0
    assert plan.disk_bytes > plan.base.bytes * 0.9
    assert plan.disk_free_bytes > 0
    assert plan.steps[0].memory_law
    assert plan.steps[0].examples == (16 if "data" in needs else 0)


RULE = '''
import merging

@merging.strategy("{name}")
class Rule(merging.TensorMerger):
    """Coordinate-wise median of the experts."""
    def combine(self, name, base_S, deltas_NS):
        {body}
'''


def test_a_rule_in_a_file_outside_the_package_is_found_by_its_path(models: Path, tmp_path: Path) -> None:
    body = "return base_S + deltas_NS.median(dim=0).values"
    (tmp_path / "median.py").write_text(RULE.format(name="median_beside_the_spec", body=body))
    asked = spec(models, "llama", {"type": "median_beside_the_spec"}, plugins=["median.py"])
    (tmp_path / "spec.json").write_text(json.dumps(asked))

    Pipeline.from_spec(tmp_path / "spec.json").run(tmp_path / "out")

    experts = [tensors_in(models / "llama" / name) for name in TASKS]
    for name, tensor in tensors_in(tmp_path / "out" / "merged").items():
        assert torch.allclose(
            tensor, torch.stack([one[name] for one in experts]).min(dim=0).values, atol=1e-6
        )


def test_a_rule_of_another_package_is_found_by_its_entry_point(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "return base_S + deltas_NS[0]"
    (tmp_path / "their_rules.py").write_text(RULE.format(name="theirs_by_entry", body=body))
    info = tmp_path / "their_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[merging.strategies]\ntheirs_by_entry = their_rules:Rule\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert "theirs_by_entry" in merging.available("strategies")
    found = run(tmp_path / "out", spec(models, "llama", {"type": "theirs_by_entry"}))

    one = tensors_in(models / "llama" / "one")
    assert all(torch.allclose(tensor, one[name], atol=1e-6) for name, tensor in tensors_in(found).items())


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("of_wrong_shape", "return base_S[:1]", r'"of_wrong_shape" returned shape .* for tensor "'),
        ("that_raises", "raise ValueError('boom')", r'"that_raises" failed on tensor ".*boom'),
        ("of_nothing", "return None", r'"of_nothing" returned a NoneType for tensor "'),
    ],
)
def test_a_rule_of_ones_own_that_fails_is_named_with_the_tensor(
    models: Path, tmp_path: Path, name: str, body: str, words: str
) -> None:
    (tmp_path / "rules.py").write_text(RULE.format(name=name, body=body))
    asked = spec(models, "llama", {"type": name}, plugins=["rules.py"])
    (tmp_path / "spec.json").write_text(json.dumps(asked))

    with pytest.raises(RuleError, match=words):
        Pipeline.from_spec(tmp_path / "spec.json").run(tmp_path / "out")


def test_every_method_tells_its_source_and_what_each_setting_means() -> None:
    for kind in (strategies, calibrators):
        for name in kind.names():
            method = kind.get(name)
            if method.__module__.startswith("merging.") and name != "checkpoint":
                assert method.paper, name
                for setting, field in method.Settings.model_fields.items():
                    assert field.description, f"{name}.{setting}"


def test_trimming_over_the_model_or_each_tensor_is_a_choice_with_two_results(models: Path) -> None:
    base, one = (tensors_in(models / "llama" / name) for name in ("base", "one"))
    one = {name: tensor + (0.5 if "lm_head" in name else 0.0) for name, tensor in one.items()}

    def changed(trim: str) -> dict[str, float]:
        found = merging.merge("ties", base, {"one": one}, density=0.2, trim=trim, scale=1.0)
        return {name: float((found[name] != base[name]).double().mean()) for name in base}

    whole, each = changed("model"), changed("tensor")

    assert whole["lm_head.weight"] > 0.9  # the largest changes of the model are all there
    assert all(abs(share - 0.2) < 0.05 for share in each.values())
