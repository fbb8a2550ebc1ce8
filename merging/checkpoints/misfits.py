"""What is said of an expert whose tensors are not those of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merging.checkpoints.source import CheckpointSource
from merging.errors import Problem
from merging.spec.wording import counted

_FEW = 10  # so many names are listed one by one; of more, three are shown


def differing_names(where: str, missing: Sequence[str], extra: Sequence[str], total: int) -> list[Problem]:
    """Missing and extra tensors of the expert `where`, and the prefix if that is all the difference."""
    problems = []
    if missing:
        what = f"{len(missing)} of {total} tensors of the base are missing: {listed(missing)}"
        problems.append(Problem(where, what))
    if extra:
        are = f"{counted(len(extra), 'tensor')} {'is' if len(extra) == 1 else 'are'}"
        problems.append(Problem(where, f"{are} not in the base: {listed(extra)}"))
    prefix = _prefix_that_differs(missing, extra)
    if prefix:
        whose, value = prefix
        remedy = f'The names of the {whose} begin with "{value}", those of the other do not.'
        problems[-1] = problems[-1]._replace(remedy=remedy)
    return problems


def _prefix_that_differs(missing: Sequence[str], extra: Sequence[str]) -> tuple[str, str] | None:
    """("expert" or "base", prefix) if adding it to one side's names gives names of the other."""
    for whose, longer, shorter in (("expert", extra, missing), ("base", missing, extra)):
        for other in longer if shorter else ():
            prefix = other.removesuffix(shorter[0])
            if prefix.endswith(".") and all(f"{prefix}{name}" in longer for name in shorter[:3]):
                return whose, prefix
    return None


def differing_shapes(
    base: CheckpointSource, expert: CheckpointSource, pairs: Mapping[str, str]
) -> list[Problem]:
    """`pairs`: name in the base -> name in the expert, of tensors whose shapes or kinds of number differ."""
    if not pairs:
        return []
    shown = []
    for name, twin in list(pairs.items())[: _FEW if len(pairs) <= _FEW else 3]:
        found, wanted = expert.spec(twin), base.spec(name)
        kinds = "" if found.dtype.is_floating_point else f", stored as {str(found.dtype)[6:]}"
        shown.append(f"{name} (base {_shape(wanted.shape)}, expert {_shape(found.shape)}{kinds})")
    more = f", and {len(pairs) - len(shown)} more" if len(shown) < len(pairs) else ""
    what = f"{len(pairs)} of {len(base.names())} tensors differ in shape: {', '.join(shown)}{more}"
    return [Problem(expert.label, what, _hint(list(pairs)))]


def listed(names: Sequence[str]) -> str:
    """A few names in full, of many the first and how many more there are."""
    shown = names[: _FEW if len(names) <= _FEW else 3]
    return ", ".join(shown) + (f", and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _hint(names: Sequence[str]) -> str:
    if all("position_embedding" in name for name in names):
        return "They were fine-tuned at different resolutions or lengths."
    if all(
        part in ("embed_tokens", "lm_head", "shared", "wte", "word_embeddings") for part in map(_owner, names)
    ):
        return "Their vocabularies differ in size."
    return ""


def _owner(name: str) -> str:
    return name.split(".")[-2] if "." in name else name
