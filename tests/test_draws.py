"""Random numbers with an address."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from merging.draws import below, uniforms


@given(st.integers(0, 50), st.integers(0, 60))
def test_a_piece_gets_the_numbers_it_has_in_the_whole(start, length):
    whole = uniforms((200,), 0, 7, "expert", "tensor")

    piece = uniforms((length,), start, 7, "expert", "tensor")

    assert torch.equal(piece, whole[start : start + length])


@given(st.floats(0, 1), st.integers(0, 9))
def test_what_is_below_a_probability_is_what_its_number_is_below(probability, start):
    drawn = uniforms((64,), start, 7, "expert", "tensor")

    assert torch.equal(below(probability, (64,), start, 7, "expert", "tensor"), drawn < probability)


def test_every_part_of_the_address_matters():
    drawn = {
        tuple(uniforms((4,), 0, *address).tolist())
        for address in [(0, "a", "w"), (1, "a", "w"), (0, "b", "w"), (0, "a", "v"), (0, "aw", "")]
    }

    assert len(drawn) == 5


def test_numbers_are_uniform_and_inside_the_unit_interval():
    drawn = uniforms((100_000,), 0, 0, "a", "w")

    counts = torch.histc(drawn, bins=10, min=0, max=1)
    assert 0 < drawn.min() < drawn.max() < 1
    assert (counts - 10_000).abs().max() < 5 * 95  # five standard deviations of a bin


def test_numbers_are_the_same_on_every_machine():
    assert uniforms((2,), 0, 0, "a", "w").tolist() == FIRST


FIRST = [0.9250383885810152, 0.5940641880733892]
