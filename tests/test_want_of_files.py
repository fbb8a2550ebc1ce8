"""What becomes of a run from under which files are taken away, or changed, while it works."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

from merging.checkpoints.safetensors import SafetensorsSource
from merging.costs.budget import USUAL_CHOICE
from merging.data.images import decoded
from merging.errors import CheckpointError, MergingError
from merging.opened import Input
from merging.pipeline import Pipeline
from merging.ranks import Ranks
from merging.verifying import verify
from merging.want_of_files import want_of_files

TASKS = ("digits", "letters")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**{**SIZE, "num_hidden_layers": 1}, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed, noise=0.05))
        expert.save_pretrained(folder / task)
        save_file(pixels(4, seed=seed), folder / f"{task}.safetensors")
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Path:
    shutil.copytree(models, tmp_path / "models")
    return tmp_path / "models"


def spec_of(place: Path) -> dict[str, Any]:
    return {
        "base": str(place / "base"),
        "experts": {task: str(place / task) for task in TASKS},
        "tasks": {
            task: {"calibration": {"type": "tensors", "path": str(place / f"{task}.safetensors")}}
            for task in TASKS
        },
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "device": "cpu",
    }


def stopped(place: Path, out: Path, phase: str, change: Callable[[], Any], **spec: Any) -> MergingError:
    """The error of a run under which something changes when it first tells of that phase."""
    seen: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if phase in what and not seen:
            change()
        if phase in what:
            seen.append(what)

    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec({**spec_of(place), **spec}).run(out, progress=progress)
    assert seen
    return caught.value


@pytest.mark.parametrize("phase", ["hash inputs", "merge", "sweep", "measure drift"])
def test_an_expert_that_is_removed_is_named_with_its_role(place: Path, tmp_path: Path, phase: str) -> None:
    error = stopped(place, tmp_path / "out", phase, lambda: shutil.rmtree(place / "digits"))

    assert error.exit_code == 1
    assert f'expert "digits": {place / "digits" / "model.safetensors"} is gone' in str(error)
    assert "Put it back" in error.remedy


def test_the_same_command_goes_on_once_it_is_back(place: Path, tmp_path: Path) -> None:
    stopped(place, tmp_path / "out", "sweep", lambda: (place / "digits").rename(place / "away"))
    (place / "away").rename(place / "digits")

    Pipeline.from_spec(spec_of(place)).run(tmp_path / "out")

    assert verify(tmp_path / "out").unchanged


@pytest.mark.parametrize("phase", ["sweep", "measure drift"])
def test_a_result_that_is_removed_while_it_is_read(place: Path, tmp_path: Path, phase: str) -> None:
    out = tmp_path / "out"

    error = stopped(place, out, phase, lambda: shutil.rmtree(out / "merged"))

    assert error.exit_code == 1
    assert f"the output folder: {out / 'merged'}" in str(error)
    assert "the same command makes again what is missing" in error.remedy
    Pipeline.from_spec(spec_of(place)).run(out)
    assert verify(out).unchanged


def change(file: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(("phase", "spoil"), [("merge", change), ("sweep", cut)])
def test_an_expert_that_changes_is_a_failed_run_and_no_wrong_request(
    place: Path, tmp_path: Path, phase: str, spoil: Callable[[Path], Any]
) -> None:
    file = place / "digits" / "model.safetensors"

    error = stopped(place, tmp_path / "out", phase, lambda: spoil(file))

    assert error.exit_code == 1
    assert f'expert "digits": {file} was changed while it was being used' in str(error)
    assert "run again" in error.remedy


def test_before_the_run_it_is_still_a_wrong_request(place: Path) -> None:
    source = SafetensorsSource(place / "digits", "digits")
    change(place / "digits" / "model.safetensors")

    with pytest.raises(CheckpointError, match="was changed") as caught:
        source.read(source.names()[0])

    assert caught.value.exit_code == 2


def test_a_picture_that_is_gone_is_told_by_its_task(tmp_path: Path) -> None:
    inputs = {
        'expert "pets"': Input("pets", tmp_path / "pets", ()),
        'task "pets": test': Input("pictures", tmp_path / "pets" / "pictures", ()),
    }
    file = tmp_path / "pets" / "pictures" / "cat" / "1.png"

    with pytest.raises(MergingError) as caught, want_of_files(lambda: inputs):
        decoded(file)

    assert str(caught.value).startswith(f'task "pets": test: {file} is gone')
    assert caught.value.exit_code == 1


def test_other_files_that_are_missing_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), want_of_files(dict, tmp_path / "out"):
        (tmp_path / "other").read_bytes()


class Second(Ranks):
    """A process of a run that is not the first one, and is told the usual things."""

    @property
    def first(self) -> bool:
        return False

    def tell(self, value: Any, source: int = 0) -> Any:
        return USUAL_CHOICE


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            lambda place: FileNotFoundError(errno.ENOENT, "gone", str(place / "x")),
            'expert "digits": .* is gone',
        ),
        (lambda place: OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (lambda place: MemoryError(), "out of memory"),
    ],
    ids=["file", "open files", "memory"],
)
def test_the_other_processes_of_a_run_tell_of_it_alike(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[Path], Exception],
    words: str,
) -> None:
    def serve(self: Any) -> None:
        raise error(place / "digits")

    monkeypatch.setattr("merging.ranks.ranks", lambda: Second(1, 2))
    monkeypatch.setattr("merging.together.Follower.serve", serve)

    with pytest.raises(MergingError, match=words) as caught:
        Pipeline.from_spec(spec_of(place)).run(tmp_path / "out")

    assert caught.value.exit_code == 1
    assert caught.value.remedy
