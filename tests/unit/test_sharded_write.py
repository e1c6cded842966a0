"""A large model's file is written in parts by several workers, and is read as one file. No Ray."""

import errno
import functools
import json
import os
import subprocess
import threading

import numpy as np
import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raytf
from raytf.storage import checkpoint_files, gather_io, sharded_write
from raytf.storage.checkpoint_files import MODEL, CheckpointState, DamagedCheckpointError
from raytf.storage.file_template import FileTemplate, ZipTemplate
from raytf.storage.snapshot_store import SnapshotStore
from raytf.storage.step_folders import finished_folders, folder_name
from raytf.worker import checkpoint
from raytf.worker.checkpoint_saver import CheckpointSaver
from tests.unit import object_store
from tests.unit.test_checkpoint import functional, trained
from tests.unit.test_snapshots import files_of, is_gone
from tests.waiting import until

LOCAL = pyarrow.fs.LocalFileSystem()


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_the_ranges_in_order_are_the_file(data):
    """Arrays at any places, cut anywhere, also in the middle of a number."""
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=6))
    at, places = 0, []
    for gap, size in sizes:
        places.append((at + gap, size))
        at += gap + size
    content = bytes(data.draw(st.integers(1, 255)) for _ in range(at + data.draw(st.integers(1, 9))))
    values = [np.arange(size, dtype=np.uint8) for _, size in places]
    expected = bytearray(content)
    for (begin, size), value in zip(places, values, strict=True):
        expected[begin : begin + size] = value.tobytes()
    archive, count = ZipTemplate([], FileTemplate.from_content(content, places), values), data.draw(st.integers(1, 7))
    assert b"".join(map(bytes, archive.template.pieces(values))) == expected
    found = b""
    for index in range(count):
        piece = sharded_write.RangeCutter(index, count).piece(archive)
        part = b"".join(map(bytes, piece.template.pieces(piece.values)))
        assert len(part) == piece.template.size
        found += part
    assert found == expected
    assert sharded_write.layout_checksum(FileTemplate.from_content(content, places)) == sharded_write.layout_checksum(
        FileTemplate.from_content(bytes(expected), places)
    )


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), st.integers(1, 6))
def test_the_parts_in_order_are_the_file_and_so_are_their_names(pieces, count):
    parts = sharded_write.split_file(pieces, count)
    assert len(parts) == count + 1
    assert b"".join(bytes(piece) for part in parts for piece in part) == b"".join(pieces)
    names = [sharded_write.part_name(MODEL, i, part) for i, part in enumerate(parts)]
    assert sorted(names) == names and len(set(names)) == len(names)


files_of = functools.cache(files_of)  # a zip contains the second in which it was made


def parts_of(step: int, count: int) -> list[list]:
    return sharded_write.split_file(files_of(step)[MODEL], count)


def check(filesystem, run, step: int, count: int, tmp_path) -> None:
    """Fails unless the checkpoint of a step is whole, in parts, and one file when these are put together."""
    name = folder_name(step)
    assert checkpoint_files.check_stored(filesystem, f"{run}/{name}").step == step
    assert (step, name) in finished_folders(filesystem, str(run))
    target = tmp_path / f"read_{step}" / name
    target.mkdir(parents=True)
    pyarrow.fs.copy_files(f"{run}/{name}", str(target), source_filesystem=filesystem, destination_filesystem=LOCAL)
    checkpoint_files.check_folder(str(target))
    names = sorted(one for one in os.listdir(target) if one.startswith(f"{MODEL}."))
    assert len(names) == count + 1 and MODEL not in os.listdir(target)
    joined = subprocess.run(f"cat {MODEL}.*", shell=True, cwd=target, capture_output=True, check=True).stdout
    assert joined == b"".join(map(bytes, files_of(step)[MODEL]))
    with checkpoint_files.whole_folder(str(target)) as whole:
        with open(os.path.join(whole, MODEL), "rb") as file:
            assert file.read() == joined
        assert checkpoint_files.read_state(whole).step == step


@pytest.fixture(params=["a disk", "S3"])
def place(request, tmp_path):
    """(file system, run's folder)."""
    if request.param == "a disk":
        yield LOCAL, str(tmp_path / "run")
        return
    with object_store.serving() as made:
        yield made.filesystem(), f"{object_store.BUCKET}/run"


@pytest.mark.slow
def test_three_workers_write_one_checkpoint(place, tmp_path):
    filesystem, run = place
    chief, others = SnapshotStore(filesystem, run), [SnapshotStore(filesystem, run) for _ in range(2)]
    for step in (1, 2):
        threads = [
            threading.Timer(0.3 * i, store.put_part, (folder_name(step), MODEL, i, parts_of(step, 3)[i]))
            for i, store in enumerate(others, 1)
        ]
        for thread in threads:
            thread.start()
        written = chief.put(folder_name(step), files_of(step), 3)
        for thread in threads:
            thread.join()
        assert written.late_workers == written.others == []
        assert written.bytes < 0.5 * gather_io.total_size(files_of(step)[MODEL])
        check(filesystem, run, step, 3, tmp_path)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        assert sorted(os.listdir(run)) == [folder_name(1), folder_name(2)]


