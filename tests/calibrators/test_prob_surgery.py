from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import Given, expert_of, made, opened, pixels

from merging.calibrators.feature_training import drawn_batches
from merging.calibrators.prob_surgery import ProbSurgery
from merging.calibrators.prob_surgery_training import (
    BiasDistribution,
    divergence,
    initial,
    load_distributions,
    sampled,
    save_distribution,
    train_prob_surgery,
)
from merging.calibrators.surgery import Surgery
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.data.task import CalibrationData
from merging.errors import DataError, RuleError
from merging.evaluation.forward import all_features
from merging.streaming import load_model


def features(examples=40, width=12, seed=0):
    return torch.randn(examples, width, generator=torch.Generator().manual_seed(seed))


def trained(merged_NF, expert_NF, *, steps=300, weight=1e-4, seed=0):
    batches = drawn_batches(
        len(merged_NF), iterations=steps, batches=1, batch_size=16, seed=seed, task="mnist"
    )
    return train_prob_surgery(
        merged_NF,
        expert_NF,
        initial(merged_NF.shape[1], 8, seed=seed, task="mnist"),
        batches=batches,
        learning_rate=1e-2,
        divergence_weight=weight,
        seed=seed,
        task="mnist",
    )


def test_it_starts_as_the_identity_with_no_divergence():
    start = initial(12, 8, seed=0, task="mnist")

    assert torch.equal(start(features()), features())
    assert divergence(*start.moments(features())).item() == 0


def test_divergence_is_that_of_two_normals():
    mean_BF, logvar_BF = features(seed=1), features(seed=2)
    ours = torch.distributions.Normal(mean_BF, (logvar_BF / 2).exp())
    standard = torch.distributions.Normal(torch.zeros(12), torch.ones(12))

    wanted = torch.distributions.kl_divergence(ours, standard).sum(-1).mean()

    assert torch.allclose(divergence(mean_BF, logvar_BF), wanted)


def test_inference_subtracts_the_mean_alone():
    module = BiasDistribution(torch.randn(8, 12), torch.randn(12, 8), torch.randn(12, 8))
    mean_BF, logvar_BF = module.moments(features())

    assert torch.allclose(module(features()), sampled(features(), mean_BF, logvar_BF, torch.zeros(40, 12)))


def test_a_shift_is_learned():
    merged_NF, expert_NF = features().relu() + 1, features().relu()

    after = trained(merged_NF, expert_NF)

    assert (after(merged_NF) - expert_NF).abs().mean() < 0.4 * (merged_NF - expert_NF).abs().mean()


def test_the_seed_decides_the_noise():
    one, same, other = (trained(features(), features(seed=1), steps=5, seed=seed) for seed in (0, 0, 1))

    assert torch.equal(one.logvar_FH, same.logvar_FH)
    assert not torch.equal(one.logvar_FH, other.logvar_FH)


def test_modules_are_read_as_they_were_written(tmp_path):
    written = trained(features(), features(seed=1), steps=5)

    path = save_distribution(written, "mnist", tmp_path / "heads")
    read = load_distributions(tmp_path / "heads")["mnist"]

    assert path.name == "mnist.prob_surgery.safetensors"
    assert torch.equal(read(features()), written(features()))
    assert torch.equal(read.logvar_FH, written.logvar_FH)


def test_files_of_another_method_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"prob_surgery: no \*\.prob_surgery\.safetensors"):
        load_distributions(tmp_path)

    save_file({"up": torch.ones(4, 12), "mean": torch.ones(12, 3)}, tmp_path / "a.prob_surgery.safetensors")
    with pytest.raises(DataError, match=r"expected up \[hidden, features\], mean and logvar"):
        load_distributions(tmp_path)


@pytest.fixture(scope="module")
def setting():
    backbone, model, _ = made("clip")
    experts = {"a": expert_of(model, 1, 0.05), "b": expert_of(model, 2, 0.05)}
    models = opened(model, experts, backbone)
    merged = StateDictSource({name: (experts["a"][name] + experts["b"][name]) / 2 for name in experts["a"]})
    return models, merged, CalibrationData(dict.fromkeys(experts, Given(pixels(20), pixels(12, seed=1))))


def test_features_come_nearer_to_the_experts_and_weights_stay(setting):
    models, merged, data = setting
    surgery, sink, seen = (
        ProbSurgery(hidden=8, steps=150, learning_rate=1e-2),
        StateDictSink(models.base),
        {},
    )

    with sink:
        surgery.calibrate(
            merged, models, data, sink, progress=lambda *event: seen.update({event[0]: event[1:]})
        )

    assert all(torch.equal(sink.tensors[name], merged.read(name)) for name in merged.names())
    assert seen == {f'prob_surgery of task "{task}"': (150, 150) for task in models.tasks}
    for task, expert in models.experts.items():
        ours, theirs = (
            torch.cat(list(all_features(load_model(models.backbone, source), models.backbone, data[task])))
            for source in (merged, expert)
        )
        assert (surgery.adapt(ours, task) - theirs).abs().mean() < 0.9 * (ours - theirs).abs().mean()


def test_plugins_make_a_new_object_adapt_alike(setting, tmp_path):
    models, merged, data = setting
    surgery, sink = ProbSurgery(hidden=8, steps=5), StateDictSink(models.base)
    with sink:
        surgery.calibrate(merged, models, data, sink)

    surgery.save_plugins(tmp_path)
    read = ProbSurgery()
    read.load_plugins(tmp_path)

    assert torch.equal(read.adapt(features(width=32), "b"), surgery.adapt(features(width=32), "b"))
    with pytest.raises(RuleError, match='prob_surgery has no correction for task "c"; there are: a, b'):
        read.adapt(features(width=32), "c")


@pytest.mark.parametrize("method", [Surgery, ProbSurgery])
def test_page_lists_every_setting_with_its_default(method):
    page = (Path(__file__).parents[2] / "docs" / "methods" / f"{method.name}.md").read_text()

    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]

    listed = {cells[1].strip(" `"): json.loads(cells[2]) for cells in rows}
    assert listed == {key: field.default for key, field in method.Settings.model_fields.items()}
    assert method.paper in page
