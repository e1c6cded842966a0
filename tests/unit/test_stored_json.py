"""JSON from storage: one reader, and one error for all that may be wrong with a file. No Ray."""

import os
import pathlib
import re

import pyarrow.fs
import pytest

import raytf
from raytf.errors import ConfigError
from raytf.storage import lock_file, stored_json
from raytf.storage.lock_file import StoredFile, _owner_in
from raytf.storage.run_lock import RunLock
from raytf.tune import report

# They read what a user typed, what Ray's store or TF_CONFIG holds, what this process has just written, or what the two
# sides of a snapshot send each other.
OTHERS = {"chief_callbacks", "cli", "config_keys", "progress", "launcher", "bootstrap", "strategy", "keras_trainer"}
OTHERS |= {"model_file", "snapshots", "snapshot_writer", "testing", "runner", "verification"}
WRONG = {
    "empty": (b"", "is empty"),
    "half": (b'{"a', "is no JSON"),
    "no UTF-8": (b'{"a": "\xff\x80"}', "is no JSON"),
    "deep": (b"[" * 100_000, "is no JSON"),
    "a list": (b"[1]", "is not an object"),
}


def test_nothing_else_reads_json_of_a_file():
    reads = re.compile(r"\bjson\.loads?\(|from json import|import json as")
    found = {p.stem for p in pathlib.Path(raytf.__file__).parent.rglob("*.py") if reads.search(p.read_text())}
    assert found - OTHERS == {"stored_json"}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_one_error(tmp_path, name):
    content, why = WRONG[name]
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(stored_json.UnreadableError, match=why) as error:
        stored_json.read_object(pyarrow.fs.LocalFileSystem(), str(path))
    assert not error.value.missing


def test_missing_is_distinguished_from_no_file(tmp_path):
    filesystem = pyarrow.fs.LocalFileSystem()
    for path, missing, why in ((tmp_path / "none", True, "is missing"), (tmp_path, False, "is not a file")):
        with pytest.raises(stored_json.UnreadableError, match=why) as error:
            stored_json.read_object(filesystem, str(path))
        assert error.value.missing is missing


@pytest.mark.parametrize("name", WRONG)
def test_a_lock_of_such_bytes_names_nobody_and_lapses(tmp_path, name, monkeypatch):
    monkeypatch.setattr(lock_file, "SETTLE_INTERVAL", 0.05)
    filesystem = pyarrow.fs.LocalFileSystem()
    lock = tmp_path / "run.lock"
    lock.write_bytes(WRONG[name][0])
    assert _owner_in(StoredFile(filesystem, str(lock), "me").read()) == {}
    with pytest.raises(ConfigError, match="held by an unknown driver"):
        RunLock(filesystem, str(tmp_path)).acquire()
    old = os.stat(lock).st_mtime - 500
    os.utime(lock, (old, old))
    with RunLock(filesystem, str(tmp_path)):
        assert b"machine" in lock.read_bytes()


@pytest.mark.parametrize("name", WRONG)
def test_unreadable_files_of_a_sweep_are_reported(tmp_path, name):
    (tmp_path / "sweep.json").write_bytes(WRONG[name][0])
    with pytest.raises(ConfigError, match="sweep.json"):
        report.read_settings(tmp_path)
    (tmp_path / "experiment_state-1.json").write_bytes(WRONG[name][0])
    with pytest.raises(ConfigError, match="experiment_state-1.json"):
        report.read_entries(tmp_path, "loss")
