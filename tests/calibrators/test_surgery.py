from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel

from merging.backbones.clip_vision import ClipVision
from merging.calibrators.feature_training import drawn_batches
from merging.calibrators.surgery import Surgery
from merging.calibrators.surgery_training import (
    FeatureCorrection,
    initial,
    load_corrections,
    save_correction,
    train_surgery,
)
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.contracts.models import Models
from merging.data.opening import open_examples
from merging.data.spec import TensorsData
from merging.data.task import CalibrationData
from merging.errors import DataError, NumericalError, RuleError
from merging.evaluation.forward import all_features
from merging.streaming import load_model

FEW = {"rank": 4, "iterations": 60, "learning_rate": 1e-2}


def features(examples=40, width=12, seed=0):
    return torch.randn(examples, width, generator=torch.Generator().manual_seed(seed))


def trained(merged_NF, expert_NF, *, task="mnist", iterations=200, learning_rate=1e-2):
    start = initial(merged_NF.shape[1], 4, seed=0, task=task)
    batches = drawn_batches(
        len(merged_NF), iterations=iterations, batches=2, batch_size=16, seed=0, task=task
    )
    return train_surgery(merged_NF, expert_NF, start, batches=batches, learning_rate=learning_rate)


def test_it_starts_as_the_identity():
    start = initial(12, 4, seed=0, task="mnist")

    assert torch.equal(start(features()), features())
    assert start.down_RF.abs().max() <= 12**-0.5


def test_equal_features_stay_equal():
    same = trained(features(), features())

    assert torch.equal(same(features()), features())
    assert same.last_loss == 0


def test_a_shift_is_learned():
    merged_NF, expert_NF = features().relu() + 1, features().relu()

    after = trained(merged_NF, expert_NF)

    assert (after(merged_NF) - expert_NF).abs().mean() < 0.2 * (merged_NF - expert_NF).abs().mean()


def test_one_step_is_adams():
    """The first step of Adam moves each entry by the learning rate, against the sign of its gradient."""
    merged_NF, expert_NF = features(), features(seed=1)
    start = initial(12, 4, seed=0, task="mnist")

    after = train_surgery(merged_NF, expert_NF, start, batches=[torch.arange(40)], learning_rate=1e-3)

    hidden_NR = torch.relu(merged_NF @ start.down_RF.T)
    gradient_FR = -(merged_NF - expert_NF).sign().T @ hidden_NR
    assert torch.allclose(after.up_FR, -1e-3 * gradient_FR.sign(), atol=1e-6)
    assert torch.equal(after.down_RF, start.down_RF)
    assert after.last_loss == pytest.approx((merged_NF - expert_NF).abs().mean().item())


def test_batches_are_drawn_anew_in_each_iteration():
    steps = list(drawn_batches(40, iterations=3, batches=2, batch_size=16, seed=0, task="mnist"))

    assert [len(rows) for rows in steps] == [16] * 6
    assert all(len(set(torch.cat(steps[start : start + 2]).tolist())) == 32 for start in (0, 2, 4))
    assert not torch.equal(steps[0], steps[2])


def test_few_examples_make_smaller_and_fewer_batches():
    steps = list(drawn_batches(10, iterations=2, batches=2, batch_size=16, seed=0, task="mnist"))

    assert [len(rows) for rows in steps] == [10, 10]


def test_the_start_depends_on_seed_and_task():
    starts = [initial(12, 4, seed=seed, task=task).down_RF for seed in (0, 1) for task in ("a", "b")]

    assert torch.equal(starts[0], initial(12, 4, seed=0, task="a").down_RF)
    assert len({tuple(start.flatten().tolist()) for start in starts}) == 4


def test_corrections_are_read_as_they_were_written(tmp_path):
    written = {"mnist": trained(features(), features(seed=1)), "org/name é": initial(12, 4, seed=0, task="x")}

    paths = [save_correction(one, task, tmp_path / "heads") for task, one in written.items()]
    read = load_corrections(tmp_path / "heads")

    assert paths[0].name == "mnist.surgery.safetensors"
    assert all(path.parent == tmp_path / "heads" for path in paths)
    assert read.keys() == written.keys()
    assert torch.equal(read["mnist"](features()), written["mnist"](features()))


def test_folders_and_files_without_corrections(tmp_path):
    with pytest.raises(DataError, match=r"no \*\.surgery\.safetensors"):
        load_corrections(tmp_path)

    save_file({"down": torch.ones(4, 12), "up": torch.ones(12, 3)}, tmp_path / "a.surgery.safetensors")
    with pytest.raises(DataError, match=r"down \(4, 12\), up \(12, 3\)"):
        load_corrections(tmp_path)


@pytest.fixture(scope="module")
def config():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return CLIPVisionConfig(**sizes, image_size=32, patch_size=8, architectures=["CLIPVisionModel"])


