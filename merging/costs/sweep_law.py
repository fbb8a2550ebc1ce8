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
_DIRECTIONS = 4  # matrices of the system's size: what eigenvectors and QR take beside it
_STEPS_OF_CONDITION = 12  # products with a D x D matrix, and twice as many solves
_PARTIAL = 0.7  # share of a block's forward that is run up to a feed inside it, on average


def sweep_cost(rule: LayerRule, sizes: Sizes) -> Cost:
    """Flat in depth and in the number of experts, but for what waits on disk."""
    walk = sizes.walk
    if walk is None or not walk.blocks:
        return Cost(memory=0)
    waiting = _waiting(rule, walk)
    in_memory = min(waiting, sizes.activation_memory)
    each = walk.batch * walk.widest_output * walk.itemsize / _SINGLE
    always = Alive.of(walk.itemsize * walk.outside) + _spread_out(in_memory, each)
    peaks = [
        resident(always + moment for moment in part)
        for block in walk.blocks
        for part in _parts_of(rule, block, walk)
    ]
    solved = sum(_sums(walk) * one.elements for one in walk.blocks)
    return Cost(
        memory=max(peaks) + WORKSPACE,
        scratch=waiting - in_memory + solved,
        work=_work(rule, sizes, walk),
    )


def _sums(walk: Walk) -> int:
    """Bytes of an entry of what is summed over tokens."""
    return max(_SINGLE, walk.itemsize)


def _waiting(rule: LayerRule, walk: Walk) -> float:
    """Outputs of blocks, for the next one: of the student, of the experts, or of both."""
    streams = int(rule.inputs != "expert") + int(rule.targets or rule.inputs == "expert")
    return walk.examples * walk.widest_output * streams * walk.itemsize / _SINGLE


def _parts_of(rule: LayerRule, block: BlockSizes, walk: Walk) -> Iterator[list[Alive]]:
    """What is alive while a block is run and its tasks are folded in, and while it is solved; the student's
    weights with it. What was freed is given back between the parts."""
    student = together(_weights(walk, feed) for feed in block.feeds)
    expert = student + Alive.of(walk.itemsize * walk.outside) if _loads_experts(rule) else Alive()
    batch = together(_activations(rule, block, walk)) + Alive.of(*[walk.batch * walk.inputs] * 2)
    yield [student + batch]
    found, tokens = Alive(), walk.examples * block.tokens
    for feeds in [[feed] for feed in block.feeds] if rule.chain == "feed" else [list(block.feeds)]:
        equations = together(_equations(rule, walk, feed) for feed in feeds)
        moments = together(_moments(rule, walk, feed) for feed in feeds)
        measuring = [student + found + equations + moments + expert + batch]
        for place, feed in enumerate(feeds):
            left = together(_moments(rule, walk, one) for one in feeds[place:])
            measuring.append(student + found + equations + left + _folding(walk, feed))
        yield measuring
        solving = []
        for place, feed in enumerate(feeds):
            left = together(_equations(rule, walk, one) for one in feeds[place + 1 :])
            solving.append(student + found + left + _solving(walk, feed, short=tokens < feed.inputs))
            found += Alive.of(_sums(walk) * feed.outputs * feed.inputs)
        yield solving


def _activations(rule: LayerRule, block: BlockSizes, walk: Walk) -> list[Alive]:
    """The running block's, and with targets the student's feeds, which wait for the expert's, and answers."""
    alive = [Alive.of(walk.batch * block.alive * walk.itemsize / _SINGLE)]
    if rule.targets:
        entry = walk.itemsize * block.tokens * walk.batch
        alive += [Alive.of(entry * feed.inputs) for feed in block.feeds]
        alive += [Alive.of(*[entry * max(min(feed.inputs, feed.outputs) for feed in block.feeds)] * 2)]
    return alive


def _spread_out(total: float, each: float) -> Alive:
    """So many bytes in arrays of that size."""
    return Alive(large=total) if Alive.of(each).large else Alive(small=total)


def _loads_experts(rule: LayerRule) -> bool:
    return rule.targets or rule.inputs != "student"


def _weights(walk: Walk, feed: FeedSizes) -> Alive:
    return Alive.of(*[walk.itemsize * feed.inputs * feed.outputs / feed.linears] * feed.linears)


def _moments(rule: LayerRule, walk: Walk, feed: FeedSizes) -> Alive:
    cross = min(feed.inputs, feed.outputs) * feed.inputs if rule.targets else 0
    return Alive.of(_sums(walk) * feed.inputs**2, _sums(walk) * cross)


def _equations(rule: LayerRule, walk: Walk, feed: FeedSizes) -> Alive:
    from merging.moments import row_blocks

    flat = feed.outputs * feed.inputs
    half = [(stop - start) * (feed.inputs - start) for start, stop in row_blocks(feed.inputs)]
    reference = 0 if rule.targets else _sums(walk) * flat
    return Alive.of(*[_DOUBLE * part for part in half], _DOUBLE * flat, reference)


def _folding(walk: Walk, feed: FeedSizes) -> Alive:
    """The Gram beside its own half, perhaps changed; the expert's weight, and what it makes of the Gram."""
    square, flat = feed.inputs**2, feed.outputs * feed.inputs
    return Alive.of(*[_sums(walk) * square] * 2, *[_sums(walk) * flat] * 3)


def _solving(walk: Walk, feed: FeedSizes, *, short: bool) -> Alive:
    """The system, in which it is factored, and a part of the sums it is made of; right side, correction,
    solution and copies of them. `short`: fewer tokens than features; then perhaps its directions, too, and
    what LAPACK needs to find them."""
    from merging.moments import row_blocks

    square, flat = feed.inputs**2, feed.outputs * feed.inputs
    part = max((stop - start) * (feed.inputs - start) for start, stop in row_blocks(feed.inputs))
    more = [square] * _DIRECTIONS if short else [part]
    doubles = [_DOUBLE * entries for entries in (square, *more, *[flat] * 6)]
    return Alive.of(*doubles, *[_sums(walk) * flat] * 2)


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
