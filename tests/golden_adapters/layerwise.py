"""RegMean, RegMean++, Chain of Merges and FeatCal against recorded numbers, through the product's own
sweep."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from tiny_models import Given
from torch import Tensor, nn
from torch.nn import functional

from merging.backbones.clip_vision import ClipVision
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.contracts.backbone import Backbone
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.layerwise import LayerwiseMerger
from merging.moments import Moments, NormMoments
from merging.normal_equations import NormalEquations, NormEquations
from merging.strategies.chain_of_merges import ChainOfMerges
from merging.strategies.regmean import RegMean
from merging.strategies.regmean_plus_plus import RegMeanPlusPlus
from merging.streaming import load_model

Case = dict[str, Any]
Tensors = dict[str, Tensor]


class Tower(ClipVision):
    """CLIP's tower from a config, its tensors under the names of the module."""

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers import CLIPVisionConfig

        settings = {name: value for name, value in config.items() if name != "attn_implementation"}
        clip = CLIPVisionConfig(**settings, architectures=["CLIPVisionModel"])
        clip._attn_implementation = config.get("attn_implementation", "eager")
        super().__init__(clip)

    def module_names(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: name for name in names}


class Layers(nn.Module):
    """A list of blocks run one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Chain(Backbone):
    """A plain network whose parameters have other names in the checkpoint."""

    def __init__(self, blocks: Any, renamed: dict[str, str]) -> None:
        super().__init__(config=None)
        self._blocks, self._renamed = blocks, renamed

    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return Layers(self._blocks()).eval()

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        return ("blocks",)

    def module_names(self, names: tuple[str, ...]) -> dict[str, str]:
        return self._renamed

    def features(self, output: Tensor, batch: Any) -> Tensor:
        return output


def state(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def merged(rule: LayerwiseMerger, models: Models, data: dict[str, Given]) -> Tensors:
    sink = StateDictSink(models.base)
    with sink:
        rule.merge(models, CalibrationData(data), sink)
    return sink.tensors


def opened(
    base: Tensors, experts: list[Tensors], backbone: Backbone, *, kept: frozenset[str] = frozenset()
) -> Models:
    sources = {f"task{number}": StateDictSource(expert) for number, expert in enumerate(experts)}
    return Models(StateDictSource(base), sources, dict.fromkeys(sources, 1.0), backbone, kept)


def regmean(case: Case, tensors: Tensors) -> Tensors:
    inputs, shrink = case["inputs"], case["params"]["reduce_non_diagonal_ratio"]
    if "grams" not in inputs:
        return regmean_classifier(case, tensors)
    weights = [tensors[name] for name in inputs["weights"]]
    equations = NormalEquations(weights[0].shape[1], weights[0].shape[0])
    for weight_OD, name in zip(weights, inputs["grams"], strict=True):
        # The given Grams are exact by definition here, not float32 sums with rounding noise.
        equations.add(weight_OD.double(), tensors[name].double(), shrink=shrink)
    mean_OD = torch.stack(weights).mean(0)
    solved_OD = RegMean(shrink=shrink).solve(equations, mean_OD, mean_OD)
    bias_O = torch.stack([tensors[name] for name in inputs["biases"]]).mean(0)
    return {"weight": solved_OD.float(), "weight_float64": solved_OD, "bias": bias_O}


def regmean_classifier(case: Case, tensors: Tensors) -> Tensors:
    inputs = case["inputs"]
    base = state(tensors, inputs["base"])
    linears = sorted({name.rpartition(".")[0] for name in base if base[name].ndim == 2})
    norms = sorted({name.rpartition(".")[0] for name in base} - set(linears))
    assert case["params"]["model"] == "Linear -> LayerNorm -> ReLU -> Linear"
    assert len(linears) == 2

    def blocks() -> list[nn.Module]:
        first, last = (base[f"{name}.weight"] for name in linears)
        head = nn.Sequential(nn.LayerNorm(first.shape[0]), nn.ReLU(), nn.Linear(last.shape[1], last.shape[0]))
        return [nn.Sequential(nn.Linear(first.shape[1], first.shape[0])), head]

    places = {linears[0]: "blocks.0.0", norms[0]: "blocks.1.0", linears[1]: "blocks.1.2"}
    names = {
        f"{stored}.{leaf}": f"{place}.{leaf}"
        for stored, place in places.items()
        for leaf in ("weight", "bias")
    }
    experts = [state(tensors, prefix) for prefix in inputs["experts"]]
    data = {f"task{number}": Given({"x": tensors[name]}) for number, name in enumerate(inputs["batches"])}
    rule = RegMean(shrink=case["params"]["reduce_non_diagonal_ratio"])
    result = merged(rule, opened(base, experts, Chain(blocks, names)), data)
    return {f"merged/{name}": tensor for name, tensor in result.items()}


def regmean_pp(case: Case, tensors: Tensors) -> Tensors:
    inputs, params = case["inputs"], case["params"]
    base = state(tensors, inputs["base"])
    experts = [state(tensors, prefix) for prefix in inputs["experts"]]
    kept = frozenset(name for name in base if "post_layernorm" in name or "visual_projection" in name)
    data = {
        f"task{number}": Given(*[{"pixel_values": tensors[name]} for name in names])
        for number, names in enumerate(inputs["pixel_batches"])
    }
    outputs = {}
    for key, precision in (("merged", "float32"), ("merged_float64", "float64")):
        rule = RegMeanPlusPlus(shrink=params["reduce_non_diagonal_ratio"])
        rule.precision = precision  # type: ignore[assignment]
        wide = {name: tensor.double() for name, tensor in base.items()} if precision == "float64" else base
        pixels = data if precision == "float32" else _double(data)
        result = merged(rule, opened(wide, experts, Tower(params["clip_config"]), kept=kept), pixels)
        outputs.update({f"{key}/{name}": tensor for name, tensor in result.items()})
    return outputs


def _double(data: dict[str, Given]) -> dict[str, Given]:
    return {
        task: Given(*[{key: value.double() for key, value in batch.items()} for batch in given.batches()])
        for task, given in data.items()
    }


def com(case: Case, tensors: Tensors) -> Tensors:
    params = case["params"]
    rule = ChainOfMerges(
        chain="feed",
        normalise=params["normalisation"],
        gram="sum",
        task_weights=params["importance_weights"],
        shrink=params["off_diagonal_alpha"],
        ridge=params["ridge"],
        anchor="zero",
    )
    rule.precision = "float64"
    return com_chain(case, tensors, rule) if "dims" in params else com_layer(case, tensors, rule)


def com_layer(case: Case, tensors: Tensors, rule: ChainOfMerges) -> Tensors:
    weights = [tensors[name] for name in case["inputs"]["weights"]]
    equations = NormalEquations(weights[0].shape[1], weights[0].shape[0])
    omegas = []
    for weight_OD, name in zip(weights, case["inputs"]["inputs"], strict=True):
        moments = Moments(weight_OD.shape[1], unit_tokens=rule.unit_tokens)
        moments.add(tensors[name].T.double())
        omegas.append(rule.fold(equations, weight_OD.double(), moments))
    weight_OD = rule.solve(equations, weights[0], weights[0])
    return {"weight": weight_OD, "omega": torch.tensor(omegas, dtype=torch.float64)}


class Activated(nn.Module):
    """A linear after the activation of the layer before."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: Any) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(inputs, outputs, bias=bias), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if self.activation is None else self.activation(x))


