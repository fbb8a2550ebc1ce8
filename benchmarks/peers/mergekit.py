"""mergekit as a contender: the YAML of each method, and the command, also with tuned malloc variables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Contender

PLAIN, TUNED = "mergekit", "mergekit, malloc tuned"
MALLOC = {  # large blocks are kept for the next tensor instead of being given back to the system
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def config(
    method: str,
    models: Sequence[Path],
    *,
    base: Path | None = None,
    each: Mapping[str, float] | None = None,
    parameters: Mapping[str, float] | None = None,
) -> str:
    """JSON, which is YAML; `each`: parameters of every model, `parameters`: of the merge."""
    whole: dict[str, Any] = {
        "merge_method": method,
        "models": [
            {"model": str(model), "parameters": dict(each)} if each else {"model": str(model)}
            for model in models
        ],
        "dtype": "bfloat16",
    }
    if base is not None:
        whole["base_model"] = str(base)
    if parameters:
        whole["parameters"] = dict(parameters)
    return json.dumps(whole, indent=2)


def contenders(program: Path, text: str, folder: Path, flags: Sequence[str] = ()) -> list[Contender]:
    """mergekit as it is, and with tuned malloc variables; both leave their checkpoint in FOLDER/out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    command = (
        str(program),
        str(folder / "config.yaml"),
        str(folder / "out"),
        "--quiet",
        "--random-seed",
        "1",
        *flags,
    )
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return [
        Contender(label, command, {**offline, **extra}, fresh=(folder / "out",), may_fail=True)
        for label, extra in ((PLAIN, {}), (TUNED, MALLOC))
    ]