def test_what_does_not_come_or_is_another_ones_the_chief_writes_itself(place, tmp_path, set_timeouts):
    set_timeouts(checkpoint_parts=0.3)
    filesystem, run = place
    chief, other = (SnapshotStore(filesystem, run) for _ in range(2))
    other.put_part(folder_name(5), MODEL, 1, parts_of(4, 3)[1])
    written = chief.put(folder_name(5), files_of(5), 3)
    assert (written.late_workers, written.others) == ([1, 2], [1])
    check(filesystem, run, 5, 3, tmp_path)


def test_a_whole_model_that_an_earlier_attempt_left_is_not_read(tmp_path, set_timeouts):
    """As on an object store, where the folder of an attempt is the checkpoint's, which others may write into."""
    set_timeouts(checkpoint_parts=0.0)
    SnapshotStore(LOCAL, str(tmp_path)).put(folder_name(1), files_of(1), 2)
    (tmp_path / folder_name(1) / MODEL).write_bytes(b"older")
    checkpoint_files.check_folder(str(tmp_path / folder_name(1)))
    with checkpoint_files.whole_folder(str(tmp_path / folder_name(1))) as whole:
        with open(os.path.join(whole, MODEL), "rb") as file:
            assert file.read() == b"".join(map(bytes, files_of(1)[MODEL]))


def test_a_part_that_cannot_be_written_takes_no_room(tmp_path):
    store, name = SnapshotStore(LOCAL, str(tmp_path)), folder_name(1)
    store.fails = [errno.ENOSPC]
    with pytest.raises(OSError, match="No space left"):
        store.put_part(name, MODEL, 1, parts_of(1, 2)[1])
    assert os.listdir(tmp_path / f".parts_{name}") == []
    store.put_part(name, MODEL, 1, parts_of(1, 2)[1])
    assert len(os.listdir(tmp_path / f".parts_{name}")) == 1


@pytest.mark.parametrize("damage", ["missing", "cut off", "a manifest that climbs out", "a manifest without them"])
def test_a_part_that_is_not_what_was_written_is_named(tmp_path, set_timeouts, damage):
    set_timeouts(checkpoint_parts=0.0)
    SnapshotStore(LOCAL, str(tmp_path)).put(folder_name(1), files_of(1), 2)
    folder = tmp_path / folder_name(1)
    part = sorted(folder.glob(f"{MODEL}.0001-*"))[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    if damage == "missing":
        part.unlink()
    elif damage == "cut off":
        os.truncate(part, 10)
    else:
        names = [f"../{part.name}"] if "climbs" in damage else [1]
        manifest["joined"] = {MODEL: names}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    expected = part.name if damage in ("missing", "cut off") else "manifest.json does not name"
    for read in (checkpoint_files.check_folder, lambda path: checkpoint_files.check_stored(LOCAL, path)):
        with pytest.raises(DamagedCheckpointError, match=expected):
            read(str(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:keras")
def test_two_workers_save_a_model_that_is_loaded_and_resumed_from(tmp_path):
    """Each from its own copy of the weights, in processes of their own; the optimizer's are in it."""
    run = tmp_path / "run"
    model, x = trained(functional)
    chief, other = (CheckpointSaver(LOCAL, str(run)) for _ in range(2))
    assert chief.layout(model) == other.layout(model)
    for step in (3, 6):
        model.fit(x, x[:, :1], epochs=1, batch_size=8, shuffle=False, verbose=0)
        state = CheckpointState(1, step, 7, False, [{"epoch": 1}], epoch_step=2)
        other.save_part(folder_name(step), model, 1, 2)
        chief.save_async(
            folder_name(step),
            model,
            checkpoint.checkpoint_parts(model, state, build=(functional, {}, ((3,), "float32"))),
            2,
        )
        for keeper in (other, chief):
            keeper._writer.finish(60.0)
    assert not chief.writes_all_parts() and not chief._writer._logged
    pids = [chief._writer.pid, other._writer.pid]
    for keeper in (chief, other):
        keeper.close()
    until(lambda: all(map(is_gone, pids)))
    folder = str(run / folder_name(6))
    assert MODEL not in os.listdir(folder)
    checkpoint_files.check_folder(folder)
    second, _ = trained(functional, steps=1)
    checkpoint.restore(folder, second)
    loaded = raytf.load_model(folder)
    for its in (second, loaded, raytf.load_model(str(run), which=6)):
        pairs = zip([*model.weights, *model.optimizer.variables], [*its.weights, *its.optimizer.variables], strict=True)
        for a, b in pairs:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
