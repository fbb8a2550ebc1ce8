"""SplitAttention: nn.MultiheadAttention as four linears, so that each of them can be observed and solved.

Shape letters: B examples, T tokens that ask, S tokens that answer, D width, H heads, E width of a head.
"""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from merging.contracts.backbone import Location

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # in the order in which the fused tensor holds them


class SplitAttention(nn.Module):
    """The same function in eval mode; attention weights are not returned."""

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        super().__init__()
        self.width, self.heads, self.batch_first = fused.embed_dim, fused.num_heads, fused.batch_first
        like: dict[str, Any] = {"device": fused.in_proj_weight.device, "dtype": fused.in_proj_weight.dtype}
        for name in _PROJECTIONS:
            bias = fused.in_proj_bias is not None
            self.add_module(name, nn.Linear(self.width, self.width, bias=bias, **like))
        self.out_proj = nn.Linear(self.width, self.width, bias=fused.out_proj.bias is not None, **like)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """`attn_mask`: added to the scores (T S, or B*H T S), or true where one may not look."""
        turn = "b t (h e) -> b h t e" if self.batch_first else "t b (h e) -> b h t e"
        q_BHTE, k_BHSE, v_BHSE = (
            rearrange(getattr(self, name)(x), turn, h=self.heads)
            for name, x in zip(_PROJECTIONS, (query, key, value), strict=True)
        )
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = rearrange(attn_mask, "(b h) t s -> b h t s", h=self.heads)
        if attn_mask is not None and not attn_mask.is_floating_point():
            attn_mask = ~attn_mask
        mixed_BHTE = scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, attn_mask=attn_mask)
        back = "b h t e -> b t (h e)" if self.batch_first else "b h t e -> t b (h e)"
        return self.out_proj(rearrange(mixed_BHTE, back)), None


def split_attention_(model: nn.Module) -> dict[str, Location]:
    """Replace every fused self-attention of `model`; name of each new part -> where it was."""
    places: dict[str, Location] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.MultiheadAttention) or not _is_plain(module):
            continue
        split = SplitAttention(module)
        model.set_submodule(path, split)
        for number, name in enumerate(_PROJECTIONS):
            rows = slice(number * split.width, (number + 1) * split.width)
            places[f"{path}.{name}.weight"] = Location(f"{path}.in_proj_weight", rows)
            if module.in_proj_bias is not None:
                places[f"{path}.{name}.bias"] = Location(f"{path}.in_proj_bias", rows)
    return places


def _is_plain(module: nn.MultiheadAttention) -> bool:
    """Whether keys and values are as wide as queries, and none are added."""
    return module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
