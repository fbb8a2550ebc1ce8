"""What becomes of each parameter of a model, and why: solved, merged only, or copied from the base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from merging.checkpoints.parts import Parts
from merging.report.solver import UNSEEN, ParameterFate
from merging.tracer import is_linear, is_norm
from merging.walkable import Look, look

if TYPE_CHECKING:
    from torch import nn

    from merging.contracts.layer_rule import LayerRule
    from merging.contracts.models import Models
    from merging.layer_settings import LayerSettings

OUTSIDE = "outside the blocks"
NOT_WALKED = "not part of the model that is walked"
BUFFER = "a buffer, merged as weights are"
SEVERAL = "it runs more than once in a block, on other inputs each time"
FIXED = "what it is handed are no tokens of the examples"


NOTHING = Look()


def fates(
    models: Models, parts: Parts, layers: LayerSettings, solved: Collection[str], left: Mapping[str, str]
) -> dict[str, ParameterFate]:
    """Of each stored tensor of the base, once. `left`: why those that a method found merged stay so."""
    found = {}
    for name in models.base.names():
        if name in solved:
            found[name] = ParameterFate(state="solved")
        elif reason := copied_because(models, name):
            found[name] = ParameterFate(state="copied", reason=reason)
        elif all(map(layers.leaves_out, parts.names([name]))):
            found[name] = ParameterFate(state="copied", reason="left out in merge.layers")
        else:
            found[name] = ParameterFate(state="merged", reason=left.get(name, ""))
    return found


def copied_because(models: Models, name: str) -> str:
    """Why no rule may touch a stored tensor; empty where one may."""
    if not models.base.spec(name).dtype.is_floating_point:
        return "not floating point"
    if name not in models.kept:
        return ""
    backbone = models.backbone
    if backbone is not None and backbone.is_head(name):
        return "a head"
    if backbone is not None and backbone.keeps(name):
        return "nothing reads it"
    return "kept as in the base: by the spec, or for want of one in an expert that fits"


def unsolved(
    rule: LayerRule,
    model: nn.Module,
    stacks: Sequence[str],
    unreached: Collection[str] = (),
    seen: Look = NOTHING,
) -> dict[str, str]:
    """Parameter of the model -> why the rule cannot solve it, whatever the examples; empty where it can.

    `unreached`: stacks that no example reaches; `seen`: a look at the model's forward."""
    reasons = {}
    for path, module in model.named_modules():
        stack = next((stack for stack in stacks if path.startswith(f"{stack}.")), None)
        for leaf in module._parameters:
            if stack is None:
                reason = OUTSIDE
            elif stack in unreached:
                reason = UNSEEN
            else:
                inside = path.removeprefix(f"{stack}.").partition(".")[2]
                reason = odd_inputs(seen, stack, inside) or _unsolved_part(rule, module, leaf)
            reasons[f"{path}.{leaf}" if path else leaf] = reason
    return reasons


def foreseen(
    rule: LayerRule, models: Models, model: nn.Module, unreached: Collection[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Stored tensors that the rule will solve if tokens reach them all, and why it leaves the others.

    `model`: the backbone's skeleton; `unreached`: its stacks that no example reaches."""
    backbone = models.backbone
    assert backbone is not None
    parts = Parts(backbone.parts(models.base.names()))
    seen = parts.models(models)
    stacks = backbone.stacks(model)
    reasons = unsolved(rule, model, stacks, unreached, look(backbone, stacks) or NOTHING)
    inside = backbone.module_names(seen.base.names())
    solved, left = [], {}
    for name in seen.base.names():
        known = reasons.get(inside[name], BUFFER) if name in inside else NOT_WALKED
        why = copied_because(seen, name) or known
        if why:
            left[parts.whole(name)] = why
        else:
            solved.append(name)
    return parts.wholes(solved), left


def odd_inputs(seen: Look, stack: str, linear: str) -> str:
    """Why the inputs of this linear of a stack's blocks make no statistic; empty where they do."""
    if linear in seen.several.get(stack, ()):
        return SEVERAL
    return FIXED if linear in seen.fixed.get(stack, ()) else ""


def _unsolved_part(rule: LayerRule, module: nn.Module, leaf: str) -> str:
    if is_linear(module) and leaf in ("weight", "bias"):
        return "" if leaf == "weight" or rule.biases else "this method leaves biases"
    if is_norm(module):
        return "" if rule.norms else "this method leaves norms"
    return f"neither a linear nor a norm: {type(module).__name__}"
