"""Processes of a run that do not find each other: the run ends, in time or at a signal, and says why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import save_file

from merging.connecting import VARIABLE, share_cores
from merging.cores import Place
from merging.errors import SpecError
from merging.ranks import ALONE, ranks


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    for name in ("base", "a"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2, 3)}, tmp_path / name / "model.safetensors")
    content = {"base": "base", "experts": {"a": "a"}, "merge": {"type": "average"}}
    (tmp_path / "spec.json").write_text(json.dumps({**content, "output": {"path": "out"}, "device": "cpu"}))
    return tmp_path / "spec.json"


def first_of_two(**more: str) -> dict[str, str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    return {**told, "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **more}


def begun(spec: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "merging", "pipeline", "run", str(spec), "--quiet"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_whose_other_never_comes_ends_with_what_to_do(spec: Path, rank: str) -> None:
    started = begun(spec, first_of_two(RANK=rank, **{VARIABLE: "1"}))
    out, talk = started.communicate(timeout=60)

    assert (started.returncode, out) == (1, "")
    assert "error: the 2 processes of this run did not meet at 127.0.0.1:" in talk
    assert f"number {rank} waited for up to 1 s" in talk
    assert "torchrun" in talk
    assert "WORLD_SIZE" in talk
    assert VARIABLE in talk
    assert "Traceback" not in talk
    assert "frame #" not in talk
    assert not (spec.parent / "out" / "merged").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_a_process_that_waits_for_others(
    spec: Path, number: signal.Signals, code: int, words: str
) -> None:
    environment = first_of_two()
    started = begun(spec, environment)
    _until_it_listens(int(environment["MASTER_PORT"]), started)
    time.sleep(0.2)
    started.send_signal(number)
    start = time.monotonic()
    _, talk = started.communicate(timeout=30)

    assert started.returncode == code, talk
    assert time.monotonic() - start < 10
    assert words in talk
    assert "Traceback" not in talk


def _until_it_listens(port: int, started: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and started.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("it never waited for the others")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": None}, "RANK: is not set, expected this process's number, from 0 up to 1"),
        ({"RANK": "2"}, 'RANK: is "2", expected this process\'s number, from 0 up to 1'),
        ({"WORLD_SIZE": "two"}, 'WORLD_SIZE: is "two", expected the number of processes'),
        ({"MASTER_PORT": "99999"}, 'MASTER_PORT: is "99999", expected a port'),
        ({"MASTER_PORT": None}, "MASTER_PORT: is not set"),
        ({"MASTER_ADDR": ""}, 'MASTER_ADDR: is "", expected the address'),
        ({"LOCAL_RANK": "x"}, 'LOCAL_RANK: is "x"'),
        ({VARIABLE: "soon"}, f'{VARIABLE} is "soon", expected seconds'),
        ({VARIABLE: "0"}, f'{VARIABLE} is "0", expected seconds'),
    ],
)
def test_an_environment_of_no_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], words: str
) -> None:
    for name, value in {**first_of_two(), **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    with pytest.raises(SpecError) as caught:
        ranks()

    assert words in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "1"), ("MASTER_ADDR", None)])
def test_one_process_meets_nobody(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    for each, told in {**first_of_two(), "RANK": "0", name: value}.items():
        monkeypatch.delenv(each, raising=False) if told is None else monkeypatch.setenv(each, told)

    assert ranks() is ALONE


def test_the_command_refuses_it_too(spec: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in first_of_two(RANK="7").items():
        monkeypatch.setenv(name, value)

    assert main(["pipeline", "run", str(spec)]) == 2
    assert "the environment is not one of several processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("everyone", "wanted"),
    [
        ([Place("m", frozenset(range(4)))], 3),
        ([Place("m", frozenset(range(4)))] * 2, 2),
        ([Place("m", frozenset(range(4)))] * 9, 1),
        ([Place("m", frozenset(range(4))), Place("m", frozenset(range(4, 8)))], 3),
        ([Place("m", frozenset(range(4))), Place("other", frozenset(range(4)))], 3),
    ],
    ids=["alone", "two", "crowded", "bound to cores of their own", "on other machines"],
)
def test_processes_of_one_machine_share_its_cores(everyone: list[Place], wanted: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        share_cores(everyone[0], everyone)

        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)
