"""LoraSink: a merged model written as a PEFT adapter on its base, with what is lost by it.

Shape letters: O rows, I columns, R rank, S the shape of any tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from merging.checkpoints.atomic import sync
from merging.checkpoints.lora_config import CONFIG
from merging.checkpoints.lora_roles import PREFIX, Roles, adapter_config
from merging.checkpoints.manifest import MANIFEST, listing
from merging.checkpoints.outline import Outline
from merging.checkpoints.publish import Partial
from merging.checkpoints.rounding import rounded
from merging.checkpoints.side_files import SideFiles
from merging.checkpoints.sink import CheckpointSink, nothing_to_check, refuse_overlap, row_range
from merging.checkpoints.source import CheckpointSource
from merging.errors import CheckpointError, OutputError, Problem
from merging.low_rank import LowRank, norm, shortened, shortened_product

_SHOWN = 10  # tensors of which it is told that they cannot be said
NOISE = 1e-5  # of a change's largest singular value: what an exact rank leaves out


def loss_note(stage: str, adapter: Mapping[str, Any]) -> str:
    """A sentence for people on what `summary` says."""
    worst = max(adapter["relative_errors"].items(), key=lambda item: item[1], default=("", 0.0))
    most = f", most in {worst[0]} ({worst[1]:.2g})" if worst[0] else ""
    return (
        f"{stage} is an adapter of rank {adapter['rank']}: of the linear layers' change it loses a share of "
        f"{adapter['relative_error']:.2g} (Frobenius norm){most}; other tensors stored whole: "
        f"{len(adapter['stored_whole'])}"
    )


class LoraSink(CheckpointSink):
    """Takes every tensor of the model; `close` leaves the adapter, as PEFT stores it, in `target`.

    Weights of linear layers become factors of `rank` ("exact": of the rank that the change has); other
    tensors that changed are stored whole. The adapter is held in memory until it is written.
    """

    takes_changes = True

    def __init__(
        self,
        target: Path,
        base: CheckpointSource,
        outline: Outline,
        *,
        rank: int | Literal["exact"],
        dtype: torch.dtype | None = None,
        experts: Mapping[str, CheckpointSource] | None = None,
        base_name: str = "",
        revision: str | None = None,
    ) -> None:
        """`dtype` of the factors, None: float32. `experts`: where they are adapters, their factors help."""
        self._base, self._outline, self._roles = base, outline, Roles(outline)
        self._rank, self._dtype = rank, dtype or torch.float32
        self._experts = dict(experts or {})
        self._named = {"base_name": base_name, "revision": revision}
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        self._finished: set[str] = set()
        self._factors: dict[str, LowRank] = {}
        self._whole: dict[str, Tensor] = {}
        self._squares: dict[str, tuple[float, float]] = {}  # of the change, and of what is lost of it
        self._problems: list[Problem] = []
        self._texts: dict[str, str] = {}
        self.copied, self.notes = SideFiles((), ()), []  # type: ignore[var-annotated]
        self.check: Callable[[Path], None] = nothing_to_check  # of the whole folder, before it is published
        self._partial = Partial(target)
        self.target = self._partial.target

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        spec = self._base.spec(name)
        first, last = row_range(name, spec, tensor, rows)
        if first == last and spec.elements:
            return
        if name in self._finished:
            held = [(0, (spec.shape or (1,))[0])]
        else:
            held = [
                (start, start + (len(part) if part.ndim else 1)) for start, part in self._parts.get(name, ())
            ]
        refuse_overlap(name, first, last, held)
        parts = self._parts.setdefault(name, [])
        parts.append((first, tensor.detach().cpu()))
        if sum(len(part) if part.ndim else 1 for _, part in parts) < (spec.shape or (1,))[0]:
            return
        parts = sorted(self._parts.pop(name), key=lambda part: part[0])
        self._finished.add(name)
        self._take(name, torch.cat([part for _, part in parts]) if spec.shape else parts[0][1])

    def write_change(self, name: str, change: LowRank) -> None:
        if name in self._finished or name in self._parts:
            raise CheckpointError(f'"{name}" is written twice')
        self._finished.add(name)
        if not change.rank or not norm([change]):
            return
        if self._roles.of(name) != "factors":
            base_S = self._base.read(name)
            self._take(name, base_S.double() + change.product().view(base_S.shape))
            return
        turned = change.transposed if self._roles.transposed(name) else change
        self._keep(name, turned, shortened_product(turned, self._shortest, noise=NOISE))

    def add_file(self, name: str, text: str) -> None:
        """A text file beside the adapter; manifest.json gets its list of files added."""
        if "/" in name or name in (CONFIG, ".", ".."):
            raise OutputError(f'"{name}" cannot be the name of an additional file')
        self._texts[name] = text

    def summary(self) -> dict[str, Any]:
        """Ranks, relative errors and tensors stored whole, once all tensors are there."""
        errors = {
            name: math.sqrt(lost / change) if change else 0.0
            for name, (change, lost) in self._squares.items()
        }
        change, lost = (sum(pair[side] for pair in self._squares.values()) for side in (0, 1))
        return {
            "rank": self._rank,
            "ranks": {name: term.rank for name, term in self._factors.items()},
            "relative_error": math.sqrt(lost / change) if change else 0.0,
            "relative_errors": errors,
            "stored_whole": sorted(self._whole),
        }

    def close(self) -> None:
        try:
            lost = [
                name
                for name in self._base.names()
                if name not in self._finished and self._base.spec(name).elements
            ]
            if lost:
                raise CheckpointError(f"{len(lost)} tensors were not written in full; first: {lost[0]}")
            self._refuse_unsaid()
            self._write_files()
            self.check(self._partial.content)
            self.notes += self._partial.publish()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        self._partial.discard()

    def _take(self, name: str, tensor_S: Tensor) -> None:
        spec = self._base.spec(name)
        stored_S = rounded(tensor_S, spec.dtype, name=name)
        base_S = self._base.read(name)
        if torch.equal(stored_S, base_S):
            return
        role = self._roles.of(name)
        if role is None:
            self._problems.append(Problem(name, self._roles.unsaid(name)))
        elif role == "factors":
            self._factor(name, tensor_S.double() - base_S.double())
        else:
            self._whole[name] = stored_S.clone()

    def _factor(self, name: str, delta_OI: Tensor) -> None:
        turned = self._roles.transposed(name)
        delta_OI = delta_OI.T if turned else delta_OI
        within: list[Tensor] = []
        for expert in self._experts.values():
            term = expert.factors(name)
            if term is None:
                within = []
                break
            within.append(term.right_RI.T if turned else term.left_OR)
        self._keep(name, delta_OI, shortened(delta_OI, self._shortest, within=within, noise=NOISE))

    @property
    def _shortest(self) -> int | None:
        return None if self._rank == "exact" else self._rank

    def _keep(self, name: str, delta: Tensor | LowRank, term: LowRank) -> None:
        """Take the factors of a linear's change (O I, outputs first), and count what they lose of it."""
        size = min(term.left_OR.shape[0], term.right_RI.shape[1])
        if self._shortest is None and 2 * term.rank > size:
            what = f"its change has rank {term.rank} of {size}, which is not low"
            self._problems.append(Problem(name, what))
            return
        left_OR, right_RI = (
            rounded(factor.contiguous(), self._dtype, name=name) for factor in (term.left_OR, term.right_RI)
        )
        self._factors[name] = kept = LowRank(left_OR, right_RI)
        if isinstance(delta, LowRank):
            change, lost = norm([delta]), norm([delta, kept._replace(scale=-1.0)])
        else:
            change, lost = float(delta.norm()), float((delta - kept.product()).norm())
        self._squares[name] = (change**2, lost**2)

    def _refuse_unsaid(self) -> None:
        problems = self._problems[:_SHOWN]
        if not problems:
            return
        if len(self._problems) > len(problems):
            problems.append(Problem("", f"and {len(self._problems) - len(problems)} more"))
        raise CheckpointError(
            "the merged model cannot be said as an adapter on the base",
            problems=problems,
            remedy='Give a rank as a number, or use "form": "model".'
            if self._shortest is None
            else 'Use "form": "model".',
        )

    def _evened(self) -> tuple[dict[str, LowRank], int | None]:
        """The factors, those of experts filled up with zeros to one rank, which PEFT takes from the config;
        and that rank. Experts beside them that did not change get zeros."""
        stacked = self._roles.stacked(self._factors)
        rank = max((self._factors[name].rank for name in stacked if name in self._factors), default=None)
        if rank is None:
            return self._factors, None
        factors = dict(self._factors)
        for name in stacked:
            rows, columns = self._base.spec(name).shape
            left_OR, right_RI = (
                torch.zeros(size, dtype=self._dtype) for size in ((rows, rank), (rank, columns))
            )
            if (found := factors.get(name)) is not None:
                left_OR[:, : found.rank], right_RI[: found.rank] = found.left_OR, found.right_RI
            factors[name] = LowRank(left_OR, right_RI)
        return factors, rank

    def _write_files(self) -> None:
        roles = self._roles
        whole = [name for name in self._whole if roles.of(name) == "whole"]
        factors, stacked_rank = self._evened()
        saved = roles.saved(whole, factors)
        inside = {place for places in saved.values() for place in places}
        tensors: dict[str, Tensor] = {}
        for name, term in factors.items():
            tensors[f"{PREFIX}{roles.module(name)}.lora_A.weight"] = term.right_RI
            tensors[f"{PREFIX}{roles.module(name)}.lora_B.weight"] = term.left_OR
        for place in sorted(inside):
            source = roles.source(place)
            if source is not None:
                value = self._whole.get(source)
                tensors[f"{PREFIX}{place}"] = (self._base.read(source) if value is None else value).clone()
        biases = [
            name for name in self._whole if roles.of(name) == "bias" and roles.places[name] not in inside
        ]
        adapted = {roles.module(name) for name in factors}
        for name in biases:
            layer = ".base_layer" if roles.module(name) in adapted else ""
            tensors[f"{PREFIX}{roles.module(name)}{layer}.bias"] = self._whole[name]
        config = adapter_config(
            self._outline,
            {roles.module(name): term.rank for name, term in factors.items()},
            roles.targets(adapted),
            roles.listed(saved),
            rank=stacked_rank,
            biases=bool(biases),
            transposed=bool(factors) and all(map(roles.transposed, factors)),
            **self._named,  # type: ignore[arg-type]
        )
        self._texts[CONFIG] = json.dumps(config, indent=2, sort_keys=True) + "\n"
        content = self._partial.content
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            content / "adapter_model.safetensors",
            {"format": "pt"},
        )
        about = json.loads(self._texts.pop(MANIFEST, "{}"))
        for name, text in self._texts.items():
            (content / name).write_text(text, encoding="utf-8")
        about |= listing(content, sorted(content.iterdir()))
        (content / MANIFEST).write_text(
            json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        for path in content.iterdir():
            sync(path)
