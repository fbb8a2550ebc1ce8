"""Rules from outside that end the process or return what is no weight, and processes without streams."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

RULE = """
import merging, sys, torch

class End(BaseException):
    pass

@merging.strategy("{name}")
class Rule(merging.TensorMerger):
    "A rule from outside."

    def prepare(self, vectors):
        {prepare}

    def combine(self, name, base_S, deltas_NS):
        {combine}
"""


@pytest.fixture
def spec_of(tmp_path):
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()
        save_file({"weight": base + (0.0 if name == "base" else 0.01)}, tmp_path / name / "model.safetensors")

    def write(name: str, combine: str = "return base_S", prepare: str = "pass"):
        (tmp_path / f"{name}.py").write_text(RULE.format(name=name, combine=combine, prepare=prepare))
        spec = {
            "base": "base",
            "experts": {"a": "a", "b": "b"},
            "merge": {"type": name},
            "plugins": [f"{name}.py"],
            "device": "cpu",
            "output": {"path": "out"},
        }
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        return tmp_path / "spec.json"

    return write


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("ends_with_0", {"combine": "sys.exit(0)"}, ('"ends_with_0"', '"weight"', "SystemExit: 0")),
        ("ends_early", {"prepare": "sys.exit(0)"}, ("ends_early.py, line", "prepare", "SystemExit: 0")),
        ("ends_oddly", {"combine": "raise End('so')"}, ('"ends_oddly"', '"weight"', "End: so")),
    ],
)
def test_a_rule_that_ends_the_process_is_a_failure_that_names_it(
    merging_command, spec_of, tmp_path, name, code, words
):
    answer = merging_command("pipeline", "run", spec_of(name, **code), "-q")

    assert answer.code == 1
    assert answer.err.startswith("error: ")
    assert all(word in answer.err for word in words)
    assert not (tmp_path / "out" / "merged").exists()


@pytest.mark.parametrize(
    ("name", "combine", "found"),
    [
        ("of_truths", "return base_S > 0", "shape (8, 6), dtype bool"),
        ("of_counts", "return base_S.long()", "shape (8, 6), dtype int64"),
        ("of_planes", "return base_S.to(torch.complex64)", "shape (8, 6), dtype complex64"),
        ("of_arrays", "return base_S.numpy()", "a numpy.ndarray of shape (8, 6)"),
        ("of_none", "return None", "a NoneType"),
        ("of_air", "return base_S.to('meta')", "shape (8, 6), dtype float32 without values"),
    ],
)
def test_a_rule_that_returns_no_weights_is_told_what_it_returned(
    merging_command, spec_of, name, combine, found
):
    answer = merging_command("pipeline", "run", spec_of(name, combine), "-q")

    assert answer.code == 1
    assert f'strategy "{name}" returned {found}' in answer.err
    assert 'for tensor "weight", expected a floating-point tensor of shape (8, 6)' in answer.err


def test_a_rule_may_return_another_floating_dtype(merging_command, spec_of):
    assert merging_command("pipeline", "run", spec_of("of_doubles", "return base_S.double()"), "-q").code == 0


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams as a shell of POSIX does")
@pytest.mark.parametrize("closed", ["2>&-", "-q >&-"])
def test_a_run_without_streams_is_made_all_the_same(spec_of, tmp_path, closed):
    spec = spec_of("plain_rule")

    command = f'exec "{sys.executable}" -m merging pipeline run "{spec}" {closed}'
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()
