"""Hashes of files are those of their content, and each file is read once."""

from __future__ import annotations

import hashlib
import json
import os

from merging.checkpoints.hashing import hashes, sha256


def old_file(path, content):
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_the_hash_is_that_of_the_content(tmp_path):
    content = os.urandom(10_000_000)
    path = old_file(tmp_path / "x", content)
    assert sha256(path) == hashlib.sha256(content).hexdigest()
    assert hashes([path]) == {str(path): sha256(path)}


def test_a_known_file_is_not_read_again_and_the_cache_is_fit_for_json(tmp_path):
    path = old_file(tmp_path / "x", b"content")
    cache = {}
    first = sha256(path, cache)
    cache = json.loads(json.dumps(cache))
    assert list(cache.values()) == [first]
    cache = dict.fromkeys(cache, "remembered")
    assert sha256(path, cache) == "remembered"


def test_a_changed_file_is_read_again(tmp_path):
    path = old_file(tmp_path / "x", b"content")
    cache = {}
    first = sha256(path, cache)
    path.write_bytes(b"CONTENT")
    assert sha256(path, cache) != first


def test_a_file_changed_just_now_is_not_remembered(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    cache = {}
    sha256(tmp_path / "x", cache)
    assert cache == {}


def test_blobs_of_the_hubs_cache_are_not_believed_by_name(tmp_path):
    claimed = hashlib.sha256(b"something else").hexdigest()
    old_file(tmp_path / claimed, b"content")
    (tmp_path / "model.safetensors").symlink_to(claimed)
    assert sha256(tmp_path / "model.safetensors") == hashlib.sha256(b"content").hexdigest()