def com_chain(case: Case, tensors: Tensors, rule: ChainOfMerges) -> Tensors:
    params, inputs = case["params"], case["inputs"]
    dims, bias = params["dims"], params["bias"]
    activation = {"gelu": functional.gelu, "relu": functional.relu}[params["activation"]]
    depth = len(dims) - 1

    def blocks() -> list[nn.Module]:
        return [
            Activated(dims[layer], dims[layer + 1], bias, activation if layer else None)
            for layer in range(depth)
        ]

    names = {f"W{layer}": f"blocks.{layer}.linear.weight" for layer in range(depth)}
    if bias:
        names |= {f"b{layer}": f"blocks.{layer}.linear.bias" for layer in range(depth)}
    experts = []
    for number, weights in enumerate(inputs["experts"]):
        expert = {f"W{layer}": tensors[name] for layer, name in enumerate(weights)}
        if bias:
            expert |= {f"b{layer}": tensors[name] for layer, name in enumerate(inputs["biases"][number])}
        experts.append(expert)
    omegas: list[list[float]] = []

    class Watched(ChainOfMerges):
        """Notes the task weights that the rule computes."""

        def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
            if not equations.tokens:
                omegas.append([])
            omegas[-1].append(self.fold(equations, weight_OD, moments))

    watched = Watched(rule.settings)
    watched.precision = "float64"
    base = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in experts[0].items()}
    data = {
        f"task{number}": Given({"x": tensors[name].T.double()})
        for number, name in enumerate(inputs["inputs"])
    }
    backbone = Chain(blocks, names)
    result = merged(watched, opened(base, experts, backbone), data)
    model = load_model(backbone, StateDictSource(result), dtype=torch.float64)
    found: Tensors = {}
    for layer in range(depth):
        found[f"weights/{layer}"] = result[f"W{layer}"]
        found[f"omegas/{layer}"] = torch.tensor(omegas[layer], dtype=torch.float64)
        if bias:
            found[f"biases/{layer}"] = result[f"b{layer}"]
    for number, name in enumerate(inputs["inputs"]):
        found[f"outputs/{number}"] = model(tensors[name].T.double()).T
    return found


