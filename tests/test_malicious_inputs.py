"""Files made to do harm: none runs code, reads or writes what it should not; each is answered by one clear
error, or counts for nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels
from tiny_texts import saved, sentences, written

from merging.errors import MergingError
from merging.pipeline import Pipeline

TASKS = ("digits", "letters")
SECRET = b"nobody's business"


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


class Place(NamedTuple):
    """What an attack may touch up: a copy of the good inputs, and a folder that is none of its business."""

    home: Path
    spec: dict[str, Any]

    @property
    def victim(self) -> Path:
        return self.home / "victim"

    @property
    def trace(self) -> Path:
        """Made by any code of an input that runs."""
        return self.home / "trace"

    @property
    def out(self) -> Path:
        return self.home / "out"

    def run(self, **more: Any) -> Any:
        return Pipeline.from_spec(self.spec).run(self.out, **more)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**{**SIZE, "num_hidden_layers": 1}, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed))
        expert.save_pretrained(folder / task)
        save_file(pixels(6, seed=seed), folder / f"{task}.safetensors")
        save_file({"weight": torch.randn(3, 32)}, folder / f"{task}-head.safetensors")
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path) -> Iterator[Place]:
    """Whatever the attack: no code has run, and the folder beside is as it was."""
    shutil.copytree(good, tmp_path / "models")
    models = tmp_path / "models"
    tasks = {
        task: {"calibration": {"type": "tensors", "path": str(models / f"{task}.safetensors")}}
        for task in TASKS
    }
    spec = {
        "base": str(models / "base"),
        "experts": {task: str(models / task) for task in TASKS},
        "merge": {"type": "regmean"},
        "tasks": tasks,
        "device": "cpu",
    }
    place = Place(tmp_path, spec)
    place.victim.mkdir()
    (place.victim / "secret.txt").write_bytes(SECRET)
    yield place
    assert not place.trace.exists(), "code of an input has run"
    assert [path.name for path in sorted(place.victim.rglob("*"))] == ["secret.txt"]
    assert (place.victim / "secret.txt").read_bytes() == SECRET
    made = {path.name for path in tmp_path.iterdir()}
    assert made <= {"models", "victim", "out", "spec.yaml", "spec.json"}, "something was written beside"
    inside = (path for path in place.out.rglob("*") if path.is_file() and not path.is_symlink())
    assert not any(SECRET in path.read_bytes() for path in inside), "the secret was copied"


def pickled(path: Path, trace: Path, tensors: bool = True) -> None:
    """As torch.save writes it: tensors, and something that runs."""
    content = {"weight": torch.ones(2, 2)} if tensors else {}
    torch.save({**content, "more": Evil(trace)}, path)


def emptied(folder: Path) -> Path:
    """The folder without its weights."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def as_adapter(place: Place, factors: bool = True) -> Path:
    folder = place.home / "models" / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if factors:
        name = "base_model.model.vision_model.encoder.layers.0.self_attn.q_proj"
        tensors = {f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(32, 2)}
        save_file(tensors, folder / "adapter_model.safetensors")
    place.spec["experts"]["letters"] = {"adapter": str(folder)}
    return folder


# --- pickles, in every place that takes a file


def pickled_expert(place: Place) -> None:
    pickled(emptied(place.home / "models" / "letters") / "pytorch_model.bin", place.trace)


def pickled_base(place: Place) -> None:
    pickled(emptied(place.home / "models" / "base") / "pytorch_model.bin", place.trace)


def pickled_in_the_older_format(place: Place) -> None:
    file = place.home / "models" / "letters.pt"
    torch.save({"w": Evil(place.trace)}, file, _use_new_zipfile_serialization=False)
    place.spec["experts"]["letters"] = str(file)


def bare_pickle(place: Place) -> None:
    file = emptied(place.home / "models" / "letters") / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(Evil(place.trace)))


def pickle_named_safetensors(place: Place) -> None:
    pickled(place.home / "models" / "letters" / "model.safetensors", place.trace)


def torchscript_program(place: Place) -> None:
    file = emptied(place.home / "models" / "letters") / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil(place.trace)))
        archive.writestr("archive/constants.pkl", pickle.dumps(Evil(place.trace)))


def pickled_adapter(place: Place) -> None:
    pickled(as_adapter(place, factors=False) / "adapter_model.bin", place.trace)


def pickled_adapter_named_safetensors(place: Place) -> None:
    pickled(as_adapter(place, factors=False) / "adapter_model.safetensors", place.trace)


def pickled_examples(place: Place) -> None:
    pickled(place.home / "models" / "letters.safetensors", place.trace)


