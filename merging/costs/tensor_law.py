"""The law of rules that see one parameter, or one row block of it, at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merging.costs.cost import Cost, Work
from merging.costs.memory import WORKSPACE, Alive, resident

if TYPE_CHECKING:
    from merging.contracts.merger import TensorMerger
    from merging.costs.sizes import Sizes
    from merging.matrix_merger import MatrixMerger


def tensor_rule_cost(rule: TensorMerger, sizes: Sizes) -> Cost:
    """Row blocks of all models, one set of them per thread; or the largest tensor of all models. Of a
    parameter that is read twice, what is kept of the first time."""
    from merging.contracts.vectors import kept_entries

    width = max(sizes.itemsize, 8 if rule.precision == "float64" else 4)
    stored = 2 * sizes.itemsize  # as read, and as written
    held = rule.arrays(sizes.experts) * width + stored
    block = sizes.threads * min(sizes.row_block, sizes.largest)
    at_once = block if rule.elementwise else sizes.largest
    models = sizes.experts + 1
    kept = min(kept_entries(sizes.row_block, models), sizes.largest * models) if rule.surveys else 0
    memory = at_once * held + (sizes.threads if rule.elementwise else 1) * kept * sizes.itemsize
    return Cost(memory=memory, work=rule_work(rule, sizes))


def matrix_rule_cost(rule: MatrixMerger, sizes: Sizes) -> Cost:
    """The largest matrix of all models as they are read, and what its rule holds beside."""
    found = matrices(sizes, kernels=rule.settings.kernels)
    others = tensor_rule_cost(rule, sizes)
    if not found:
        return others
    alive, work = [], rule_work(rule, sizes)
    for longer, shorter in found:
        models = [4 * longer * shorter * (sizes.experts + 2)]
        alive.append(Alive.of(*models, *rule.held(longer, shorter, sizes.experts)))
        work += rule.operations(longer, shorter, sizes.experts)
    return Cost(memory=max(resident(alive) + WORKSPACE, others.memory), work=work)


def rule_work(rule: TensorMerger, sizes: Sizes) -> Work:
    """Every entry of every model, read once per walk and taken through the rule; one model written."""
    models = sizes.experts + 1
    bytes_read = sizes.base_bytes + sizes.expert_bytes
    return Work(
        entries=models * sizes.parameters * rule.passes / (sizes.threads if rule.elementwise else 1),
        read=bytes_read * rule.walks,
        written=sizes.output_bytes,
    )


def matrices(sizes: Sizes, *, kernels: bool = False) -> list[tuple[int, int]]:
    """Longer and shorter side of each tensor that is a matrix."""
    found = []
    for shape in sizes.tensors:
        if len(shape) == 2 or (len(shape) > 2 and kernels):
            rows, columns = shape[0], 1
            for size in shape[1:]:
                columns *= size
            found.append((max(rows, columns), min(rows, columns)))
    return found
