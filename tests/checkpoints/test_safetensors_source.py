"""Reading safetensors: lazily, by one rule, and with a clear answer for every kind of damage."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from merging.checkpoints.header import write_header
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.source import TensorSpec
from merging.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(12.0).view(4, 3),
    "b.bias": torch.arange(5, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "none": torch.zeros(0, 3),
    "\u65e5\u672c": torch.ones(2, 2, dtype=torch.float16),
}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_all_tensors_are_read_as_they_were_stored(folder):
    source = SafetensorsSource(folder)
    assert set(source.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert source.spec(name) == TensorSpec(tuple(tensor.shape), tensor.dtype)
        assert torch.equal(source.read(name), tensor)
    assert source.metadata == {"format": "pt"}
    assert source.files == (folder / "model.safetensors",)
    assert source.notes == ()


def test_a_file_may_be_named_itself(folder):
    assert SafetensorsSource(folder / "model.safetensors").names() == SafetensorsSource(folder).names()


@pytest.mark.parametrize("rows", [slice(0, 2), slice(1, 4), slice(3, 99), slice(2, 2), slice(None)])
def test_rows_are_those_of_the_tensor(folder, rows):
    assert torch.equal(SafetensorsSource(folder).read("a.weight", rows), TENSORS["a.weight"][rows])


def test_a_single_number_has_no_rows(folder):
    with pytest.raises(CheckpointError, match="no rows"):
        SafetensorsSource(folder).read("count", slice(0, 1))


def test_what_is_read_belongs_to_the_reader(folder):
    source = SafetensorsSource(folder)
    source.read("a.weight").add_(1)
    assert torch.equal(source.read("a.weight"), TENSORS["a.weight"])


def test_threads_read_the_same_values_and_no_file_stays_open(folder):
    source = SafetensorsSource(folder)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        names = [name for name in TENSORS for _ in range(50)]
        for name, tensor in zip(names, pool.map(source.read, names), strict=True):
            assert torch.equal(tensor, TENSORS[name])
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_the_rows_asked_for_are_read_into_memory(tmp_path):
    save_file({"big": torch.zeros(1 << 20, 16)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("big", slice(5, 6)).untyped_storage().nbytes() == 64


def test_an_unknown_name_is_an_error_that_names_the_model(folder):
    source = SafetensorsSource(folder, 'expert "mnist"')
    for ask in (source.spec, source.read, source.shard):
        with pytest.raises(CheckpointError, match='expert "mnist" has no tensor "q"'):
            ask("q")


def test_shards_are_found_by_the_index(tiny, tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    source = SafetensorsSource(tmp_path)
    assert len(source.files) > 1
    assert {source.shard(name) for name in source.names()} == {file.name for file in source.files}
    assert all(torch.equal(source.read(name), tensor) for name, tensor in model.state_dict().items())


def test_stale_copies_are_ignored_and_said_to_be_once(folder):
    torch.save(
        {name: tensor + 1 for name, tensor in TENSORS.items() if name != "mask"}, folder / "pytorch_model.bin"
    )
    save_file({"stray": torch.ones(1)}, folder / "extra.safetensors")
    torch.save({}, folder / "optimizer.pt")
    source = SafetensorsSource(folder)
    assert torch.equal(source.read("a.weight"), TENSORS["a.weight"])
    assert source.files == (folder / "model.safetensors",)
    assert source.ignored == (folder / "extra.safetensors", folder / "pytorch_model.bin")
    assert source.notes == (
        f"{folder}: weights are read from model.safetensors; ignored: extra.safetensors, pytorch_model.bin",
    )


def test_shards_that_the_index_does_not_name_are_ignored(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model-00009-of-00009.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("model.norm.weight").sum() == 32
    assert source.ignored == (tmp_path / "model-00009-of-00009.safetensors",)


def test_tensors_that_the_index_places_elsewhere_are_noted(tmp_path):
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = SafetensorsSource(tmp_path)
    assert source.read("b") == 1
    assert source.notes == ('one.safetensors also holds "b", which the index does not place there',)


@pytest.mark.parametrize(
    "name", ["open_clip_model.safetensors", "diffusion_pytorch_model.safetensors", "mine.safetensors"]
)
def test_a_single_file_of_another_name_is_found(tmp_path, name):
    save_file(TENSORS, tmp_path / name)
    assert SafetensorsSource(tmp_path).files == (tmp_path / name,)


def test_several_files_without_an_index_are_not_guessed_at(tmp_path):
    for name in ("one", "two"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="no index that says which belong together"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-LFS pointer.*lfs pull"),
        (b"GGUF\x03\x00\x00\x00rest of it", "GGUF"),
        (b"PK\x03\x04 rest of an archive", "pickled torch file under a safetensors name"),
        (gzip.compress(b"weights", mtime=0), 'is packed with gzip.*"gunzip"'),
        (bz2.compress(b"weights"), "is packed with bzip2"),
        (lzma.compress(b"weights"), "is packed with xz"),
        (b"\x28\xb5\x2f\xfd" + b"weights", "is packed with zstd"),
        (b"model/".ljust(257, b"\0") + b"ustar\x0000", 'is packed with tar.*"tar -xf"'),
        (b"\x05\x00", "has only 2 bytes"),
        (b"\xff" * 64, "header claims to be 18446744073709551615 bytes"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "header claims to be 200000000 bytes"),
        ((5000).to_bytes(8, "little") + b"{}", "truncated: the header needs 5008 bytes, the file has 10"),
        ((8).to_bytes(8, "little") + b"garbage!", "not valid JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc", "not valid JSON"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "nested too deeply"),
        ((2).to_bytes(8, "little") + b"[]", "a list, not an object"),
    ],
)
def test_each_kind_of_damage_has_its_own_words(tmp_path, content, words):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"(?s)model\.safetensors.*{words}"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (entry(), b"1234", "truncated: the header says 87 bytes, the file has 83|truncated"),
        (entry(), b"123456789", "1 bytes more than its header accounts for"),
        (entry(shape=[3]), b"12345678", "needs 12 bytes, the header gives it 8"),
        (entry(shape=[-2]), b"12345678", r"has shape \[-2\]"),
        (entry(shape=[1 << 63]), b"12345678", "has shape"),
        (entry(shape=[1 << 61, 1 << 61, 0]), b"12345678", "needs 0 bytes"),
        (entry(shape=[1 << 61, 1 << 61]), b"12345678", "needs 21267"),
        (entry(data_offsets=[4, 12]), b"123456789012", "starts at byte"),
        (entry(data_offsets=[8, 0]), b"12345678", "gives it -8"),
        (entry(dtype="F4"), b"12345678", 'tensor "x" has dtype F4, which is unknown or quantised'),
        (entry(dtype=["F32"]), b"12345678", "says nothing usable"),
        ({"x": 3}, b"", "says nothing usable of tensor"),
        ({"__metadata__": {"a": 1}}, b"", "metadata is not a mapping of strings"),
        (b'{"x":1,"x":2}', b"", 'names "x" twice'),
    ],
)
def test_headers_that_contradict_themselves_or_the_file(tmp_path, header, data, words):
    path = with_header(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=words):
        SafetensorsSource(path)


def test_a_zip_archive_under_that_name_is_called_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.safetensors", "w") as archive:
        archive.writestr("model.safetensors", b"weights")
    with pytest.raises(CheckpointError, match=r"is packed with zip[\s\S]*unzip"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("length", [0x8B1F, 0x088B1F])
def test_a_header_as_long_as_the_first_bytes_of_gzip_say_is_one(tmp_path, length):
    text = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).ljust(length).encode()
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + b"1234")

    assert SafetensorsSource(tmp_path).names() == ("x",)


def test_a_file_cut_short_is_found_before_anything_is_read(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="truncated: the header says"):
        SafetensorsSource(folder)


def test_a_file_changed_under_way_is_noticed(folder):
    source = SafetensorsSource(folder)
    save_file({"a.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed while it was being used"):
        source.read("a.weight")


def index(folder, weight_map):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_an_index_of_missing_shards_names_them(folder):
    index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="2 of them missing") as caught:
        SafetensorsSource(folder)
    assert "model-00002-of-00002.safetensors: is not there" in str(caught.value)


def test_an_index_of_tensors_that_are_not_in_their_shard(folder):
    index(folder, {"a.weight": "model.safetensors", "z": "model.safetensors"})
    with pytest.raises(CheckpointError, match=r'(?s)1 tensor that its files do not hold.*has no "z"'):
        SafetensorsSource(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b"])
def test_an_index_may_not_lead_out_of_its_folder(folder, name):
    save_file(TENSORS, folder.parent / "x.safetensors")
    index(folder, {"a.weight": name})
    with pytest.raises(CheckpointError, match="is unsafe"):
        SafetensorsSource(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 50_000]
)
def test_a_damaged_index_is_named(folder, text):
    index(folder, text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        SafetensorsSource(folder)


def test_links_may_lead_to_a_blob_of_the_same_cached_repository(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file(TENSORS, repository / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert set(SafetensorsSource(snapshot).names()) == set(TENSORS)


def test_links_may_not_lead_elsewhere(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "other.safetensors")
    (folder / "model.safetensors").symlink_to("../other.safetensors")
    with pytest.raises(CheckpointError, match="link that leads out of the checkpoint"):
        SafetensorsSource(folder)


def test_a_folder_reached_through_a_link_is_fine(folder, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "my model+1@v2"
    link.symlink_to(folder)
    assert set(SafetensorsSource(link).names()) == set(TENSORS)


@pytest.mark.parametrize("name", ["run+1", "exp@v2", "my model", "\u65e5\u672c", "n" * 200])
def test_any_folder_name_works(tmp_path, name):
    (tmp_path / name).mkdir()
    save_file(TENSORS, tmp_path / name / "model.safetensors")
    assert SafetensorsSource(tmp_path / name).read("count") == 7


def test_headers_are_laid_out_as_safetensors_does(folder):
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}
    header, places = write_header(specs, {"format": "pt"})
    stored = (folder / "model.safetensors").read_bytes()
    assert stored.startswith(header)
    assert places == {name: SafetensorsSource(folder)._place(name)[1] for name in specs}
    assert load_file(folder / "model.safetensors").keys() == specs.keys()
