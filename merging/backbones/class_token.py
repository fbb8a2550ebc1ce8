"""Token weights of a last block of which the head reads only the class token.

Shape letters: B examples, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

OTHERS = 0.01  # weight of the tokens after the class token, as in FeatCal's code


def class_token_weights(module: str, tokens: tuple[int, ...]) -> Tensor | None:
    """1 for the class token, 0.01 for the others; keys and values still serve every token and weigh all
    alike."""
    import torch

    if module.rpartition(".")[2] in ("k_proj", "v_proj", "key", "value"):
        return None
    weights_BT = torch.full(tokens, OTHERS)
    weights_BT[:, 0] = 1.0
    return weights_BT
