"""RoutedExperts: experts that lie fused in 3-D parameters as linears of their own, to be observed and solved.

Shape letters: N tokens, K experts per token, D width, I width inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Apply = Callable[[nn.Module, Tensor], Tensor]


class Routes(NamedTuple):
    """Which of a batch's tokens reach each expert."""

    total: int
    tokens: list[Tensor]  # expert -> places among the N tokens


class Names(NamedTuple):
    """What the linears of one expert are called in checkpoints."""

    gate: str
    up: str
    down: str


class RoutedExperts(nn.Module):
    """The same function in eval mode. Every expert runs each time, on no tokens if none are routed to it.

    All experts' first linears run before the second ones. `routes` are those of the latest forward. While it
    has a `leader`, observers see the tokens that reached the leader's experts; what is returned stays the
    same."""

    def __init__(self, fused: Any, names: Names) -> None:
        super().__init__()
        self.names, self.activation = names, fused.act_fn
        self.routes = Routes(0, [])
        self._leader: list[RoutedExperts] = []  # in a list, so that it is no submodule
        self.count, width, inside = fused.down_proj.shape
        like: dict[str, Any] = {"device": fused.down_proj.device, "dtype": fused.down_proj.dtype}
        for number in range(self.count):
            expert = nn.Module()
            expert.add_module(names.gate, nn.Linear(width, inside, bias=False, **like))
            expert.add_module(names.up, nn.Linear(width, inside, bias=False, **like))
            expert.add_module(names.down, nn.Linear(inside, width, bias=False, **like))
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the chosen experts (N K) make of the tokens (N D), added up by their weights (N K)."""
        places = [torch.where(top_k_index == number) for number in range(self.count)]
        self.routes = Routes(len(hidden_states), [tokens_N for tokens_N, _ in places])
        for leader in self._leader:
            self._run(hidden_states, leader.routes, _observed)
        made = self._run(hidden_states, self.routes, _unobserved if self._leader else _observed)
        mixed_ND = torch.zeros_like(hidden_states)
        for (tokens_N, choice_N), made_ND in zip(places, made, strict=True):
            weighed_ND = made_ND * top_k_weights[tokens_N, choice_N, None]
            mixed_ND.index_add_(0, tokens_N, weighed_ND.to(mixed_ND.dtype))
        return mixed_ND

    def _run(self, x_ND: Tensor, routes: Routes, apply: Apply) -> list[Tensor]:
        """Each expert's answer to the tokens that are routed to it."""
        inner = []
        for number, tokens_N in enumerate(routes.tokens):
            expert, mine_ND = self.get_submodule(str(number)), x_ND[tokens_N]
            gate_NI = apply(expert.get_submodule(self.names.gate), mine_ND)
            inner.append(self.activation(gate_NI) * apply(expert.get_submodule(self.names.up), mine_ND))
        return [
            apply(self.get_submodule(f"{number}.{self.names.down}"), inner_NI)
            for number, inner_NI in enumerate(inner)
        ]


def fused_experts(model: nn.Module) -> dict[str, Names]:
    """Modules that hold experts fused which checkpoints hold one by one -> the names that these use."""
    conversions = _conversions(model)
    return {
        path: names
        for path, module in model.named_modules()
        for target, names in conversions.items()
        if f".{path}.gate_up_proj".endswith(target) and _is_plain(module)
    }


def split_experts_(model: nn.Module, places: Mapping[str, Names]) -> None:
    """Replace these fused experts by linears."""
    for path, names in places.items():
        model.set_submodule(path, RoutedExperts(model.get_submodule(path), names))


class Routed(NamedTuple):
    """Whose part a linear is."""

    owner: RoutedExperts
    number: int


def routed(module: nn.Module, linear: str) -> Routed | None:
    """The experts that this linear of `module` belongs to, and its own's number; None for other linears."""
    path, _, number = linear.rpartition(".")[0].rpartition(".")
    owner = module.get_submodule(path) if number.isdecimal() else None
    return Routed(owner, int(number)) if isinstance(owner, RoutedExperts) else None


def step_of(module: nn.Module, linear: str) -> str:
    """Alike for linears of one place in all experts beside each other: none of them feeds another."""
    experts = routed(module, linear)
    if experts is None:
        return linear
    path, _, leaf = linear.rpartition(".")
    return f"{path.rpartition('.')[0]}.*.{leaf}"


@contextmanager
def following(follower: nn.Module, leader: nn.Module) -> Iterator[None]:
    """Within, observers of the follower's experts see the tokens that last reached the leader's."""
    with ExitStack() as restore:
        for path, experts in follower.named_modules():
            if isinstance(experts, RoutedExperts):
                theirs = leader.get_submodule(path)
                assert isinstance(theirs, RoutedExperts)
                experts._leader.append(theirs)
                restore.callback(experts._leader.clear)
        yield


def _conversions(model: nn.Module) -> dict[str, Names]:
    """Pattern of a fused parameter that leads into experts -> names of the linears that are stored for it.

    By transformers' own rules: stored experts are stacked, and gate and up are put one above the other."""
    from merging.checkpoints.names import converters_of

    leads_in: dict[str, list[str]] = {}
    leads_out: dict[str, str] = {}
    for converter in converters_of(model):
        operations = [type(operation).__name__ for operation in converter.operations]
        leaves = [_leaf(pattern) for pattern in converter.source_patterns]
        target = converter.target_patterns[0]
        if operations == ["MergeModulelist", "Concatenate"] and target.endswith(".gate_up_proj"):
            leads_in[target] = leaves
        elif operations == ["MergeModulelist"] and target.endswith(".down_proj"):
            leads_out[target.removesuffix("down_proj") + "gate_up_proj"] = leaves[0]
    return {
        target: Names(leaves[0], leaves[1], leads_out[target])
        for target, leaves in leads_in.items()
        if target in leads_out and len(leaves) == 2 and all(leaves)
    }


def _leaf(pattern: str) -> str:
    """`w1` for `.experts.*.w1.weight`."""
    path, _, weight = pattern.rstrip("$").rpartition(".")
    return path.rpartition("*.")[2] if weight == "weight" else ""


def _is_plain(module: Any) -> bool:
    """Whether it computes down(act(gate x) * up x), with nothing else."""
    gate = getattr(type(module), "_apply_gate", None)
    return (
        {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and hasattr(module, "act_fn")
        and getattr(gate, "__name__", "") == "_default_apply_gate"
        and not module.has_bias
        and not module.is_transposed
        and getattr(module, "is_concatenated", True)
        and not getattr(module, "has_post_expert_norm", False)
    )


def _observed(linear: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = linear(x)
    return y


def _unobserved(linear: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = linear.forward(x)  # hooks do not see it
    return y
