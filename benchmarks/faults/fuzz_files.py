"""Mutated files beside the weights: configs, tokenizers, image processors, examples, plug-ins."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import mutations, workshop
from benchmarks.faults.watch import Outcome, watched

_WORDS = tuple(f"w{number}" for number in range(60))
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_PLUGIN = '''"""A rule of one's own."""
import merging

@merging.strategy("fuzzed")
class Fuzzed(merging.TensorMerger):
    """The middle of the experts."""
    class Settings(merging.Settings):
        share: float = 0.5
    def combine(self, name, base_S, deltas_NS):
        return base_S + self.settings.share * deltas_NS.median(dim=0).values
'''
KINDS = ("configs", "tokenizers", "image processors", "texts", "pictures", "tensor files", "plug-ins")


class Files:
    """A language model with texts and a vision model with pictures, good ones, and copies that are spoilt."""

    def __init__(self, folder: Path) -> None:
        """`workshop.settle` must have been called for the folder above."""
        self.folder, self.good = folder, folder / "good"
        shutil.rmtree(folder, ignore_errors=True)
        for backbone in ("llama", "clip_vision"):
            workshop.models(self.good / backbone, backbone)
        _texts(self.good / "llama")
        _pictures(self.good / "clip_vision")
        (self.good / "rule.py").write_text(_PLUGIN)

    def outcome(self, kind: str, chance: random.Random, number: int) -> Outcome:
        """Of one spoilt file: validated, and run where that finds nothing (one time in four)."""
        place = self.folder / "spoilt"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.good, place)
        spec, file = self._spoilt(kind, place, chance, number)
        runs = chance.random() < 0.25
        outcome = watched(partial(_checked, spec, runs), [place, self.folder.parent / "cache", _tmp()])
        if outcome.kind == "fault":  # kept, to be looked at
            kept = self.folder / f"fault-{kind.replace(' ', '-')}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            shutil.copyfile(file, kept / file.name)
        return outcome

    def _spoilt(
        self, kind: str, place: Path, chance: random.Random, number: int
    ) -> tuple[dict[str, Any], Path]:
        text, vision = _text_spec(place / "llama"), _vision_spec(place / "clip_vision")
        where = chance.choice(("base", workshop.TASKS[1]))
        if kind == "configs":
            name = chance.choice(("config.json", "config.json", "generation_config.json"))
            spec, home = (
                (text, "llama")
                if name[0] == "g"
                else chance.choice(((text, "llama"), (vision, "clip_vision")))
            )
            return spec, _json(place / home / where / name, chance)
        if kind == "tokenizers":
            name = chance.choice(("tokenizer.json", "tokenizer_config.json"))
            return text, _json(place / "llama" / where / name, chance)
        if kind == "image processors":
            return vision, _json(place / "clip_vision" / "base" / "preprocessor_config.json", chance)
        if kind == "texts":
            return text, _rows(place / "llama" / "texts.jsonl", chance)
        if kind == "pictures":
            return vision, _bytes(
                chance.choice(sorted((place / "clip_vision" / "pictures").rglob("*.png"))), chance
            )
        if kind == "tensor files":
            from benchmarks.faults.fuzz import header

            spec = workshop.spec(place / "clip_vision", "clip_vision", output={"path": str(place / "out")})
            name = chance.choice(("digits", "digits-test", "digits-head"))
            return spec, _changed(
                place / "clip_vision" / f"{name}.safetensors", partial(header, chance=chance)
            )
        file = (place / "rule.py").rename(place / f"rule_{number}.py")  # modules are loaded once by name
        _changed(file, lambda content: content.replace(b"fuzzed", f"fuzzed-{number}".encode()))
        spec = {**text, "plugins": [str(file)], "merge": {"type": f"fuzzed-{number}"}}
        return {**spec, "calibrate": [], "tasks": {}}, _bytes(file, chance)


def _checked(spec: dict[str, Any], runs: bool) -> None:
    from merging.pipeline import Pipeline

    pipeline = Pipeline.from_spec(spec)
    pipeline.validate()
    if runs:
        pipeline.run()


def _tmp() -> Path:
    import tempfile

    return Path(tempfile.gettempdir())


def _texts(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate((*_SPECIAL, *_WORDS))}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    for name in ("base", *workshop.TASKS):
        tokenizer.save_pretrained(folder / name)
    rows = [{"text": f"w{at} w{at + 1} w{at + 2}", "label": ("w3", "w4")[at % 2]} for at in range(12)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _pictures(folder: Path) -> None:
    import numpy as np
    from PIL import Image
    from transformers import CLIPImageProcessor

    side = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(folder / "base")
    drawn = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / "pictures" / label).mkdir(parents=True)
        for number in range(3):
            pixels = drawn.integers(0, 256, (40, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / label / f"{number}.png")


def _text_spec(folder: Path) -> dict[str, Any]:
    data = {"type": "text", "path": str(folder / "texts.jsonl"), "batch_size": 5}
    test = {**data, "label": "label", "labels": {"w3": " w3", "w4": " w4"}}
    asked = {task: {"calibration": {**data, "examples": 6}} for task in workshop.TASKS}
    asked[workshop.TASKS[0]] |= {"test": test, "metric": "choice"}  # type: ignore[dict-item]
    return _spec(folder, asked)


def _vision_spec(folder: Path) -> dict[str, Any]:
    data = {"type": "images", "path": str(folder / "pictures")}
    return _spec(folder, {task: {"calibration": data} for task in workshop.TASKS})


def _spec(folder: Path, tasks: dict[str, Any]) -> dict[str, Any]:
    return {
        "base": str(folder / "base"),
        "experts": {task: str(folder / task) for task in workshop.TASKS},
        "merge": {"type": "task_arithmetic", "scale": 0.4},
        "calibrate": {"type": "featcal"},
        "tasks": tasks,
        "output": {"path": str(folder.parent / "out")},
        "device": "cpu",
        "allow": ["overlap"],
    }


def _json(file: Path, chance: random.Random) -> Path:
    content = file.read_bytes()
    if chance.random() < 0.2:
        return _bytes(file, chance)
    good = json.loads(content)
    keys = list(good) if isinstance(good, dict) else []
    file.write_text(mutations.text_of(mutations.mutated(good, chance, keys, most=2)))
    return file


def _rows(file: Path, chance: random.Random) -> Path:
    if chance.random() < 0.4:
        return _bytes(file, chance)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    at = chance.randrange(len(rows))
    rows[at] = mutations.mutated(rows[at], chance, ["text", "label"], most=2)
    file.write_text("".join(f"{mutations.text_of(row)}\n" for row in rows))
    return file


def _bytes(file: Path, chance: random.Random) -> Path:
    return _changed(file, partial(mutations.damaged, chance=chance))


def _changed(file: Path, change: Callable[[bytes], bytes]) -> Path:
    file.write_bytes(change(file.read_bytes()))
    return file
