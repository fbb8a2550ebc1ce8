"""Devices that are not there are told in few words."""

from __future__ import annotations

import pytest
import torch

from merging.devices import choose_device
from merging.errors import SpecError


def fails(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("Found no NVIDIA driver on your system. " + "Please check that you have one. " * 9)


@pytest.mark.parametrize(
    ("built", "count", "words"),
    [
        (False, 0, "this torch is built without CUDA"),
        (True, 0, "there is no NVIDIA GPU, or no driver for it"),
        (True, 1, "there is cuda:0"),
        (True, 2, "there are cuda:0, cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there(monkeypatch, built, count, words):
    monkeypatch.setattr(torch, "empty", fails)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    with pytest.raises(SpecError) as caught:
        choose_device("cuda:99")

    assert caught.value.message == f'device "cuda:99" cannot be used here: {words}'


def test_of_other_devices_torchs_first_sentence_is_told(monkeypatch):
    monkeypatch.setattr(torch, "empty", fails)

    with pytest.raises(SpecError) as caught:
        choose_device("xpu")

    assert caught.value.message.endswith("Found no NVIDIA driver on your system")


def test_what_is_there_is_chosen():
    assert choose_device("cpu") == "cpu"