def pickled_array_of_examples(place: Place) -> None:
    file = place.home / "models" / "letters.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pixel_values.npy", pickle.dumps(Evil(place.trace)))
    place.spec["tasks"]["letters"]["calibration"]["path"] = str(file)


def pickled_picture(place: Place) -> None:
    folder = place.home / "models" / "pictures" / "a"
    folder.mkdir(parents=True)
    pickled(folder / "one.png", place.trace)
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}}
    (place.home / "models" / "base" / "preprocessor_config.json").write_text(json.dumps(settings))
    place.spec["tasks"]["letters"]["calibration"] = {"type": "images", "path": str(folder.parent)}


def pickled_head(place: Place) -> None:
    file = place.home / "models" / "letters-head.safetensors"
    pickled(file, place.trace)
    place.spec["tasks"]["letters"]["head"] = {"type": "linear", "path": str(file)}


def pickled_merged_model(place: Place) -> None:
    folder = emptied(place.home / "models" / "letters")
    pickled(folder / "pytorch_model.bin", place.trace)
    place.spec["merge"] = {"type": "checkpoint", "model": str(folder)}


# --- code beside the weights


def code_named_by_the_config(place: Place) -> None:
    base = place.home / "models" / "base"
    (base / "evil.py").write_text(f"import os; os.mkdir({str(place.trace)!r})\n")
    config = json.loads((base / "config.json").read_text())
    named = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    changed = {**config, "model_type": "evil", "auto_map": named}
    (base / "config.json").write_text(json.dumps(changed))


def data_set_that_is_a_program(place: Place) -> None:
    folder = place.home / "models" / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(f"import os; os.mkdir({str(place.trace)!r})\n")
    place.spec["tasks"]["letters"]["calibration"] = {"type": "dataset", "path": str(folder), "image": "image"}


# --- paths that lead out


def index_that_climbs_out(place: Place) -> None:
    _index(place, "../../victim/secret.txt")


def index_with_an_absolute_path(place: Place) -> None:
    _index(place, str(place.victim / "secret.txt"))


def _index(place: Place, file: str) -> None:
    folder = emptied(place.home / "models" / "letters")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))


def weights_linked_out(place: Place) -> None:
    file = emptied(place.home / "models" / "letters") / "model.safetensors"
    file.symlink_to(place.victim / "secret.txt")


def tokenizer_linked_out(place: Place) -> None:
    (place.home / "models" / "base" / "vocab.json").symlink_to(place.victim / "secret.txt")


def adapter_linked_out(place: Place) -> None:
    folder = as_adapter(place, factors=False)
    (folder / "adapter_model.safetensors").symlink_to(place.victim / "secret.txt")


def adapter_config_linked_out(place: Place) -> None:
    config = as_adapter(place) / "adapter_config.json"
    moved = place.home / "models" / "elsewhere.json"
    shutil.move(config, moved)
    config.symlink_to(moved)


def task_named_as_a_path(place: Place) -> None:
    for part in ("experts", "tasks"):
        place.spec[part]["../victim/secret.txt"] = place.spec[part].pop("letters")


def task_named_as_an_absolute_path(place: Place) -> None:
    for part in ("experts", "tasks"):
        place.spec[part][str(place.victim / "new")] = place.spec[part].pop("letters")


# --- sizes and depths


def header_of_nearly_all_memory(place: Place) -> None:
    file = place.home / "models" / "letters" / "model.safetensors"
    file.write_bytes((2**63 - 1).to_bytes(8, "little") + file.read_bytes()[8:])


def tensor_of_nearly_all_memory(place: Place) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    file = place.home / "models" / "letters" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def header_nested_without_end(place: Place) -> None:
    header = b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    file = place.home / "models" / "letters" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def config_nested_without_end(place: Place) -> None:
    (place.home / "models" / "base" / "config.json").write_text('{"a":' * 100_000)


def adapter_config_nested_without_end(place: Place) -> None:
    (as_adapter(place) / "adapter_config.json").write_text("[" * 100_000 + "]" * 100_000)


