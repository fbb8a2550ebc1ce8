"""The law of the sweep: what solving the linears of one block after the other holds and computes.

Shape letters: D inputs, O outputs of a feed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merging.costs.cost import Cost, Work
from merging.costs.memory import WORKSPACE, Alive, resident, together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from merging.contracts.layer_rule import LayerRule
    from merging.costs.sizes import BlockSizes, FeedSizes, Sizes, Walk

_SINGLE, _DOUBLE = 4, 8  # bytes of an entry
_STEPS_OF_CONDITION = 12  # products with a D x D matrix, and twice as many solves
_PARTIAL = 0.7  # share of a block's forward that is run up to a feed inside it, on average


def sweep_cost(rule: LayerRule, sizes: Sizes) -> Cost:
    """Flat in depth and in the number of experts, but for what waits on disk."""
    walk = sizes.walk
    if walk is None or not walk.blocks:
        return Cost(memory=0)
    waiting = _waiting(rule, walk)
    in_memory = min(waiting, sizes.activation_memory)
    always = Alive.of(_SINGLE * walk.outside) + _spread_out(in_memory, walk.batch * walk.widest_output)
    peaks = [
        resident(always + moment for moment in part)
        for block in walk.blocks
        for part in _parts_of(rule, block, walk)
    ]
    solved = sum(_SINGLE * one.elements for one in walk.blocks)
    return Cost(
        memory=max(peaks) + WORKSPACE,
        scratch=waiting - in_memory + solved,
        work=_work(rule, sizes, walk),
    )


def example_bytes(rule: LayerRule, walk: Walk) -> float:
    """What one example more in a batch adds to the peak."""
    return max(together(_activations(rule, block, 1)).small for block in walk.blocks) + 2 * walk.inputs


def _waiting(rule: LayerRule, walk: Walk) -> float:
    """Outputs of blocks, for the next one: of the student, of the experts, or of both."""
    streams = int(rule.inputs != "expert") + int(rule.targets or rule.inputs == "expert")
    return walk.examples * walk.widest_output * streams


def _parts_of(rule: LayerRule, block: BlockSizes, walk: Walk) -> Iterator[list[Alive]]:
    """What is alive while a block is run and its tasks are folded in, and while it is solved; the student's
    weights with it. What was freed is given back between the parts."""
    student = together(_weights(feed) for feed in block.feeds)
    expert = student + Alive.of(_SINGLE * walk.outside) if _loads_experts(rule) else Alive()
    batch = together(_activations(rule, block, walk.batch)) + Alive.of(*[walk.batch * walk.inputs] * 2)
    yield [student + batch]
    found = Alive()
    for feeds in [[feed] for feed in block.feeds] if rule.chain == "feed" else [list(block.feeds)]:
        equations = together(_equations(rule, feed) for feed in feeds)
        moments = together(_moments(rule, feed) for feed in feeds)
        measuring = [student + found + equations + moments + expert + batch]
        for place, feed in enumerate(feeds):
            left = together(_moments(rule, one) for one in feeds[place:])
            measuring.append(student + found + equations + left + _folding(feed))
        yield measuring
        solving = []
        for place, feed in enumerate(feeds):
            left = together(_equations(rule, one) for one in feeds[place + 1 :])
            solving.append(student + found + left + _solving(feed))
            found += Alive.of(_SINGLE * feed.outputs * feed.inputs)
        yield solving


def _activations(rule: LayerRule, block: BlockSizes, examples: int) -> list[Alive]:
    """The running block's, and with targets the student's feeds, which wait for the expert's, and answers."""
    alive = [Alive.of(examples * block.alive)]
    if rule.targets:
        entry = _SINGLE * block.tokens * examples
        alive += [Alive.of(entry * feed.inputs) for feed in block.feeds]
        alive += [Alive.of(*[entry * max(min(feed.inputs, feed.outputs) for feed in block.feeds)] * 2)]
    return alive


