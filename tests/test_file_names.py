"""Names in all letters, in a locale that knows few of them; and names that are no text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merging.errors import MergingError, SpecError
from merging.file_names import refuse_unnameable, telling_of_names
from merging.pipeline import Pipeline

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def plain_spec(folder: Path) -> Path:
    """A spec on plain tensors, with letters of three scripts in paths and tasks."""
    for number, name in enumerate(("básis", "цифры", "字母")):
        (folder / name).mkdir(parents=True)
        save_file({"weight": torch.full((2, 2), float(number))}, folder / name / "model.safetensors")
    spec = {
        "base": "básis",
        "experts": {"цифры": "цифры", "字母": "字母"},
        "merge": {"type": "average"},
        "device": "cpu",
    }
    path = folder / "spéc.json"
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    return path


def command(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONIO"))}
    return subprocess.run(
        [sys.executable, "-m", "merging", *map(str, words)],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_run_in_a_c_locale_keeps_every_letter(tmp_path: Path) -> None:
    spec = plain_spec(tmp_path / "Größe")
    out = tmp_path / "Größe" / "öut"

    ran = command("pipeline", "run", spec, "--out", out, "--quiet", **C_LOCALE)
    verified = command("verify", out, **C_LOCALE)

    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().splitlines()[-1] == str(out / "merged")
    assert verified.returncode == 0, verified.stderr.decode()
    assert 'expert "字母"' in verified.stdout.decode()
    card = (out / "merged" / "README.md").read_text(encoding="utf-8")
    assert "expert цифры" in card
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert torch.equal(load_file(out / "merged" / "model.safetensors")["weight"], torch.full((2, 2), 1.5))


def test_letters_that_the_output_cannot_show_are_escaped(tmp_path: Path) -> None:
    spec = plain_spec(tmp_path)

    planned = command("pipeline", "plan", spec, PYTHONIOENCODING="latin-1")

    assert planned.returncode == 0, planned.stderr
    assert b"\\u5b57\\u6bcd" in planned.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_an_output_folder_whose_name_is_no_text_is_refused_before_the_run(tmp_path: Path) -> None:
    spec = plain_spec(tmp_path)
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/out\xff"))

    with pytest.raises(SpecError, match=r"out\\udcff\" is not UTF-8 text") as caught:
        Pipeline.from_spec(spec).run(out)

    assert caught.value.exit_code == 2
    assert "Rename" in caught.value.remedy
    assert not out.exists()


def test_a_library_user_is_told_what_his_locale_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")

    with pytest.raises(SpecError, match="cannot be named in the locale") as caught:
        refuse_unnameable(Path("/Größe"))
    with pytest.raises(MergingError, match="cannot be named in the locale"), telling_of_names():
        "字母".encode("ascii")

    assert "PYTHONUTF8=1" in caught.value.remedy


def test_text_that_is_no_name_keeps_its_own_error() -> None:
    with pytest.raises(UnicodeEncodeError), telling_of_names():
        "字母".encode("latin-1")