def pipe(path: Path) -> None:
    """Instead of a file. Who opens it waits for a writer; one comes late, so that the test fails then."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def write() -> None:
        with contextlib.suppress(OSError):  # nobody reads
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    writer = threading.Timer(12.0, write)
    writer.daemon = True
    writer.start()


def weights_that_are_a_pipe(place: Place) -> None:
    pipe(emptied(place.home / "models" / "digits") / "model.safetensors")


def expert_that_is_a_pipe(place: Place) -> None:
    pipe(place.home / "models" / "pipe.safetensors")
    place.spec["experts"]["digits"] = str(place.home / "models" / "pipe.safetensors")


def config_that_is_a_pipe(place: Place) -> None:
    pipe(place.home / "models" / "digits" / "config.json")


def examples_that_are_a_pipe(place: Place) -> None:
    pipe(place.home / "models" / "digits.safetensors")


def config_that_is_a_folder(place: Place) -> None:
    file = place.home / "models" / "digits" / "config.json"
    file.unlink()
    file.mkdir()


def adapter_whose_pattern_takes_for_ever(place: Place) -> None:
    file = as_adapter(place) / "adapter_config.json"
    slow = {"rank_pattern": {"(([a-z_.0-9])+)+X": 3}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **slow}))


ATTACKS: dict[Callable[[Place], None], str] = {  # the attack, and what the error says
    pickled_expert: "holds code",
    pickled_base: "holds code",
    pickled_in_the_older_format: "holds code",
    bare_pickle: "holds code",
    pickle_named_safetensors: "pickled torch file",
    torchscript_program: "TorchScript program",
    pickled_adapter: "holds code",
    pickled_adapter_named_safetensors: "pickled torch file",
    pickled_examples: "pickle or archive",
    pickled_array_of_examples: "pickle or archive",
    pickled_picture: "one.png",
    pickled_head: "pickle or archive",
    pickled_merged_model: "holds code",
    code_named_by_the_config: "cannot be used",
    data_set_that_is_a_program: "rows",
    index_that_climbs_out: "not a file of this folder",
    index_with_an_absolute_path: "not a file of this folder",
    weights_linked_out: "leads out of the checkpoint",
    tokenizer_linked_out: "leads out of the checkpoint",
    adapter_linked_out: "leads out of the checkpoint",
    adapter_config_linked_out: "leads out of the checkpoint",
    task_named_as_a_path: "not a usable name",
    task_named_as_an_absolute_path: "not a usable name",
    header_of_nearly_all_memory: "cannot be",
    tensor_of_nearly_all_memory: "truncated",
    header_nested_without_end: "nested too deeply",
    config_nested_without_end: "config.json",
    adapter_config_nested_without_end: "adapter_config.json",
    adapter_whose_pattern_takes_for_ever: "pattern",
    weights_that_are_a_pipe: "digits",
    expert_that_is_a_pipe: "neither a file nor a folder",
    config_that_is_a_pipe: "config.json is not a file",
    examples_that_are_a_pipe: "digits.safetensors",
    config_that_is_a_folder: "config.json is not a file",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_input_made_to_do_harm_is_refused(place: Place, attack: Callable[[Place], None]) -> None:
    attack(place)
    start = time.monotonic()

    with pytest.raises(MergingError) as error:
        place.run()

    said = str(error.value)
    assert ATTACKS[attack] in said
    assert "Traceback" not in said
    assert len(said) < 4000
    assert time.monotonic() - start < 10
    assert not (place.out / "merged").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: !!python/object/apply:os.mkdir [TRACE]\n", "line 1"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(8)
            ),
            "too large",
        ),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
    ids=["python object", "anchors that blow up", "nested without end"],
)
def test_a_spec_made_to_do_harm_is_refused(place: Place, text: str, said: str) -> None:
    file = place.home / "spec.yaml"
    file.write_text(text.replace("TRACE", str(place.trace)))

    with pytest.raises(MergingError, match=said):
        Pipeline.from_spec(file)


def test_a_tokenizer_that_names_code_is_refused(place: Place) -> None:
    folder = place.home / "models" / "texts"
    saved(folder, "llama", TASKS)
    base = folder / "base"
    (base / "evil.py").write_text(f"import os; os.mkdir({str(place.trace)!r})\n")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    named = {"AutoTokenizer": ["evil.Tokenizer", None]}
    changed = {**settings, "tokenizer_class": "EvilTokenizer", "auto_map": named}
    (base / "tokenizer_config.json").write_text(json.dumps(changed))
    (base / "tokenizer.json").unlink()
    rows = written(folder / "rows.jsonl", sentences(4))
    data = {"calibration": {"type": "text", "path": str(rows), "input": "text"}}
    place.spec.update(
        base=str(base),
        experts={task: str(folder / task) for task in TASKS},
        tasks=dict.fromkeys(TASKS, data),
    )

    with pytest.raises(MergingError, match="tokenizer"):
        place.run()


@pytest.mark.parametrize("kind", ["hashes", "opened", "block"])
def test_what_was_remembered_is_never_unpickled(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Spoilt memory counts for nothing: the run does everything anew."""
    cache = place.home / "models" / "cache"
    monkeypatch.setenv("MERGING_CACHE", str(cache))
    place.run()
    whole = (place.out / "merged" / "model.safetensors").read_bytes()
    shutil.rmtree(place.out / "merged")
    if kind == "block":
        spoilt = [place.out / ".merging" / "begun" / "merge" / "block-00000.safetensors"]
    else:
        spoilt = [cache / "hashes.json", *(cache / "opened").glob("*.json")]
    for file in spoilt:
        file.parent.mkdir(parents=True, exist_ok=True)
        pickled(file, place.trace)

    place.run()

    assert (place.out / "merged" / "model.safetensors").read_bytes() == whole


