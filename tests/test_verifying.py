"""`verify`: what a run read and wrote, and whether it is still that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import save_file

import merging
from merging.errors import CheckpointError, OutputError
from merging.pipeline import Pipeline
from merging.verifying import Verified

PLUGIN = '''
import merging

@merging.strategy("first_of_all")
class First(merging.TensorMerger):
    """The first expert."""
    def combine(self, name, base_S, deltas_NS):
        return base_S + deltas_NS[0]
'''


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run on plain tensors, with side files, examples and a plug-in."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()
        noise = 0.05 * torch.randn(6, 4, generator=generator)
        save_file({"weight": weight + noise}, tmp_path / name / "model.safetensors")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "rules.py").write_text(PLUGIN)
    save_file({"x": torch.randn(3, 4, generator=generator)}, tmp_path / "calibration.safetensors")
    spec = {
        "base": "base",
        "experts": {"a": "a", "b": "b"},
        "merge": {"type": "first_of_all"},
        "plugins": ["rules.py"],
        "tasks": {"a": {"calibration": {"type": "tensors", "path": "calibration.safetensors"}}},
        "device": "cpu",
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    Pipeline.from_spec(tmp_path / "spec.json").run(tmp_path / "out")
    return tmp_path / "out"


def states(found: Verified) -> dict[tuple[str, str], str]:
    return {(group.what, file.file): file.state for group in found.groups for file in group.files}


def test_everything_that_was_read_and_written_is_recorded(out: Path) -> None:
    found = merging.verify(out)

    assert found.unchanged
    assert set(states(found)) == {
        ("written: merged", "README.md"),
        ("written: merged", "model.safetensors"),
        ("written: merged", "tokenizer.json"),
        ("written: report, heads and manifests", "report.json"),
        ("written: report, heads and manifests", "merged/manifest.json"),
        ("base", "model.safetensors"),
        ("base", "tokenizer.json"),
        ('expert "a"', "model.safetensors"),
        ('expert "b"', "model.safetensors"),
        ('task "a": calibration', "calibration.safetensors"),
        ('plug-in "rules.py"', "rules.py"),
    }


CHANGES: dict[tuple[str, str], tuple[str, Callable[[Path], Any], str]] = {
    ('expert "b"', "model.safetensors"): (
        "b/model.safetensors",
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"),
        "changed",
    ),
    ("base", "tokenizer.json"): ("base/tokenizer.json", lambda file: file.write_text("{ }"), "changed"),
    ('task "a": calibration', "calibration.safetensors"): ("calibration.safetensors", Path.unlink, "missing"),
    ("written: merged", "model.safetensors"): ("out/merged/model.safetensors", Path.unlink, "missing"),
    ('plug-in "rules.py"', "rules.py"): ("rules.py", lambda file: file.write_text("pass\n"), "changed"),
}


@pytest.mark.parametrize("what", CHANGES, ids=[f"{role} {name}" for role, name in CHANGES])
def test_a_file_that_is_not_what_it_was_is_found_and_no_other(out: Path, what: tuple[str, str]) -> None:
    name, change, state = CHANGES[what]
    change(out.parent / name)

    found = merging.verify(out)

    assert not found.unchanged
    assert {file: is_now for file, is_now in states(found).items() if is_now != "unchanged"} == {what: state}


def test_the_command_tells_by_its_exit_code(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(out)]) == 0
    assert "unchanged" in capsys.readouterr().out

    (out.parent / "a" / "model.safetensors").unlink()

    assert main(["verify", str(out)]) == 1
    said = capsys.readouterr().out
    assert "1 files are not what they were" in said
    assert str(out.parent / "a" / "model.safetensors") in said
    assert main(["verify", str(out / "merged"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["unchanged"] is False


@pytest.mark.parametrize("spared", [True, False], ids=["record of the run", "no record either"])
def test_a_checkpoint_whose_manifest_is_gone_is_missing_it(out: Path, spared: bool) -> None:
    (out / "merged" / "manifest.json").unlink()
    if not spared:
        (out / ".merging" / "manifest.json").unlink()

    found = merging.verify(out)

    missing = {name.rpartition("/")[2] for (_, name), state in states(found).items() if state == "missing"}
    assert missing == {"manifest.json"}
    assert main(["verify", str(out)]) == 1


def test_a_manifest_that_was_edited_is_a_file_that_changed(out: Path) -> None:
    manifest = out / "merged" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))

    changed = [name for (_, name), state in states(merging.verify(out)).items() if state == "changed"]

    assert changed == ["merged/manifest.json"]


def test_a_checkpoint_that_was_copied_away_is_verified_alone(out: Path) -> None:
    shutil.copytree(out / "merged", out.parent / "kept")

    assert merging.verify(out.parent / "kept").unchanged


def test_a_checkpoint_of_a_run_that_was_stopped_is_verified_as_it_stands(out: Path) -> None:
    (out / ".merging" / "manifest.json").unlink()
    state = out / ".merging" / "state.json"
    known = json.loads(state.read_text())
    state.write_text(json.dumps({**known, "owned": [*known["owned"], "calibrated"]}))

    assert merging.verify(out).unchanged


def test_a_run_that_has_more_to_do_lets_go_of_the_record_of_the_last_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / "report.json").unlink()
    monkeypatch.setattr("merging.running.make_report", _killed)
    with pytest.raises(KeyboardInterrupt):
        Pipeline.from_spec(out.parent / "spec.json").run(out)

    assert not (out / ".merging" / "manifest.json").exists()
    monkeypatch.undo()
    Pipeline.from_spec(out.parent / "spec.json").run(out)
    assert merging.verify(out).unchanged


def _killed(*arguments: Any, **named: Any) -> None:
    raise KeyboardInterrupt


def test_a_merged_checkpoint_that_was_removed_is_made_again(out: Path) -> None:
    shutil.rmtree(out / "merged")
    assert not merging.verify(out).unchanged

    Pipeline.from_spec(out.parent / "spec.json").run(out)

    assert merging.verify(out).unchanged


def test_a_users_own_file_changes_nothing(out: Path) -> None:
    (out / "merged" / "notes.txt").write_text("mine")

    assert merging.verify(out).unchanged


def test_a_folder_without_a_manifest_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the finished result of a run") as caught:
        merging.verify(tmp_path)

    assert caught.value.exit_code == 2


BROKEN = {
    "no JSON": ('{"files": ', "is not valid JSON"),
    "a list": ("[]", "holds a list, expected an object"),
    "no files": ('{"files": {}}', 'lists no "files"'),
    "no hashes": ('{"files": {"a": 1}}', 'has no "sha256" of a'),
    "a path out of it": (
        json.dumps({"files": {"../a": 1}, "sha256": {"../a": "0" * 64}}),
        "which is not in its folder",
    ),
    "half a hash": (json.dumps({"files": {"a": 1}, "sha256": {"a": "0"}}), "no SHA-256 at sha256.a"),
    "an input of text": (
        json.dumps({"files": {"a": 1}, "sha256": {"a": "0" * 64}, "inputs": {"base": "x"}}),
        "holds a str at inputs.base",
    ),
    "deep": ("[" * 100_000, "is not valid JSON"),
}


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_manifest_is_told_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(CheckpointError, match=words) as caught:
        merging.verify(tmp_path)

    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "make the checkpoint again" in str(caught.value)


def test_a_device_in_place_of_an_input_is_not_read(out: Path) -> None:
    manifest = out / "merged" / "manifest.json"
    found = json.loads(manifest.read_text())
    found["inputs"]["base"]["path"] = "/dev"
    found["inputs"]["base"]["files"] = {"zero": {"sha256": "0" * 64}}
    manifest.write_text(json.dumps(found))

    assert states(merging.verify(out / "merged"))["base", "zero"] == "missing"


def test_plug_in_code_that_changed_makes_the_checkpoint_anew(out: Path) -> None:
    before = (out / "merged" / "model.safetensors").read_bytes()
    (out.parent / "rules.py").write_text(PLUGIN.replace("deltas_NS[0]", "deltas_NS[1]"))

    Pipeline.from_spec(out.parent / "spec.json").run(out)

    assert (out / "merged" / "model.safetensors").read_bytes() != before
    assert merging.verify(out).unchanged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: json.dumps({**json.loads(text), "inputs": {}}), 'records no "inputs"'),
        (lambda text: text.replace('"sha256"', '"sha256": {}, "sha256"', 1), "twice"),
        (lambda text: text.replace('"format": 1', '"format": 99', 1), 'has the "format" 99, expected 1'),
        (
            lambda text: text.replace('"model.safetensors": {', '"../model.safetensors": {', 1),
            "not in its folder",
        ),
    ],
)
def test_a_manifest_that_was_tampered_with_is_no_proof(
    out: Path, change: Callable[[str], str], words: str
) -> None:
    manifest = out / "merged" / "manifest.json"
    text = manifest.read_text()
    changed = change(text)
    assert changed != text
    manifest.write_text(changed)

    with pytest.raises(CheckpointError, match=words):
        merging.verify(out)


def test_a_manifest_that_was_removed_is_put_back_and_nothing_is_made_again(out: Path) -> None:
    manifest, weights = out / "merged" / "manifest.json", out / "merged" / "model.safetensors"
    before, made = manifest.read_bytes(), weights.stat().st_ino
    manifest.unlink()
    (out / "merged" / "notes.txt").write_text("mine")

    told = states(merging.verify(out))
    Pipeline.from_spec(out.parent / "spec.json").run(out)

    assert told["written: report, heads and manifests", "merged/manifest.json"] == "missing"
    assert told["written: merged", "model.safetensors"] == "unchanged"
    assert manifest.read_bytes() == before
    assert weights.stat().st_ino == made
    assert (out / "merged" / "notes.txt").read_text() == "mine"
    assert merging.verify(out).unchanged


def test_another_spec_replaces_a_checkpoint_whose_manifest_was_removed(out: Path) -> None:
    (out / "merged" / "manifest.json").unlink()
    (out / "merged" / "notes.txt").write_text("mine")

    Pipeline.from_spec(out.parent / "spec.json", sets=["seed=1"]).run(out, overwrite=True)

    assert merging.verify(out).unchanged
    assert (out / "merged" / "notes.txt").read_text() == "mine"


def test_what_may_be_the_users_own_is_not_claimed_by_a_manifest_put_back(out: Path) -> None:
    (out / "merged" / "manifest.json").unlink()
    weights = out / "merged" / "model.safetensors"
    weights.write_bytes(b"mine")

    with pytest.raises(OutputError, match=r"nothing tells a run.s files from yours"):
        Pipeline.from_spec(out.parent / "spec.json").run(out)

    assert weights.read_bytes() == b"mine"
    assert not (out / "merged" / "manifest.json").exists()


def test_a_checkpoint_in_its_run_is_compared_to_what_the_run_recorded(out: Path) -> None:
    manifest = out / "merged" / "manifest.json"
    assert merging.verify(out / "merged").unchanged
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))

    found = merging.verify(out / "merged")

    assert not found.unchanged
    assert states(found)["manifest of merged, by its run", "merged/manifest.json"] == "changed"


def test_the_answer_says_what_was_compared_to_what(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(out / "merged", out.parent / "kept")

    assert main(["verify", str(out)]) == 0
    whole = capsys.readouterr().out
    assert main(["verify", str(out.parent / "kept")]) == 0
    alone = capsys.readouterr().out

    assert "compared to merged/manifest.json, .merging/manifest.json" in whole
    assert "note:" not in whole
    assert "compared to manifest.json" in alone
    assert "checked by its own manifest.json alone" in alone


def test_a_record_of_the_run_that_was_removed_is_told_and_made_again(out: Path) -> None:
    (out / ".merging" / "manifest.json").unlink()

    notes = merging.verify(out).notes
    Pipeline.from_spec(out.parent / "spec.json").run(out)

    assert "were not checked" in notes[0]
    assert merging.verify(out).notes == ()
    assert (out / ".merging" / "manifest.json").is_file()
