"""The suite of pictures in small: splits, drawings, training, the grid and its tables on a tiny model."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.machine import machine
from benchmarks.suites import experiments, grid, identity, report, tables
from benchmarks.suites.corrupted import CORRUPTIONS, corrupted
from benchmarks.suites.experiments import SAMPLES, apart
from benchmarks.suites.rows import RULES, Row
from benchmarks.suites.stamps import stamped
from benchmarks.suites.vision8 import grey, splits
from benchmarks.suites.vision8.artwork import WHITE, IconSets, concept_of, placed
from benchmarks.suites.vision8.splits import Drawn, split
from benchmarks.suites.vision8.training import Recipe, train, write_head, write_pool
from merging.checkpoints.source import CheckpointSource
from merging.demo.packages import Archive
from merging.demo.vision.base_model import MEAN, STD
from merging.demo.vision.drawing import PIXELS
from merging.demo.vision.tasks import write_pictures
from merging.errors import OutputError, SpecError

# Of transformers, about what peft asks it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def picture(number: int) -> np.ndarray:
    return np.full((4, 4, 3), number, dtype=np.uint8)


def test_parts_share_no_picture_and_no_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRAIN": 30, "CALIBRATION": 6, "VALIDATION": 5, "TEST": 4}.items():
        monkeypatch.setattr(splits, name, value)
    known, unseen = Drawn(), Drawn()
    for number in range(60):
        known.add(picture(number), number % 2, f"subject {number // 3}")
    known.add(picture(0), 1, "a copy")
    for number in range(55, 70):
        unseen.add(picture(number), 0, "other")
    known.add(None, 0, "not drawn")

    found = split("task", ("a", "b"), known, unseen, seed=0)

    parts = {
        name: getattr(found, name).pixels[:, 0, 0, 0].tolist()
        for name in ("train", "calibration", "validation")
    }
    test = found.test.pixels[:, 0, 0, 0].tolist()
    assert [len(part) for part in (*parts.values(), test)] == [30, 6, 5, 4]
    subjects = [{number // 3 for number in part} for part in parts.values()]
    assert len(set.union(*subjects)) == sum(map(len, subjects))
    assert min(test) >= 60  # what training knows is not tested
    again = split("task", ("a", "b"), known, unseen, seed=0)
    assert (again.train.pixels == found.train.pixels).all()


def test_too_few_pictures_are_refused() -> None:
    known = Drawn()
    for number in range(20):
        known.add(picture(number), 0, str(number))

    with pytest.raises(ValueError, match="20 pictures are too few"):
        split("task", ("a",), known, known, seed=0)


@dataclass(frozen=True)
class Files(Archive):
    files: Mapping[str, bytes] = field(default_factory=dict)

    def matching(self, pattern: str) -> dict[str, bytes]:
        return {name: data for name, data in self.files.items() if fnmatch(name, pattern)}

    def read(self, member: str) -> bytes:
        return self.files[member]


def idx(values: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes())


def garments(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(seed)
    labels = dice.integers(0, 10, count)
    pixels = dice.integers(0, 60, (count, 28, 28))
    pixels[np.arange(count), :, :] += (labels * 15)[:, None, None]
    return pixels, labels


def fashion(folder: Path) -> Archive:
    files = {}
    for part, count, seed in (("train", 200, 0), ("t10k", 60, 1)):
        pixels, labels = garments(count, seed)
        for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            files[f"usr/share/datasets/fashion-mnist/{part}-{kind}-ubyte.gz"] = idx(values)
    return Files(folder / "none", files)


def test_icons_are_drawn_in_their_colours_and_told_by_their_concept(tmp_path: Path) -> None:
    body = '<path fill="currentColor" d="M2 2h12v12H2z"/>'
    icons = {"bell": {"body": body}, "broken": {"body": "<path"}}
    given = {"package/json/one.json": json.dumps({"icons": icons, "width": 16, "height": 16}).encode()}
    sets = IconSets(Files(tmp_path, {**given, "package/collections.json": b"{}"}))

    found = sets.drawn("one", "bell", (10, 200, 30))

    assert found is not None
    assert found.getpixel((64, 64)) == (10, 200, 30, 255)
    assert found.getpixel((2, 2))[3] == 0
    assert sets.drawn("one", "lamp") is None
    assert sets.drawn("one", "broken") is None
    names = ("outline-bell", "bell-2-fill", "bell-off")
    assert {concept_of(name) for name in names} == {"bell"}


def test_artwork_is_placed_alike_by_one_seed_and_nothing_is_drawn_of_nothing() -> None:
    artwork = Image.new("RGBA", (40, 30), (255, 0, 0, 255))

    first, again, other = (placed(artwork, WHITE, random.Random(seed)) for seed in (0, 0, 1))

    assert first is not None
    assert first.shape == (PIXELS, PIXELS, 3)
    assert (first == again).all()
    assert (first != other).any()
    assert placed(Image.new("RGBA", (40, 30)), WHITE, random.Random(0)) is None


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of one kind of pictures on a tiny transformer: base, experts, adapters, spec."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("suite")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    config = hf.Dinov2Config(**sizes, patch_size=14, image_size=PIXELS, architectures=["Dinov2Model"])
    hf.Dinov2Model(config).save_pretrained(folder / "models/base")
    hf.BitImageProcessor(
        size={"shortest_edge": PIXELS},
        crop_size={"height": PIXELS, "width": PIXELS},
        image_mean=list(MEAN),
        image_std=list(STD),
    ).save_pretrained(folder / "models/base")
    spec: dict[str, Any] = {"base": "models/base", "experts": {}, "tasks": {}, "merge": {"type": "average"}}
    spec["backbone"] = {"type": "vit", "features": "cls"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TRAIN": 60, "CALIBRATION": 24, "VALIDATION": 20, "TEST": 20}.items():
            patch.setattr(splits, name, value)
        for seed, task in enumerate(("one", "two")):
            _make_task(folder, task, grey.fashion(fashion(folder), seed), seed, spec)
    (folder / "spec.json").write_text(json.dumps(spec))
    adapters = {task: {"adapter": f"adapters/{task}"} for task in ("one", "two")}
    (folder / "spec-lora.json").write_text(json.dumps({**spec, "experts": adapters}))
    return folder


def _make_task(folder: Path, task: str, found: splits.Splits, seed: int, spec: dict[str, Any]) -> None:
    pool, head = folder / f"{task}.pool", folder / f"heads/{task}.safetensors"
    head.parent.mkdir(exist_ok=True)
    write_pool(found.train, pool)
    write_head(folder / "models/base", pool, len(found.classes), head)
    for rank, place in ((0, folder / "models" / task), (2, folder / "adapters" / task)):
        given = {"base": str(folder / "models/base"), "pools": {task: str(pool)}, "heads": {task: str(head)}}
        recipe = Recipe(**given, folder=str(place), steps=2, seed=seed, learning_rate=1e-3, rank=rank)
        place.mkdir(parents=True)
        train(recipe, place, lambda *_: None)
    data = folder / "data" / task
    sources = {}
    for part in ("calibration", "validation", "test"):
        write_pictures(getattr(found, part), found.classes, data / part)
        sources[part] = {"type": "images", "path": f"data/{task}/{part}"}
    spec["experts"][task] = {"model": f"models/{task}"}
    spec["tasks"][task] = {**sources, "head": {"type": "linear", "path": f"heads/{task}.safetensors"}}


def test_experts_and_adapters_were_moved_from_the_base(suite: Path) -> None:
    base, expert = (load_file(suite / f"models/{name}/model.safetensors") for name in ("base", "one"))
    adapter = load_file(suite / "adapters/one/adapter_model.safetensors")

    assert any((base[name] != expert[name]).any() for name in base)
    assert len(adapter) == 2 * 2 * 6  # two factors for each linear of both blocks
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("spec", ["spec.json", "spec-lora.json"])
def test_the_grid_measures_each_entry_once(suite: Path, tmp_path: Path, spec: str) -> None:
    records = grid.Records(tmp_path / "records.jsonl")
    opened = grid.Suite(suite / spec)
    rows = (
        Row("average", "average", calibrators=("featcal", "surgery")),
        Row("Task Arithmetic", "task_arithmetic", sweep={"scale": (0.1, 0.5)}, calibrators=()),
    )

    grid.references(opened, suite / "models/base", records)
    grid.measure(opened, "rules", rows, records)

    written = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(written) == 3 + 3 + 1
    again = grid.Records(tmp_path / "records.jsonl")
    assert again.entries == records.entries
    grid.measure(opened, "rules", rows, again)
    assert (tmp_path / "records.jsonl").read_text().splitlines() == written
    chosen = records.entries["rules", "Task Arithmetic", "none", 0].settings["scale"]
    assert chosen in (0.1, 0.5)
    table = tables.rules(records)
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [
        "| base", "| experts", "| joint model", "| average", "| Task Arithmetic",
    ]  # fmt: skip
    experts = records.entries["references", "experts", "none", 0].scores
    assert f"{100 * sum(experts.values()) / 2:.1f} (100.0)" in table
    assert f"scale {chosen}" in table
    assert len(tables.per_task(records, "rules").splitlines()) == 2 + 3 + 4


def test_records_are_those_of_one_build(suite: Path, tmp_path: Path) -> None:
    other = tmp_path / "suite"
    shutil.copytree(suite, other)
    identity.claim(tmp_path, grid.Suite(suite / "spec.json"))
    identity.claim(tmp_path, grid.Suite(other / "spec.json"))  # the same, elsewhere

    weights = load_file(other / "models/two/model.safetensors")
    first = next(iter(weights))
    save_file(
        {**weights, first: weights[first] + 1}, other / "models/two/model.safetensors", {"format": "pt"}
    )
    next((other / "data/one/test").rglob("*.png")).unlink()

    with pytest.raises(OutputError, match='expert "two", task one differ'):
        identity.claim(tmp_path, grid.Suite(other / "spec.json"))
    grid.Records(tmp_path / "records.jsonl").add(grid.Entry("rules", "average", "none", 0, {"one": 0.5}))
    (tmp_path / identity.FILE).unlink()
    with pytest.raises(OutputError, match=r"no suite\.json that says of which build"):
        identity.claim(tmp_path, grid.Suite(suite / "spec.json"))


def test_a_build_is_told_by_adapters_scales_and_by_the_joint_model_too(suite: Path, tmp_path: Path) -> None:
    found = identity.identity(grid.Suite(suite / "spec-lora.json"), suite / "models/one")
    other = tmp_path / "suite"
    shutil.copytree(suite, other)
    config = other / "adapters/one/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 64}))

    changed = identity.identity(grid.Suite(other / "spec-lora.json"), suite / "models/two")

    assert {role for role in found if found[role] != changed[role]} == {'expert "one"', "joint model"}


def test_what_was_measured_becomes_a_section_with_figures(tmp_path: Path) -> None:
    records = grid.Records(tmp_path / "records.jsonl")
    scores = {"one": 0.5, "two": 0.25}
    for row in ("base", "experts", "joint model"):
        records.add(grid.Entry("references", row, "none", 0, scores))
    for row in ("average", "Chain of Merges"):
        for calibrator in ("none", "featcal"):
            records.add(grid.Entry("rules", row, calibrator, 0, scores))
            for count in SAMPLES:
                better = {"one": 0.5, "two": 0.25 + count / 1024}
                records.add(grid.Entry(f"samples {count}", row, calibrator, 0, better))
    for number, score in enumerate((0.5, 0.6, 0.7), 1):
        entry = grid.Entry(f"rounds {number}", "average", "featcal", 0, {"one": score, "two": score})
        records.add(entry)
    records.add(grid.Entry("ridge 0.01", "average", "featcal", 0, scores))
    records.add(grid.Entry("corruption fog", "average", "featcal", 0, scores))
    records.add(grid.Entry("corruption fog", "average", "none", 0, scores))
    (tmp_path / "shift.json").write_text(json.dumps({"average": [0.1, 0.4], "RegMean": [0.1, 0.2]}))
    (tmp_path / "cosines.json").write_text(json.dumps({"average": {"one": 0.4, "two": 0.25}}))
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("# Results\n\n## Other\n\ntext\n")

    spec = tmp_path / "suites" / "tiny" / "spec.json"
    for _ in range(2):
        with stamped(tmp_path, ["measure", str(spec), "--rows", "Task Arithmetic"]):
            pass
        report.write(page, "vision, in small", tmp_path)

    text = page.read_text()
    assert text.count("## vision, in small") == 1
    assert "## Other" in text
    command = "python -m benchmarks.suites measure suites/tiny/spec.json --rows 'Task Arithmetic'"
    assert text.count(command) == 1
    assert text.count(machine()) == 1
    assert "| average | | 37.5 (100.0) | 37.5 (100.0) |" in " ".join(text.split("  "))
    assert "| average + FeatCal | 37.5 | 37.6 | 37.7 | 37.9 | 39.1 | 50.0 |" in text
    assert "| FeatCal on the average, 64 examples, `ridge` | 0.01 |" in text
    assert "| calibration examples with | fog |" in text
    assert "| average + FeatCal | 50.0 | 60.0 | 70.0 |" in text
    assert "| model | one | two |" in text
    assert "| average | 0.400 | 0.250 |" in text
    for name in ("samples", "shift"):
        figure = page.parent / f"figures/vision-in-small-{name}.svg"
        assert f"(figures/{figure.name})" in text
        assert figure.read_text().count("<polyline") == (3 if name == "samples" else 2)


def test_seeds_are_put_together(tmp_path: Path) -> None:
    records = grid.Records(tmp_path / "records.jsonl")
    for seed, score in enumerate((0.5, 0.6, 0.7)):
        records.add(grid.Entry("seeds", "average", "featcal", seed, {"one": score, "two": score}))

    assert tables.spread(records, "seeds").splitlines()[2] == "| average + FeatCal | 3 | 60.0 | 10.00 |"


def test_draws_differ_by_seed_and_number(suite: Path) -> None:
    opened = grid.Suite(suite / "spec.json")

    some, others = (opened.data(seed=seed, examples=8) for seed in (0, 1))

    assert len(some["one"]) == 8
    assert len(opened.data()["one"]) == 24
    assert some["one"].fingerprint != others["one"].fingerprint


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupted_examples_are_others_of_the_same_form(suite: Path, kind: str) -> None:
    data = grid.Suite(suite / "spec.json").data(examples=8)

    bad, again = corrupted(data, kind, 0), corrupted(data, kind, 0)

    for task in data:
        for batch, other, same in zip(
            data[task].batches(), bad[task].batches(), again[task].batches(), strict=True
        ):
            assert other["pixel_values"].shape == batch["pixel_values"].shape
            assert torch.equal(other["pixel_values"], same["pixel_values"])
            distance = (other["pixel_values"] - batch["pixel_values"]).abs().mean()
            assert 0.05 < float(distance) < 3


def test_how_far_merged_models_are_from_the_experts(suite: Path) -> None:
    opened = grid.Suite(suite / "spec.json")
    found = apart(opened)

    assert set(found.shift) >= {"average", "RegMean", "Chain of Merges", "Chain of Merges + FeatCal"}
    assert all(len(values) == 2 and all(value > 0 for value in values) for values in found.shift.values())
    assert set(found.cosines) == set(found.shift)
    models = opened.opened.models
    names = [name for name in models.base.names() if models.base.read(name).is_floating_point()]

    def change(source: CheckpointSource) -> torch.Tensor:
        parts = [(source.read(name).double() - models.base.read(name).double()).flatten() for name in names]
        return torch.cat(parts)

    changes = {task: change(expert) for task, expert in models.experts.items()}
    mean = torch.stack(list(changes.values())).mean(0)
    for task, theirs in changes.items():
        expected = float(torch.cosine_similarity(mean, theirs, dim=0))
        assert found.cosines["average"][task] == pytest.approx(expected, abs=1e-4)


def test_every_rule_of_the_table_is_there() -> None:
    from merging.components import strategies

    ours = {name for name in strategies.names() if strategies.get(name).__module__.startswith("merging.")}
    assert {row.rule for row in RULES} == ours - {"slerp", "checkpoint"}  # slerp takes two models


def test_experts_on_their_way_and_fewer_tasks_are_suites_of_their_own(suite: Path, tmp_path: Path) -> None:
    whole = grid.Suite(suite / "spec.json")
    base, experts = whole.opened.models.base, whole.opened.models.experts
    half, one = whole.nearer(0.5), whole.first(1)
    records = grid.Records(tmp_path / "records.jsonl")

    grid.measure(one, "tasks 1", (Row("average", "average", calibrators=("featcal",)),), records)

    name = base.names()[3]
    middle = (base.read(name) + experts["two"].read(name)) / 2
    torch.testing.assert_close(half.opened.models.experts["two"].read(name), middle)
    assert half.data() is not whole.data()
    assert half.data().fingerprints == whole.data().fingerprints
    assert set(records.entries["tasks 1", "average", "featcal", 0].scores) == {"one"}
    # One expert alone is given back.
    alone = one.scores_of_experts()
    assert records.entries["tasks 1", "average", "none", 0].scores == alone
    for table in ("share 0.5", "share 1"):
        records.add(grid.Entry(table, "experts", "none", 0, {"one": 0.8, "two": 0.4}))
        for row in ("average", "Chain of Merges"):
            for calibrator in ("none", "featcal"):
                records.add(grid.Entry(table, row, calibrator, 0, {"one": 0.4, "two": 0.4}))
    told = report._with_experts(records, "experts at", {"0.25": "share 0.25", "0.5": "share 0.5"})
    assert told[0].splitlines()[0] == "| experts at | 0.5 |"
    assert "| average + FeatCal | 40.0 (75.0) |" in told[0]


def test_the_first_round_of_several_is_featcal_as_ever(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "ROUNDS", (1, 2))
    monkeypatch.setattr(experiments, "CHAIN", Row("other", "task_arithmetic", calibrators=("featcal",)))
    opened, records = grid.Suite(suite / "spec.json"), grid.Records(tmp_path / "records.jsonl")

    experiments.rounds(opened, records)
    grid.measure(opened, "rules", (experiments.AVERAGE,), records)

    once = records.entries["rules", "average", "featcal", 0].scores
    assert records.entries["rounds 1", "average", "featcal", 0].scores == once
    assert {entry.row for entry in records.of("rounds 2")} == {"average", "other"}


def test_what_is_known_of_the_whole_suite_is_not_measured_again(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "SAMPLES", (24,))
    records = grid.Records(tmp_path / "records.jsonl")
    for table, row, calibrator in (
        ("references", "experts", "none"),
        ("rules", "average", "none"),
        ("samples 24", "average", "featcal"),
        ("samples 24", "Chain of Merges", "none"),
        ("samples 24", "Chain of Merges", "featcal"),
    ):
        records.add(grid.Entry(table, row, calibrator, 0, {"one": 0.5, "two": 0.25}))
    monkeypatch.setattr(experiments, "SHARES", (1.0,))

    experiments.distance(grid.Suite(suite / "spec.json"), records)

    assert [entry.scores["two"] for entry in records.of("share 1")] == [0.25] * 5


@pytest.mark.parametrize("table", ["tuned", "tuned without labels"])
def test_settings_of_featcal_are_searched(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    monkeypatch.setattr(experiments, "TUNED", (experiments.AVERAGE,))
    monkeypatch.setattr(experiments, "SWEEP_EXAMPLES", 8)
    monkeypatch.setattr(experiments, "TRIED", {"ridge": (0.01, 1.0), "interpolation": (0.5,)})
    records = grid.Records(tmp_path / "records.jsonl")
    opened = grid.Suite(suite / "spec.json")
    grid.references(opened, None, records)

    seen: list[Any] = []
    searched = experiments.search

    def watched(spec: Any, models: Any, tasks: Any, sweeps: Any, **asked: Any) -> Any:
        found = searched(spec, models, tasks, sweeps, **asked)
        seen.append((found[1].criterion, {len(task.calibration) for task in tasks.values()}))
        return found

    monkeypatch.setattr(experiments, "search", watched)
    part = experiments.BY_ROW[table.replace(" ", "-")]
    part(opened, records, None)

    assert seen == [("validation" if table == "tuned" else "features", {8})]
    found = records.entries[table, "average", "featcal", 0]
    assert found.settings["ridge"] in (0.01, 1.0)
    assert found.settings["interpolation"] == 0.5
    grid.measure(
        opened, "given", (experiments.AVERAGE,), records, calibration=found.settings, merged=False
    )  # with all the examples
    assert found.scores == records.entries["given", "average", "featcal", 0].scores
    judge = "validation examples" if table == "tuned" else "features"
    expected = f"| average | {judge} | ridge {found.settings['ridge']:g}, interpolation 0.5 | "
    assert expected in tables.tuned(records)
    part(opened, records, ["average"])
    assert len(seen) == 1  # known


def test_rounds_with_settings_that_were_found(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (experiments, report):
        monkeypatch.setattr(module, "ROUNDS", (1, 2))
    opened, records = grid.Suite(suite / "spec.json"), grid.Records(tmp_path / "records.jsonl")
    with pytest.raises(SpecError, match='no settings for "average" are on record: measure `tuned` first'):
        experiments.tuned_rounds(opened, records, ["average"])
    settings = {"ridge": 0.01, "interpolation": 0.5}
    known = grid.Entry("tuned", "average", "featcal", 0, {"one": 0.5, "two": 0.25}, 1.0, settings)
    records.add(known)

    experiments.tuned_rounds(opened, records, ["average"])

    assert records.of("tuned") == [known]
    once, twice = ({"type": "featcal", **settings}, {"type": "featcal", **settings, "anchor": 1.0})
    spec = opened.spec(f"calibrate={json.dumps([once, twice])}")
    expected = opened.scores(opened.calibrated(spec, opened.merged(spec, opened.data()), opened.data())[0])
    second = records.entries["anchor 1 in round 2", "average", "featcal", 0]
    assert second.scores == expected
    assert second.settings == {**settings, "anchor": 1.0}
    first, *_, last = report._tuned_rounds(records)[0].splitlines()
    assert first == "| rounds with those settings | 1 | 2 |"
    mean = 50 * sum(expected.values())
    assert last == f"| average + FeatCal, later `anchor` 1 | 37.5 | {mean:.1f} |"