def featcal(case: Case, tensors: Tensors) -> Tensors:
    inputs = case["inputs"]
    if "pixel_batches" in inputs:
        return featcal_tower(case, tensors)
    if "student_hidden" in inputs:
        return featcal_statistics(case, tensors)
    return featcal_norm(case, tensors) if "normalised_inputs" in inputs else featcal_linear(case, tensors)


def featcal_linear(case: Case, tensors: Tensors) -> Tensors:
    inputs, params = case["inputs"], case["params"]
    alpha = params["teacher_interp_alpha"]
    rule = FeatCal(
        ridge=params["lambda"], interpolation=1.0, anchor=params["rho"]
    )  # given targets are interpolated
    weights = [tensors[name] for name in inputs["expert_weights"]]
    equations = NormalEquations(weights[0].shape[1], weights[0].shape[0])
    for number, weight_OD in enumerate(weights):
        student_TD, expert_TD = (tensors[inputs[key][number]] for key in ("student_inputs", "expert_inputs"))
        seen = Moments(weight_OD.shape[1], target=True)
        seen.add(student_TD, None, expert_TD)
        stats = {key: tensors[name].double() for key, name in inputs["stats"][number].items()}
        given = Moments.of(
            stats["cov_ss"],
            stats["cross_st"].T,
            stats["mean_student"],
            stats["mean_teacher"],
            tokens=seen.tokens,
        )
        target_DD = seen.cross_DD * alpha + seen.gram_DD * (1 - alpha)
        torch.testing.assert_close(seen.gram_DD.double(), given.gram_DD, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target_DD.double(), given.cross_DD, rtol=1e-4, atol=1e-4)
        rule.add(equations, weight_OD.double(), given)
        rule.add_bias(equations, weight_OD.double(), tensors[inputs["expert_biases"][number]].double(), given)
    merged_OD, base_OD = (tensors[inputs[key]].double() for key in ("merged_weight", "base_weight"))
    merged_O, base_O = (tensors[inputs[key]].double() for key in ("merged_bias", "base_bias"))
    if params["anchor"]:
        weight_OD = rule.solve(equations, merged_OD, base_OD)
        bias_O = rule.solve_bias(equations, weight_OD, merged_O, base_O)
    else:  # the weight keeps its ridge, towards zero; the bias has none
        weight_OD = equations.solve(ridge=params["lambda"], damping=params["covariance_eps"])
        bias_O = equations.solve_bias(weight_OD)
    stored = tensors[case["outputs"]["weight"]].dtype
    return {"weight": weight_OD.to(stored), "bias": bias_O.to(stored), "weight_float64": weight_OD}


def featcal_norm(case: Case, tensors: Tensors) -> Tensors:
    inputs, params = case["inputs"], case["params"]
    rule = FeatCal(ridge=params["lambda"], anchor=params["rho"])
    features = tensors[inputs["merged_weight"]].shape[0]
    equations = NormEquations(features, shift=True)
    for number, name in enumerate(inputs["normalised_inputs"]):
        moments = NormMoments(features)
        moments.add(tensors[name])
        scale_D = tensors[inputs["expert_weights"][number]]
        rule.add_norm(equations, scale_D, tensors[inputs["expert_biases"][number]], moments)
    scale_D, shift_D = rule.solve_norm(
        equations,
        (tensors[inputs["merged_weight"]], tensors[inputs["merged_bias"]]),
        (tensors[inputs["base_weight"]], tensors[inputs["base_bias"]]),
    )
    assert shift_D is not None
    return {"weight": scale_D.float(), "bias": shift_D.float()}


