"""Hashes of files are those of their content, and each file is read once."""

from __future__ import annotations

import hashlib
import os

import pytest

from merging.checkpoints import hashing
from merging.checkpoints.hashing import FileHashes, hashes


@pytest.fixture(autouse=True)
def nothing_is_fresh(monkeypatch):
    monkeypatch.setattr(hashing, "_FRESH", -1e9)


def a_file(path, content):
    path.write_bytes(content)
    return path


def test_the_hash_is_that_of_the_content(tmp_path):
    content = os.urandom(10_000_000)
    path = a_file(tmp_path / "x", content)
    assert FileHashes(tmp_path / "memory").of(path) == hashlib.sha256(content).hexdigest()
    assert hashes([path]) == {str(path): hashlib.sha256(content).hexdigest()}


def test_a_known_file_is_not_read_again_by_the_next_run(tmp_path, monkeypatch):
    path = a_file(tmp_path / "x", b"content")
    first = FileHashes(tmp_path / "memory")
    digest = first.of(path)
    first.save()
    monkeypatch.setattr(hashing, "_digest", lambda file: pytest.fail("it is read again"))
    assert FileHashes(tmp_path / "memory").of(path) == digest


def test_a_changed_file_is_read_again_though_size_and_time_of_change_are_the_same(tmp_path):
    path = a_file(tmp_path / "x", b"content")
    known = FileHashes(tmp_path / "memory")
    before, status = known.of(path), path.stat()
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert known.of(path) != before


def test_a_file_changed_just_now_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "_FRESH", 2.0)
    known = FileHashes(tmp_path / "memory")
    known.of(a_file(tmp_path / "x", b"content"))
    known.save()
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("spoilt", [b"", b"[1]", b'{"a": 1}', b"[" * 100_000, b"\xff"])
def test_a_spoilt_memory_is_forgotten(tmp_path, spoilt):
    memory = a_file(tmp_path / "memory", spoilt)
    path = a_file(tmp_path / "x", b"content")
    known = FileHashes(memory)
    assert known.of(path) == hashlib.sha256(b"content").hexdigest()
    known.save()
    assert known.of(path) in memory.read_text()


def test_what_another_process_saved_meanwhile_is_kept(tmp_path):
    one, other = FileHashes(tmp_path / "memory"), FileHashes(tmp_path / "memory")
    one.of(a_file(tmp_path / "x", b"1"))
    other.of(a_file(tmp_path / "y", b"2"))
    one.save()
    other.save()
    text = (tmp_path / "memory").read_text()
    assert hashlib.sha256(b"1").hexdigest() in text
    assert hashlib.sha256(b"2").hexdigest() in text


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    known = FileHashes(tmp_path / "file" / "memory")
    known.of(a_file(tmp_path / "x", b"1"))
    known.save()


def test_blobs_of_the_hubs_cache_are_not_believed_by_name(tmp_path):
    claimed = hashlib.sha256(b"something else").hexdigest()
    a_file(tmp_path / claimed, b"content")
    (tmp_path / "model.safetensors").symlink_to(claimed)
    found = FileHashes(tmp_path / "memory").of(tmp_path / "model.safetensors")
    assert found == hashlib.sha256(b"content").hexdigest()