@pytest.fixture(scope="module")
def models(config):
    def source(seed):
        torch.manual_seed(seed)
        return StateDictSource(CLIPVisionModel(config), f"model {seed}")

    experts = {"mnist": source(1), "svhn": source(2)}
    return Models(source(0), experts, dict.fromkeys(experts, 1.0), ClipVision(config))


@pytest.fixture(scope="module")
def merged(models):
    def mean(name):
        return sum(source.read(name) for source in models.experts.values()) / 2

    tensors = {name: mean(name) for name in models.base.names()}
    return StateDictSource(tensors, "merged")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, examples = tmp_path_factory.mktemp("data"), {}
    for seed, task in enumerate(("mnist", "svhn")):
        pixels = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        save_file({"pixel_values": pixels}, folder / f"{task}.safetensors")
        spec = TensorsData(path=folder / f"{task}.safetensors", batch_size=8)
        examples[task] = open_examples(spec, task=task, purpose="calibration", base_folder=None, seed=0)
    return CalibrationData(examples)


def calibrated(merged, models, data, **settings):
    surgery, sink = Surgery(**{**FEW, **settings}), StateDictSink(models.base)
    with sink:
        notes = surgery.calibrate(merged, models, data, sink)
    return surgery, sink.tensors, notes


def test_weights_stay_the_merged_ones(merged, models, data):
    _, tensors, notes = calibrated(merged, models, data)

    assert all(torch.equal(tensors[name], merged.read(name)) for name in merged.names())
    assert notes["left"].keys() == set(merged.names())


def test_adapted_features_are_nearer_to_the_experts(merged, models, data):
    surgery, _, notes = calibrated(merged, models, data)

    for task, expert in models.experts.items():
        ours = torch.cat(list(all_features(load_model(models.backbone, merged), models.backbone, data[task])))
        theirs = torch.cat(
            list(all_features(load_model(models.backbone, expert), models.backbone, data[task]))
        )
        before, after = (ours - theirs).abs().mean(), (surgery.adapt(ours, task) - theirs).abs().mean()
        assert after < 0.9 * before
        assert notes["last_loss"][task] < before


def test_merged_equal_to_expert_needs_no_correction(models, data):
    one = Models(models.base, {"mnist": models.experts["mnist"]}, {"mnist": 1.0}, models.backbone)

    surgery, _, _ = calibrated(models.experts["mnist"], one, data)

    assert torch.equal(surgery.adapt(features(width=32), "mnist"), features(width=32))


def test_order_of_tasks_does_not_matter(merged, models, data):
    turned = Models(models.base, dict(reversed(models.experts.items())), models.weights, models.backbone)

    one, other = calibrated(merged, models, data)[0], calibrated(merged, turned, data)[0]

    for task in models.tasks:
        assert torch.equal(one.corrections[task].up_FR, other.corrections[task].up_FR)


def test_plugins_make_a_new_object_adapt_alike(merged, models, data, tmp_path):
    surgery = calibrated(merged, models, data)[0]

    paths = surgery.save_plugins(tmp_path)
    read = Surgery()
    read.load_plugins(tmp_path)

    assert sorted(path.name for path in paths) == ["mnist.surgery.safetensors", "svhn.surgery.safetensors"]
    assert torch.equal(read.adapt(features(width=32), "svhn"), surgery.adapt(features(width=32), "svhn"))


def test_progress_reaches_its_total(merged, models, data):
    seen, sink = {}, StateDictSink(models.base)

    Surgery(**FEW).calibrate(
        merged, models, data, sink, progress=lambda stage, done, total: seen.update({stage: (done, total)})
    )

    assert seen == {f'surgery of task "{task}"': (120, 120) for task in models.tasks}


def test_a_task_it_was_not_trained_for():
    surgery = Surgery()
    surgery.corrections["mnist"] = FeatureCorrection(torch.zeros(4, 12), torch.zeros(12, 4))

    with pytest.raises(RuleError, match='no correction for task "svhn"; there are: mnist'):
        surgery.adapt(features(), "svhn")


def test_an_expert_without_examples(merged, models, data):
    with pytest.raises(DataError, match="no calibration examples for svhn"):
        calibrated(merged, models, CalibrationData({"mnist": data["mnist"]}))


def test_an_expert_whose_features_are_not_finite(merged, models, data):
    tensors = {name: models.base.read(name).clone() for name in models.base.names()}
    next(tensors[name] for name in tensors if name.endswith("q_proj.weight")).fill_(float("nan"))
    broken = Models(models.base, {"mnist": StateDictSource(tensors)}, {"mnist": 1.0}, models.backbone)

    with pytest.raises(NumericalError, match='expert "mnist"'):
        calibrated(merged, broken, data)


def test_importing_it_does_not_import_torch():
    code = "import sys, merging.calibrators.surgery; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
