from __future__ import annotations

import time

import pytest

from merging.report import stages
from merging.report.stages import Stage

MIB = 2**20


def held(megabytes):
    """Memory that is really in use: every page is written."""
    return bytearray(b"x" * (megabytes * MIB))


def test_seconds_are_those_of_the_stage():
    with Stage("merge") as stage:
        time.sleep(0.05)

    assert 0.05 <= stage.seconds < 5
    assert stage.name == "merge"


def test_peak_counts_memory_that_is_free_again():
    with Stage("idle") as idle:
        pass

    with Stage("merge") as stage:
        del_me = held(64)
        del del_me

    assert stage.peak_bytes > idle.peak_bytes + 48 * MIB


def test_peak_of_an_earlier_stage_does_not_count():
    with Stage("merge") as merge:
        held(128)

    with Stage("calibrate") as calibrate:
        pass

    assert calibrate.peak_bytes < merge.peak_bytes - 48 * MIB


def test_sampling_sees_what_lasts():
    sampler = stages._Sampler()
    before = stages._status("VmRSS")
    kept = held(64)
    time.sleep(0.2)
    del kept

    assert sampler.stop() > before + 48 * MIB


def test_the_numbers_survive_an_error():
    stage = Stage("merge")
    with pytest.raises(KeyError), stage:
        raise KeyError

    assert stage.seconds > 0
    assert stage.peak_bytes > 0
