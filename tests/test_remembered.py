"""A second run on plain full checkpoints does not ask transformers again, and any change makes it ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft_adapters import adapted
from safetensors.torch import load_file, save_file
from tiny_models import expert_of, made

from merging.cache import VARIABLE
from merging.errors import CheckpointError
from merging.pipeline import Pipeline


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    _, base, _ = made("llama")
    base.save_pretrained(tmp_path / "base")
    for seed, task in enumerate("ab"):
        other = type(base)(base.config)
        other.load_state_dict(expert_of(base, seed + 1))
        other.save_pretrained(tmp_path / task)
    return tmp_path


def spec(folder: Path, **more: object) -> dict[str, object]:
    paths = {task: str(folder / task) for task in "ab"}
    return {"base": str(folder / "base"), "experts": paths, "merge": {"type": "average"}, **more}


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> tuple[set[str], bool]:
    """What is kept from the base, and whether it had to be found out."""
    from merging import opening

    compared = []
    true = opening._compared
    monkeypatch.setattr(opening, "_compared", lambda asked: compared.append(asked) or true(asked))
    found = Pipeline.from_spec(spec(folder, **more)).resolve()
    monkeypatch.setattr(opening, "_compared", true)
    return set(found.models.kept), bool(compared)


def test_what_was_found_once_is_known(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = opened(workshop, monkeypatch), opened(workshop, monkeypatch)

    assert (first[1], second[1]) == (True, False)
    assert first[0] == second[0]


@pytest.mark.parametrize("change", ["config", "tokenizer", "tensor", "policy", "another expert"])
def test_any_change_makes_it_ask_again(workshop: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    opened(workshop, monkeypatch)
    more: dict[str, object] = {}
    if change == "config":
        place = workshop / "a" / "config.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), "use_cache": False}))
    elif change == "tokenizer":
        (workshop / "b" / "tokenizer_config.json").write_text("{}")
    elif change == "tensor":
        place = workshop / "b" / "model.safetensors"
        tensors = load_file(place)
        save_file({**tensors, "extra.weight": tensors["model.norm.weight"].clone()}, place, {"format": "pt"})
    elif change == "policy":
        more = {"vocabulary": "base"}
    else:
        os.rename(workshop / "b", workshop / "c")
        os.rename(workshop / "a", workshop / "b")
        os.rename(workshop / "c", workshop / "a")
        (workshop / "a" / "new.json").write_text("1")

    if change == "tensor":
        with pytest.raises(CheckpointError, match="do not fit"):
            opened(workshop, monkeypatch)
    else:
        assert opened(workshop, monkeypatch, **more)[1]


def test_the_second_run_loads_no_transformers(workshop: Path) -> None:
    code = (
        "import sys; from merging_cli.main import main; code = main(sys.argv[1:]); "
        "print('transformers' in sys.modules); sys.exit(code)"
    )
    place = workshop / "spec.json"
    place.write_text(json.dumps(spec(workshop)))
    loaded = []
    for number in range(2):
        words = ["pipeline", "run", str(place), "--out", str(workshop / f"out{number}"), "-q"]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, env=os.environ
        )
        loaded.append(done.stdout.split()[-1])
    first, second = (
        load_file(workshop / f"out{number}" / "merged" / "model.safetensors") for number in range(2)
    )

    assert loaded == ["True", "False"]
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("spoilt", ["", "[]", "{}", '{"kept": 1, "heads": 2, "notes": 3}'])
def test_a_spoilt_memory_is_found_out_anew(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    opened(workshop, monkeypatch)
    for file in (workshop / "cache" / "opened").iterdir():
        file.write_text(spoilt)

    assert opened(workshop, monkeypatch)[1]


def adapter_spec(folder: Path) -> dict[str, object]:
    given = {"base": str(folder / "base"), "merge": {"type": "average"}, "device": "cpu"}
    experts = {task: {"adapter": str(folder / f"lora-{task}")} for task in "ab"}
    output = {"form": "lora", "rank": "exact"}
    return {**given, "experts": experts, "output": output, "allow": ["other_base", "far_from_base"]}


@pytest.fixture
def adapters(workshop: Path) -> Path:
    _, model, _ = made("llama")
    for seed, task in enumerate("ab"):
        adapted(
            model, workshop / f"lora-{task}", seed=seed, r=2 + seed, target_modules=["q_proj", "down_proj"]
        )
    return workshop


def test_adapters_that_were_opened_once_are_merged_without_transformers(adapters: Path) -> None:
    """In a process of its own, in which transformers cannot be imported."""
    spec_file = adapters / "spec.json"
    spec_file.write_text(json.dumps(adapter_spec(adapters)), encoding="utf-8")
    Pipeline.from_spec(spec_file).run(adapters / "first")
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['accelerate'] = None\n"
        "from merging.pipeline import Pipeline\n"
        f"Pipeline.from_spec({str(spec_file)!r}).run({str(adapters / 'second')!r})\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)

    assert done.returncode == 0, done.stderr
    first, second = (
        load_file(adapters / run / "merged/adapter_model.safetensors") for run in ("first", "second")
    )
    assert all(bool((second[name] == tensor).all()) for name, tensor in first.items())
    configs = [
        json.loads((adapters / run / "merged/adapter_config.json").read_text()) for run in ("first", "second")
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_another_adapter_is_asked_again(adapters: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    from merging import opening

    asked: list[object] = []
    true = opening._compared
    monkeypatch.setattr(opening, "_compared", lambda spec: asked.append(spec) or true(spec))
    Pipeline.from_spec(adapter_spec(adapters)).resolve()
    Pipeline.from_spec(adapter_spec(adapters)).resolve()
    assert len(asked) == 1
    place = adapters / "lora-a" / file
    if file.endswith("json"):
        config = json.loads(place.read_text())
        place.write_text(json.dumps({**config, "lora_alpha": 99}))
    else:
        save_file({name: tensor.double() for name, tensor in load_file(place).items()}, place)

    Pipeline.from_spec(adapter_spec(adapters)).resolve()

    assert len(asked) == 2