def _owned_by_name(out: Path, victim: Path) -> None:
    state = out / ".merging" / "state.json"
    found = json.loads(state.read_text())
    state.write_text(json.dumps({**found, "owned": [*found["owned"], "../victim/secret.txt"]}))


def _listed_by_name(out: Path, victim: Path) -> None:
    manifest = out / "merged" / "manifest.json"
    found = json.loads(manifest.read_text())
    listed = {**found["files"], "../../victim/secret.txt": len(SECRET)}
    manifest.write_text(json.dumps({**found, "files": listed}))


def _listed_through_a_link(out: Path, victim: Path) -> None:
    (out / "merged" / "sub").symlink_to(victim)
    manifest = out / "merged" / "manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "files": {**found["files"], "sub/secret.txt": len(SECRET)}}))


def _owned_through_a_link(out: Path, victim: Path) -> None:
    (out / "heads").symlink_to(victim)
    state = out / ".merging" / "state.json"
    found = json.loads(state.read_text())
    state.write_text(json.dumps({**found, "owned": [*found["owned"], "heads/secret.txt"]}))


def _result_linked_out(out: Path, victim: Path) -> None:
    shutil.rmtree(out / "merged")
    (out / "merged").symlink_to(victim)


def _scratch_linked_out(out: Path, victim: Path) -> None:
    shutil.rmtree(out / ".merging" / "work", ignore_errors=True)
    (out / ".merging" / "work").symlink_to(victim)


def _resume_linked_out(out: Path, victim: Path) -> None:
    shutil.rmtree(out / ".merging" / "begun", ignore_errors=True)
    (out / ".merging" / "begun").symlink_to(victim)


def _half_made_linked_out(out: Path, victim: Path) -> None:
    hidden = out / ".merged.partial-0123abcd"
    hidden.mkdir()
    (hidden / "lock").touch()
    (hidden / "content").symlink_to(victim)


def _half_replaced_linked_out(out: Path, victim: Path) -> None:
    hidden = out / ".merged.partial-0123abcd"
    (hidden / "content").mkdir(parents=True)
    (hidden / "lock").touch()
    (hidden / "old").symlink_to(victim)
    shutil.rmtree(out / "merged")


def _state_linked_out(out: Path, victim: Path) -> None:
    shutil.rmtree(out / ".merging")
    (out / ".merging").symlink_to(victim)


@pytest.mark.parametrize(
    "spoil",
    [
        _owned_by_name,
        _listed_by_name,
        _listed_through_a_link,
        _owned_through_a_link,
        _result_linked_out,
        _scratch_linked_out,
        _resume_linked_out,
        _half_made_linked_out,
        _half_replaced_linked_out,
        _state_linked_out,
    ],
    ids=lambda spoil: spoil.__name__.strip("_"),
)
def test_a_results_folder_made_to_do_harm_leaves_the_rest_of_the_disk_alone(
    place: Place, spoil: Callable[[Path, Path], None]
) -> None:
    """The next run, which replaces its results, works or is refused; what lies outside is checked above."""
    place.run()
    spoil(place.out, place.victim)
    place.spec["merge"] = {"type": "regmean", "shrink": 0.5}

    refusal = None
    try:
        place.run(overwrite=True)
    except MergingError as error:
        refusal = str(error)

    if refusal is None:
        assert load_file(place.out / "merged" / "model.safetensors")
    else:
        assert str(place.out) in refusal or "output folder" in refusal


def test_markup_in_names_is_shown_as_text(place: Place) -> None:
    bad = "<img src=x onerror=alert(1)>"
    for part in ("experts", "tasks"):
        place.spec[part][bad] = place.spec[part].pop("letters")
    moved = place.home / "models" / bad
    shutil.move(place.home / "models" / "letters", moved)
    place.spec["experts"][bad] = str(moved)
    place.spec["tasks"][bad]["head"] = {
        "type": "linear",
        "path": str(place.home / "models" / "letters-head.safetensors"),
    }
    place.spec["calibrate"] = {"type": "featcal"}

    place.run()

    shown = [*place.out.rglob("*.md"), *place.out.rglob("*.html"), *place.out.rglob("*.svg")]
    assert len(shown) >= 2
    assert not [file for file in shown if "<img" in _outside_code(file.read_text(encoding="utf-8"))]


def _outside_code(text: str) -> str:
    """Markdown without its fenced blocks, in which markup is text."""
    return "".join(text.split("```")[::2])