def _spread_out(total: float, each: float) -> Alive:
    """So many bytes in arrays of that size."""
    return Alive(large=total) if Alive.of(each).large else Alive(small=total)


def _loads_experts(rule: LayerRule) -> bool:
    return rule.targets or rule.inputs != "student"


def _weights(feed: FeedSizes) -> Alive:
    return Alive.of(*[_SINGLE * feed.inputs * feed.outputs / feed.linears] * feed.linears)


def _moments(rule: LayerRule, feed: FeedSizes) -> Alive:
    cross = min(feed.inputs, feed.outputs) * feed.inputs if rule.targets else 0
    return Alive.of(_SINGLE * feed.inputs**2, _SINGLE * cross)


def _equations(rule: LayerRule, feed: FeedSizes) -> Alive:
    from merging.moments import row_blocks

    flat = feed.outputs * feed.inputs
    half = [(stop - start) * (feed.inputs - start) for start, stop in row_blocks(feed.inputs)]
    reference = 0 if rule.targets else _SINGLE * flat
    return Alive.of(*[_DOUBLE * part for part in half], _DOUBLE * flat, reference)


def _folding(feed: FeedSizes) -> Alive:
    """The whole Gram made of its half, perhaps shrunk; the expert's weight, and what it makes of the Gram."""
    square, flat = feed.inputs**2, feed.outputs * feed.inputs
    return Alive.of(*[_SINGLE * square] * 2, *[_SINGLE * flat] * 3)


def _solving(feed: FeedSizes) -> Alive:
    """The system, the sums it was made of, or its directions where it has no factor; right side, correction,
    solution and copies of them."""
    square, flat = feed.inputs**2, feed.outputs * feed.inputs
    return Alive.of(*[_DOUBLE * square] * 2, *[_DOUBLE * flat] * 6, *[_SINGLE * flat] * 2)


def _work(rule: LayerRule, sizes: Sizes, walk: Walk) -> Work:
    total = Work(read=_bytes_read(rule, sizes, walk), written=sizes.output_bytes)
    total += Work(single=walk.stem * walk.examples * 2)
    for block in walk.blocks:
        passes = _passes(rule, len(block.feeds))
        total += Work(single=walk.examples * block.operations * passes)
        for feed in block.feeds:
            total += _feed_work(rule, feed, walk.examples * block.tokens, sizes.experts)
    return total


def _passes(rule: LayerRule, feeds: int) -> float:
    """Forwards of a block per example."""
    if rule.inputs == "expert":
        return 1.0
    if rule.chain == "feed":
        return 1.0 + feeds * (_PARTIAL if rule.inputs == "student" else 1.0)
    return 2.0 + _PARTIAL if rule.targets else 1.0 + _PARTIAL


def _feed_work(rule: LayerRule, feed: FeedSizes, tokens: float, experts: int) -> Work:
    """Half a Gram, the cross moment or the answers', what each expert's weight makes of it, and one solve."""
    square, flat = feed.inputs**2, feed.outputs * feed.inputs
    gram = tokens * square
    cross = 2 * tokens * feed.inputs * min(feed.inputs, feed.outputs) if rule.targets else 0
    met = experts * 2 * flat * feed.inputs
    condition = _STEPS_OF_CONDITION * 3 * 2 * square
    solve = feed.inputs**3 / 3 + 2 * flat * feed.inputs + condition
    reference = 2 * flat * feed.inputs
    return Work(single=gram + cross + met, double=solve + reference, entries=3 * experts * (square + flat))


def _bytes_read(rule: LayerRule, sizes: Sizes, walk: Walk) -> float:
    """Blocks of experts once to run and once to fold; what lies outside of blocks anew for each block."""
    share = walk.outside / max(1, sizes.parameters)
    anew = sizes.expert_bytes * share * len(walk.blocks) if _loads_experts(rule) else 0
    averaged = 2 * sizes.expert_bytes if not rule.targets else 0
    return 2 * sizes.expert_bytes + averaged + 2 * sizes.base_bytes + anew