class _Watcher(FeatCal):
    """Keeps the statistics that the sweep hands to the rule, by the tensor of the expert that they come
    with."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.linears: list[tuple[Tensor, Moments]] = []
        self.affine: list[tuple[Tensor, NormMoments]] = []

    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        self.linears.append((weight_OD, deepcopy(moments)))  # whose memory serves the next task
        super().add(equations, weight_OD, moments)

    def add_norm(self, equations: Any, scale_D: Tensor, shift_D: Tensor | None, moments: NormMoments) -> None:
        self.affine.append((scale_D, moments))
        super().add_norm(equations, scale_D, shift_D, moments)


class _OneBlock(Tower):
    """Block `index` of a tower, alone, fed with hidden states; it is the last of its stack if the tower's
    is."""

    def __init__(self, config: dict[str, Any], index: int, last: bool) -> None:
        super().__init__(config)
        self._index, self._last = index, last

    def skeleton(self) -> nn.Module:
        block = super().skeleton().encoder.layers[self._index]  # type: ignore[union-attr, index]

        class Fed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([block])

            def forward(self, hidden: Tensor) -> Tensor:
                return self.blocks[0](hidden, attention_mask=None)  # type: ignore[no-any-return]

        return Fed().eval()

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        return ("blocks",)

    def module_names(self, names: tuple[str, ...]) -> dict[str, str]:
        prefix = f"encoder.layers.{self._index}."
        return {name: f"blocks.0.{name.removeprefix(prefix)}" for name in names if name.startswith(prefix)}

    def token_weights(
        self, batch: Any, stack: str, module: str, tokens: tuple[int, ...], last: bool
    ) -> Tensor | None:
        return super().token_weights(batch, stack, module, tokens, self._last)


def featcal_statistics(case: Case, tensors: Tensors) -> Tensors:
    """One block, student and expert fed with given hidden states; both streams go through the sweep's
    measuring."""
    from merging.sweep import Sweep

    inputs, params = case["inputs"], case["params"]
    index = params["layer_idx"]
    student, expert = state(tensors, inputs["merged"]), state(tensors, inputs["expert"])
    backbone = _OneBlock(params["clip_config"], index, last=index == params["num_layers"] - 1)
    students = Given(*[{"hidden": tensors[name]} for name in inputs["student_hidden"]])
    experts = [{"hidden": tensors[name]} for name in inputs["expert_hidden"]]
    alpha = params["teacher_interp_alpha"]
    rule = _Watcher(interpolation=alpha)
    models = opened(student, [expert], backbone)
    sink = StateDictSink(models.base)
    sweep = Sweep(rule, models.base, models, CalibrationData({"task0": students}), sink)
    sweep._tracers["expert", "task0"].batches = experts
    sweep._answers = lambda *_: 0  # type: ignore[method-assign]  # cross moments are what is given
    sweep.run()
    block = load_model(backbone, models.experts["task0"])
    found: Tensors = {f"next_expert_hidden/{number}": block(**batch) for number, batch in enumerate(experts)}
    prefix = f"encoder.layers.{index}."
    for module, stats in case["outputs"]["stats"].items():
        weight = expert[f"{prefix}{module}.weight"]
        if "energy_student" in stats:
            norm = next(moments for scale_D, moments in rule.affine if torch.equal(scale_D, weight))
            found[f"stats/{module}/mean_student"] = norm.mean_D
            found[f"stats/{module}/energy_student"] = norm.square_D
            continue
        moments = next(
            moments
            for stacked_OD, moments in rule.linears
            if any(torch.equal(part, weight) for part in stacked_OD.split(len(weight)))
        )
        cross_DD = moments.cross_DD * alpha + moments.gram_DD * (1 - alpha)
        found[f"stats/{module}/mean_student"] = moments.mean_D
        found[f"stats/{module}/mean_teacher"] = moments.target_mean_D * alpha + moments.mean_D * (1 - alpha)
        found[f"stats/{module}/cov_ss"] = moments.gram_DD
        found[f"stats/{module}/cross_st"] = cross_DD.T  # theirs has the student along its rows
    return found


def featcal_tower(case: Case, tensors: Tensors) -> Tensors:
    inputs, params = case["inputs"], case["params"]
    data = {}
    for number, names in enumerate(inputs["pixel_batches"]):
        left, batches = params["num_calibration_examples"], []
        for name in names:
            pixels = tensors[name][:left]
            left -= len(pixels)
            if len(pixels):
                batches.append({"pixel_values": pixels})
        data[f"task{number}"] = Given(*batches)
    rule = FeatCal(
        ridge=params["lambda_ratio"],
        interpolation=params["teacher_interp_alpha"],
        anchor=params["anchor_blend_rho"],
        biases=params["calibrate_bias"],
        norms=params["calibrate_layernorm"],
    )
    backbone = Tower(params["clip_config"])
    models = opened(
        state(tensors, inputs["base"]), [state(tensors, prefix) for prefix in inputs["experts"]], backbone
    )
    sink = StateDictSink(models.base)
    with sink:
        rule.calibrate(StateDictSource(state(tensors, inputs["merged"])), models, CalibrationData(data), sink)
    output = load_model(backbone, StateDictSource(sink.tensors))(pixel_values=tensors[inputs["probe_pixels"]])
    return {
        **{f"calibrated/{name}": tensor for name, tensor in sink.tensors.items()},
        "probe_last_hidden_state": output.last_hidden_state,
        "probe_pooler_output": output.pooler_output,
    }


ADAPTERS = {"regmean": regmean, "regmean_pp": regmean_pp, "com": com, "featcal": featcal}
