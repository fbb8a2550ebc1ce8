"""Memory, speed and devices: what people report, and what they see here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from merging_cli.main import main
from peft_adapters import adapted
from safetensors.torch import save_file
from small_models import WORDS, clip_tower, expert, llama, run, saved, spec_of, tensors_in, write_words

from merging.errors import MergingError, SpecError
from merging.pipeline import Pipeline
from merging.report.stages import resident
from merging.sweep import Sweep

MIB = 1 << 20
SHARD = 12 * MIB
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def large_llama() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LARGE)).eval()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base, three experts and four adapters; about 35 MiB each full model, in shards."""
    folder, base = tmp_path_factory.mktemp("large"), large_llama()
    base.save_pretrained(folder / "base", max_shard_size=SHARD)
    for seed, name in enumerate(("one", "two", "three"), start=1):
        expert(base, seed, noise=0.001).save_pretrained(folder / name, max_shard_size=SHARD)
    for seed in range(4):
        adapted(base, folder / f"adapter{seed}", seed=seed, target_modules=["q_proj", "v_proj", "up_proj"])
    return folder


def merged_within(out: Path, spec: dict[str, Any]) -> int:
    """Bytes that the merge takes at most beside what the process holds before it, on one thread: each has row
    blocks of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        Pipeline.from_spec(spec).run(out.with_name("before"))  # libraries are loaded and resident
        shutil.rmtree(out.with_name("before"))
        before = resident()
        report = Pipeline.from_spec(spec).run(out)
    finally:
        torch.set_num_threads(threads)
    return next(stage.peak_bytes for stage in report.stages if stage.name == "merge") - before


@pytest.mark.parametrize("rule", ["average", "task_arithmetic"])
def test_a_merge_holds_no_model_in_memory(large: Path, tmp_path: Path, rule: str) -> None:
    """At most two shards, for four models of five; a copy of one model would break this."""
    spec = spec_of(large / "base", {name: large / name for name in ("one", "two", "three")}, {"type": rule})

    assert merged_within(tmp_path / "out", spec) < 2 * SHARD


def test_the_plan_is_near_what_a_merge_takes(large: Path, tmp_path: Path) -> None:
    spec = spec_of(large / "base", {name: large / name for name in ("one", "two", "three")})

    plan = Pipeline.from_spec(spec).plan()
    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    found = next(stage.peak_bytes for stage in report.stages if stage.name == "merge")
    assert abs(plan.steps[0].peak_bytes / found - 1) < 0.25


def test_adapters_are_applied_tensor_by_tensor_in_memory_and_on_disk(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = spec_of(large / "base", {str(n): {"adapter": str(large / f"adapter{n}")} for n in range(4)})
    on_disk = []

    def look(stage: str, done: int, total: int) -> None:
        on_disk.append(sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file()))

    taken = merged_within(out, spec)
    Pipeline.from_spec(spec).run(tmp_path / "again", progress=look)

    model = sum(tensor.nbytes for tensor in large_llama().state_dict().values())
    assert taken < 2 * SHARD
    assert max(on_disk) < 2.1 * model  # the two results


def test_bfloat16_models_are_merged_in_wide_numbers_on_a_cpu(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in bfloat16 are what is slow there."""
    large_llama().to(torch.bfloat16).save_pretrained(tmp_path / "halves")
    seen: set[torch.dtype] = set()
    true = torch.Tensor.__matmul__

    def looked_at(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.update((one.dtype, other.dtype))
        return true(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", looked_at)
    run(tmp_path / "out", spec_of(tmp_path / "halves", {"one": {"adapter": str(large / "adapter0")}}))

    assert seen
    assert not seen & {torch.bfloat16, torch.float16}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, an expert, and 64 short texts beside one of 4096 words."""
    folder, base = tmp_path_factory.mktemp("small"), llama()
    for seed, name in enumerate(("base", "one")):
        saved(expert(base, seed) if seed else base, folder / name)
        write_words(folder / name, WORDS)
    texts = [" ".join(WORDS[1:33])] * 64 + [" ".join(WORDS[1:] * 66)[:16000]]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def long_texts(small: Path, **changes: Any) -> dict[str, Any]:
    examples = {"type": "text", "path": str(small / "texts.jsonl"), **changes}
    return spec_of(
        small / "base", {"one": small / "one"}, {"type": "regmean"}, tasks={"one": {"calibration": examples}}
    )


def test_a_long_text_is_cut_by_default_and_the_plan_says_so(small: Path) -> None:
    capped = Pipeline.from_spec(long_texts(small)).plan()
    asked = Pipeline.from_spec(long_texts(small, max_length=1000)).plan()

    assert capped.tasks["one"].longest == 512
    assert any("1 of 65 texts were cut to 512 tokens" in note for note in capped.notes)
    assert asked.tasks["one"].longest == 1000


class NoRoom(torch.OutOfMemoryError):
    """As a device raises it."""


WANTS = {
    "device": NoRoom("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError(),
}


@pytest.mark.parametrize("kind", WANTS)
def test_want_of_memory_is_laid_to_length_number_and_batch_before_hardware(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise WANTS[kind]

    monkeypatch.setattr(Sweep, "_solve_block", fail)

    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec(long_texts(small, batch_size=8)).run(tmp_path / "out")

    text = str(caught.value)
    assert 'out of memory: task "one" has 65 calibration examples, 8 in a batch' in text
    assert "the longest has 512 tokens" in text
    assert text.index("max_length") < text.index("batch_size") < text.index('"memory"')
    assert not (tmp_path / "out" / "merged").exists()


def test_an_error_that_is_not_of_memory_stays_what_it_is(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(Sweep, "_solve_block", fail)

    with pytest.raises(RuntimeError, match=r"^something else$"):
        Pipeline.from_spec(long_texts(small)).run(tmp_path / "out")


@pytest.mark.parametrize("device", ["cuda:99", "cudda", "meta", "cpu:7x", ""])
def test_a_device_that_is_not_there_is_refused_before_the_work(
    small: Path, tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {**spec_of(small / "base", {"one": small / "one"}), "device": device}
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    code = main(["pipeline", "run", str(tmp_path / "spec.json"), "--out", str(tmp_path / "out")])

    err = capsys.readouterr().err
    assert code == 2
    assert "device" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:0"])
def test_a_calibration_is_the_same_on_every_device_and_nothing_stays_on_meta(
    tmp_path: Path, device: str
) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    base = clip_tower()
    folders = [
        saved(one, tmp_path / str(n)) for n, one in enumerate((base, expert(base, 1), expert(base, 2)))
    ]
    save_file({"pixel_values": torch.randn(12, 3, 32, 32)}, tmp_path / "x.safetensors")
    data = {"calibration": {"type": "tensors", "path": str(tmp_path / "x.safetensors")}}
    spec = spec_of(
        folders[0],
        {"one": folders[1], "two": folders[2]},
        {"type": "average"},
        calibrate={"type": "featcal"},
        tasks={"one": data, "two": data},
    )

    here = tensors_in(run(tmp_path / "cpu-out", {**spec, "device": "cpu"}))
    there = tensors_in(run(tmp_path / "out", {**spec, "device": device}))

    assert here.keys() == there.keys() == tensors_in(folders[0]).keys()
    assert max(float((there[name] - here[name]).abs().max()) for name in here) < 1e-4


def test_a_spec_cannot_ask_for_a_device_without_weights(small: Path) -> None:
    with pytest.raises(SpecError, match="meta"):
        Pipeline.from_spec({**spec_of(small / "base", {"one": small / "one"}), "device": "meta"})
