"""Writing checkpoints as their tensors come: the same bytes as save_file, or nothing at all."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError, NumericalError, OutputError


@pytest.fixture
def base(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def copy(source, sink):
    with sink:
        for name in source.names():
            sink.write(name, source.read(name))


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_copy_has_the_bytes_of_the_base(base, tmp_path):
    source = open_checkpoint(base)
    copy(source, SafetensorsSink(tmp_path / "out", source, side_files_from=base))
    assert names_in(tmp_path / "out") == {*names_in(base), "manifest.json"}
    for name in names_in(base):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert hidden(tmp_path) == []


def test_any_mixture_of_dtypes_has_the_bytes_of_save_file(tmp_path):
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.bool,
    ]
    dtypes += [torch.uint8, torch.int16, torch.float8_e4m3fn, torch.complex64, torch.uint16]
    tensors = {
        f"{number % 3}.\u65e5\n{dtype}": torch.ones(number, 3).to(dtype)
        for number, dtype in enumerate(dtypes)
    }
    tensors["scalar"] = torch.tensor(3.0)
    save_file(tensors, tmp_path / "twin.safetensors", metadata={"format": "pt"})
    source = StateDictSource(tensors)
    sink = SafetensorsSink(tmp_path / "out", source, allow_nonfinite=True)
    copy(source, sink)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "twin.safetensors").read_bytes()


def test_rows_may_come_in_any_order_and_from_threads(base, tmp_path):
    source = open_checkpoint(base)
    pieces = []
    for name in source.names():
        rows = (source.spec(name).shape or (0,))[0]
        pieces += [(name, slice(start, start + 5)) for start in range(0, rows, 5)]
    random.Random(0).shuffle(pieces)
    with SafetensorsSink(tmp_path / "out", source) as sink, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda piece: sink.write(piece[0], source.read(*piece), piece[1]), pieces))
    assert (tmp_path / "out/model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_views_and_gradients_are_written_by_value(tmp_path):
    source = StateDictSource({"w": torch.zeros(3, 2), "b": torch.zeros(2)})
    whole = torch.arange(6.0).view(2, 3).requires_grad_()
    with SafetensorsSink(tmp_path / "out", source) as sink:
        sink.write("w", whole.T)
        sink.write("b", torch.ones(1).expand(2))
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["w"], whole.T.detach())
    assert torch.equal(found["b"], torch.ones(2))


def test_the_shards_are_those_of_the_base(tiny, tmp_path):
    base = tmp_path / "base"
    tiny("llama").save_pretrained(base, max_shard_size="20KB")
    source = open_checkpoint(base)
    copy(source, SafetensorsSink(tmp_path / "out", source, side_files_from=base))
    assert names_in(tmp_path / "out") == {*names_in(base), "manifest.json"}
    for file in source.files:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    index = "model.safetensors.index.json"
    assert json.loads((tmp_path / "out" / index).read_text()) == json.loads((base / index).read_text())


def test_a_shard_size_splits_and_from_pretrained_joins(base, tiny, tmp_path):
    source = open_checkpoint(base)
    copy(source, SafetensorsSink(tmp_path / "out", source, shard_size=20_000, side_files_from=base))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(tmp_path / "out" / file).values()) <= 20_000 for file in files)
    assert index["metadata"]["total_size"] == sum(source.spec(name).bytes for name in source.names())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, source.read(name)) for name, tensor in model.state_dict().items())


def test_a_shard_size_that_holds_everything_gives_one_file_and_no_index(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    source = open_checkpoint(tmp_path / "base")
    copy(source, SafetensorsSink(tmp_path / "out", source, shard_size=10**9))
    assert names_in(tmp_path / "out") == {"model.safetensors", "manifest.json"}


def test_another_dtype_is_in_header_index_and_config(base, tmp_path):
    source = open_checkpoint(base)
    sink = SafetensorsSink(
        tmp_path / "out", source, dtype=torch.bfloat16, shard_size=20_000, side_files_from=base
    )
    copy(source, sink)
    found = open_checkpoint(tmp_path / "out")
    assert {found.spec(name).dtype for name in found.names()} == {torch.bfloat16}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(found.spec(name).bytes for name in found.names())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "float16"}),
        ({"dtype": "float32"}, {"dtype": "float16"}),
        ({}, {"dtype": "float16"}),
        (
            {"dtype": None, "text_config": {"dtype": "float32", "n": 1}},
            {"dtype": "float16", "text_config": {"dtype": "float16", "n": 1}},
        ),
    ],
)
def test_whatever_the_config_calls_its_dtype_is_replaced(tmp_path, before, after):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(before))
    source = StateDictSource({"w": torch.ones(2)})
    copy(
        source,
        SafetensorsSink(tmp_path / "out", source, dtype=torch.float16, side_files_from=tmp_path / "base"),
    )
    assert json.loads((tmp_path / "out/config.json").read_text()) == after


def test_integers_and_bools_keep_their_dtype(tmp_path):
    source = StateDictSource(
        {"w": torch.ones(2), "num_batches_tracked": torch.tensor(5), "mask": torch.tensor([True, False])}
    )
    copy(source, SafetensorsSink(tmp_path / "out", source, dtype=torch.float16))
    found = load_file(tmp_path / "out/model.safetensors")
    assert [found[name].dtype for name in source.names()] == [torch.float16, torch.int64, torch.bool]


def test_side_files_come_along_and_load(base, tmp_path):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")
        ),
        unk_token="<unk>",
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(base)
    transformers.ViTImageProcessor().save_pretrained(base)
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling/config.json").write_text("{}")
    (base / "foo.json").write_text("{}")
    (base / "README.md").write_text("of the base")
    source = open_checkpoint(base)
    sink = SafetensorsSink(tmp_path / "out", source, side_files_from=base, files={"README.md": "ours"})
    copy(source, sink)
    assert sink.copied.unknown == ("foo.json",)
    assert {"chat_template.jinja", "1_Pooling/config.json", "preprocessor_config.json"} <= set(
        sink.copied.known
    )
    assert (tmp_path / "out/README.md").read_text() == "ours"
    assert not (tmp_path / "out/foo.json").exists()
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert reloaded.chat_template == tokenizer.chat_template
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "out").size == {
        "height": 224,
        "width": 224,
    }


def test_a_tied_model_stays_tied(tiny, tmp_path):
    model = tiny("llama_tied")
    model.save_pretrained(tmp_path / "base")
    source = open_checkpoint(tmp_path / "base")
    copy(source, SafetensorsSink(tmp_path / "out", source, side_files_from=tmp_path / "base"))
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "out").names()
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reloaded.config.tie_word_embeddings
    tokens = torch.tensor([[1, 5, 9]])
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)


def test_the_manifest_lists_every_file_with_its_size(base, tmp_path):
    source = open_checkpoint(base)
    sink = SafetensorsSink(tmp_path / "out", source, side_files_from=base)
    sink.add_file("manifest.json", json.dumps({"fingerprint": "f", "seed": 3}))
    sink.add_file("notes/more.md", "text")
    copy(source, sink)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["fingerprint"], manifest["seed"]) == ("f", 3)
    assert set(manifest["files"]) == names_in(tmp_path / "out") - {"manifest.json"}
    assert all((tmp_path / "out" / name).stat().st_size == size for name, size in manifest["files"].items())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "../x", "/x", "", "a/../../b", "model.safetensors.index.json"]
)
def test_additional_files_may_not_be_anything_else(base, tmp_path, name):
    sink = SafetensorsSink(tmp_path / "out", open_checkpoint(base))
    with pytest.raises(OutputError, match="cannot be the name"):
        sink.add_file(name, "")
    sink.abort()


def refused(sink, name, tensor, rows, words):
    with pytest.raises(CheckpointError, match=words):
        sink.write(name, tensor, rows)


def test_wrong_names_shapes_rows_and_kinds_are_refused(tmp_path):
    source = StateDictSource({"w": torch.zeros(4, 2), "n": torch.tensor(1)}, "base")
    sink = SafetensorsSink(tmp_path / "out", source)
    refused(sink, "x", torch.zeros(1), None, '"x" is not a tensor of base')
    refused(sink, "w", torch.zeros(4, 3), None, r'"w" is written as \(4, 3\), the base has \(4, 2\)')
    refused(sink, "w", torch.zeros(2, 2), slice(0, 3), r"the base has \(3, 2\)")
    refused(sink, "w", torch.zeros(2, 2), slice(0, 4, 2), "one after another")
    refused(sink, "n", torch.tensor(1), slice(0, 1), "has no rows")
    refused(sink, "n", torch.tensor(1.0), None, "must not be written as float32")
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_written_once(tmp_path):
    source = StateDictSource({"w": torch.zeros(4, 2)})
    sink = SafetensorsSink(tmp_path / "out", source)
    sink.write("w", torch.zeros(2, 2), slice(1, 3))
    for rows in (slice(0, 2), slice(2, 4), slice(1, 3), slice(0, 4)):
        refused(sink, "w", torch.zeros(rows.stop - rows.start, 2), rows, 'of "w" are written twice')
    sink.abort()


def test_what_was_not_written_is_named_and_nothing_is_left(base, tmp_path):
    source = open_checkpoint(base)
    first, second, *others = source.names()
    sink = SafetensorsSink(tmp_path / "out", source)
    sink.write(second, source.read(second, slice(0, 1)), slice(0, 1))
    for name in others:
        sink.write(name, source.read(name))
    with pytest.raises(
        CheckpointError, match=f"2 tensors were not written in full; first: {first}, {second}"
    ):
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_on_the_way_leaves_nothing(base, tmp_path, error):
    source = open_checkpoint(base)

    def interrupted():
        with SafetensorsSink(tmp_path / "out", source, side_files_from=base) as sink:
            sink.write(source.names()[0], source.read(source.names()[0]))
            raise error

    with pytest.raises(error):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_value_that_is_not_finite_leaves_nothing(base, tmp_path):
    source = open_checkpoint(base)
    name = source.names()[0]
    with pytest.raises(NumericalError, match=f'"{name}"'), SafetensorsSink(tmp_path / "out", source) as sink:
        sink.write(name, source.read(name) * float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_memory_is_one_block(tmp_path):
    shape = (1 << 16, 1 << 10)  # 256 MiB

    class Zeros(StateDictSource):
        def __init__(self):
            super().__init__({"w": torch.zeros(1, device="meta").expand(shape)})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SafetensorsSink(tmp_path / "out", Zeros()) as sink:
        for start in range(0, shape[0], 1 << 10):
            sink.write("w", torch.ones(1 << 10, shape[1]), slice(start, start + (1 << 10)))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 100
    assert (tmp_path / "out/model.safetensors").stat().st_size > 1 << 28


def test_a_model_larger_than_the_disk_is_refused_at_once(tmp_path):
    source = StateDictSource({"w": torch.zeros(1, device="meta").expand(1 << 30, 1 << 24)})
    with pytest.raises(OutputError, match=r"needs 72057\.6 TB, its disk has .* free"):
        SafetensorsSink(tmp_path / "out", source)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_size_is_one_clear_line(tmp_path):
    script = """
import resource, sys, torch
from pathlib import Path
from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.source import StateDictSource
from merging.errors import MergingError
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
try:
    SafetensorsSink(Path(sys.argv[1]), StateDictSource({"w": torch.zeros(2500, 1000)}))
except MergingError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "no room to write" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_refused():
    with pytest.raises(OutputError, match=r"is read-only|nothing can be written"):
        SafetensorsSink(Path("/proc/out"), StateDictSource({"w": torch.zeros(1)}))


def test_a_missing_parent_and_a_file_in_the_way_are_refused(tmp_path):
    source = StateDictSource({"w": torch.zeros(1)})
    with pytest.raises(OutputError, match="is not a folder"):
        SafetensorsSink(tmp_path / "a" / "b", source)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file, expected a folder"):
        SafetensorsSink(tmp_path / "file", source)


def test_a_side_file_may_not_be_a_link_out_of_the_base(base, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (base / "tokenizer.json").symlink_to("../secret")
    with pytest.raises(CheckpointError, match="link that leads out"):
        SafetensorsSink(tmp_path / "out", open_checkpoint(base), side_files_from=base)
    assert hidden(tmp_path) == []
