"""What methods say of their cost: flat where they are flat, and said by every one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import made

from merging.calibrators import BUILTIN as CALIBRATORS
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.components import calibrators, strategies
from merging.contracts import vectors
from merging.contracts.models import Models
from merging.costs.alive import AliveBytes
from merging.costs.cost import Work
from merging.costs.probe import Rates, probe
from merging.costs.sizes import BlockSizes, FeedSizes, Sizes, Walk
from merging.costs.sizing import walk_of
from merging.data.task import Task
from merging.strategies import BUILTIN as STRATEGIES
from merging.strategies.chain_of_merges import ChainOfMerges
from merging.strategies.task_arithmetic import TaskArithmetic
from merging.strategies.ties import Ties
from merging.strategies.tsv_m import TsvM

FEEDS = (FeedSizes(768, 2304, 3), FeedSizes(768, 768), FeedSizes(768, 3072), FeedSizes(3072, 768))
BLOCK = BlockSizes(7_087_872, FEEDS, tokens=50, operations=7e8, alive=2_304_020, output=153_600)
WALK = Walk(outside=2_400_000, blocks=(BLOCK,) * 12, examples=512, batch=16, stem=2e8, inputs=602_112)
SIZES = Sizes(
    experts=8,
    tensors=((3072, 768), (768, 3072), (768,)) * 12,
    base_bytes=350_000_000,
    expert_bytes=8 * 350_000_000,
    output_bytes=350_000_000,
    itemsize=4,
    threads=2,
    row_block=1 << 17,
    activation_memory=256 << 20,
    walk=WALK,
)
REQUIRED = {"checkpoint": {"model": "somewhere"}}


@pytest.mark.parametrize("name", [*STRATEGIES, *CALIBRATORS])
def test_every_method_says_what_it_costs(name: str) -> None:
    method = (strategies if name in STRATEGIES else calibrators).get(name)

    cost = method(**REQUIRED.get(name, {})).cost(SIZES)

    assert cost.memory > 0
    assert cost.work.written == SIZES.output_bytes
    assert cost.work.read > 0


def test_a_sweep_is_flat_in_depth_and_in_experts_but_for_the_disk() -> None:
    deep = replace(SIZES, walk=replace(WALK, blocks=(BLOCK,) * 48))
    many = replace(SIZES, experts=32)

    here = FeatCal().cost(SIZES)

    assert FeatCal().cost(deep).memory == here.memory == FeatCal().cost(many).memory
    assert FeatCal().cost(deep).work.single > 3.9 * here.work.single


def test_activations_go_to_disk_where_memory_does_not_hold_them() -> None:
    none = replace(SIZES, activation_memory=0)

    held, spilled = FeatCal().cost(SIZES), FeatCal().cost(none)

    assert spilled.memory < held.memory
    assert spilled.scratch - held.scratch == min(2 * 512 * 153_600, 256 << 20)


def test_narrow_weights_and_activations_take_less_and_wide_ones_more() -> None:
    held = {
        width: FeatCal().cost(replace(SIZES, walk=replace(WALK, itemsize=width))).memory
        for width in (2, 4, 8)
    }

    assert held[2] < held[4] < held[8]


def test_a_system_short_of_tokens_may_need_its_directions_too() -> None:
    few, enough = (replace(SIZES, walk=replace(WALK, examples=count, batch=8)) for count in (61, 62))

    apart = FeatCal().cost(few).memory - FeatCal().cost(enough).memory

    assert 61 * BLOCK.tokens < 3072 <= 62 * BLOCK.tokens
    assert apart > 0.4 * 8 * 3072**2  # what is left of it beside what folding takes


def test_a_larger_batch_and_more_feeds_at_once_cost_memory() -> None:
    large = replace(SIZES, walk=replace(WALK, batch=64))

    assert FeatCal().cost(large).memory > FeatCal().cost(SIZES).memory
    assert ChainOfMerges(chain="feed").cost(SIZES).memory < ChainOfMerges(chain="block").cost(SIZES).memory


def test_row_blocks_make_memory_independent_of_the_model_and_whole_tensors_do_not() -> None:
    wide = replace(SIZES, tensors=((30_720, 7_680),))

    assert TaskArithmetic().cost(wide).memory == TaskArithmetic().cost(SIZES).memory
    assert Ties(trim="tensor", elect="normfrac").cost(wide).memory > 50 * Ties().cost(wide).memory
    assert Ties(trim="tensor").cost(wide).memory < 3 * Ties().cost(wide).memory
    assert TsvM().cost(wide).memory > 50 * TsvM().cost(SIZES).memory
    assert Ties().cost(SIZES).work.read == 2 * TaskArithmetic().cost(SIZES).work.read


def test_many_models_have_smaller_row_blocks_and_not_more_memory() -> None:
    def memory(experts: int) -> int:
        row_block = vectors.usual_row_block(experts + 1)
        return Ties().cost(replace(SIZES, experts=experts, row_block=row_block)).memory

    assert vectors.usual_row_block(3) == vectors.BLOCK_ELEMENTS
    assert memory(16) < 1.1 * memory(3)


def test_a_model_is_looked_at_without_weights() -> None:
    backbone, _, batches = made("clip")

    walk = walk_of(backbone, {"a": Task("a", calibration=Counted(*batches))})

    assert walk is not None
    assert len(walk.blocks) == 3
    assert [(feed.inputs, feed.outputs) for feed in walk.blocks[0].feeds] == [
        (32, 96), (32, 32), (32, 64), (64, 32),
    ]  # fmt: skip
    assert walk.blocks[0].tokens == 17
    assert walk.blocks[0].output == 17 * 32 * 4
    linears = 2 * 17 * (4 * 32 * 32 + 2 * 32 * 64)
    assert linears <= walk.blocks[0].operations < 1.5 * linears
    assert walk.blocks[0].alive > walk.blocks[0].output
    assert (walk.examples, walk.batch) == (5, 3)


class Counted:
    """Batches as they are; only what sizes are read from."""

    def __init__(self, *batches: object) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sum(len(batch["pixel_values"]) for batch in self._batches)  # type: ignore[index]

    def batches(self) -> tuple[object, ...]:
        return self._batches


def test_the_probe_measures_rates_in_about_half_a_second(tmp_path) -> None:
    rates = probe(tmp_path / "not" / "yet")

    assert min(rates.single, rates.double, rates.entries) > 1e6
    assert min(rates.read, rates.written) > 1e5
    assert not list(tmp_path.iterdir())


def test_seconds_add_up_over_kinds_of_work() -> None:
    rates = Rates(single=100, double=50, entries=10, read=20, written=5)

    assert rates.seconds(Work(single=100, double=100, entries=10, read=20, written=10)) == 1 + 2 + 1 + 1 + 2


class Sources(CheckpointSource):
    """A model whose tensors are made when they are read."""

    def __init__(self, rows: int) -> None:
        self.label, self._spec = "made", TensorSpec((rows, 64), torch.float32)

    def names(self) -> tuple[str, ...]:
        return ("first", "second")

    def spec(self, name: str) -> TensorSpec:
        return self._spec

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        start, stop, _ = (rows or slice(None)).indices(self._spec.shape[0])
        return torch.arange(stop - start, dtype=torch.float32)[:, None].expand(-1, 64) / 1000 + start


class Nowhere(CheckpointSink):
    def write(self, name: str, tensor: torch.Tensor, rows: slice | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("rule", ["average", "task_arithmetic", "ties", "dare", "slerp", "model_stock"])
def test_memory_of_data_free_rules_does_not_grow_with_the_model(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def most(experts: int, rows: int) -> int:
        names = [f"task{number}" for number in range(experts)]
        models = Models(Sources(rows), {name: Sources(rows) for name in names}, dict.fromkeys(names, 1.0))
        with AliveBytes() as alive:
            strategies.get(rule)().merge(models, None, Nowhere())
        return alive.most

    experts = 2 if rule in ("slerp", "ties") else 8

    assert most(experts, 4096) < 1.2 * most(experts, 2048)  # whole tensors would double it
