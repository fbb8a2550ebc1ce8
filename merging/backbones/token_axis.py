"""token_axis: which axis of what a module is handed runs over the tokens, where lengths alone do not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merging.errors import TracingError

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.backbone import Backbone

_LENGTHS = (37, 41)  # of the model's and of its decoder's input: no number of heads is like these


def token_axis(backbone: Backbone, stack: str, module: str) -> int:
    """Found by running the stack's first block, without weights, on a text of an unlikely length."""
    import torch

    from merging.records import Records
    from merging.tracer import BlockTracer, blocks_of, hollow

    model = hollow(backbone)
    blocks = blocks_of(model, backbone.stacks(model))
    batch = {
        name: torch.zeros(1, _LENGTHS[name.startswith("decoder_")], dtype=torch.long)
        for name in backbone.example()
    }
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(batch)], Records())
    seen: list[tuple[int, ...]] = []

    def observe(x: Tensor) -> None:
        seen.append(tuple(x.shape[:-1]))

    output = None
    for index, block in enumerate(blocks):
        first = index == 0 or blocks[index - 1].stack != block.stack
        if block.stack == stack and first:
            tracer.run(index, tracer.call(index, 0), {module: observe})
            break
        if first:
            output = tracer.run(index, tracer.call(index, 0), {})
        if block.last:
            tracer.record(index, 0, output)
    axes = [axis for axis, size in enumerate(seen[0] if seen else ()) if size in _LENGTHS]
    if len(axes) != 1:
        raise TracingError(
            f'it is not clear which axis of {seen[:1]} runs over the tokens of "{module}" in "{stack}"',
            remedy="Give batches without padding, or write a backbone for this model.",
        )
    return axes[0]
