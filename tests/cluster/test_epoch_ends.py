"""The checkpoint of an epoch's end is written during the next epoch, and found where its worker died meanwhile."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import fsspec.implementations.local
import pyarrow.fs
import pytest
import ray.train

from tests.cluster import models
from tests.cluster.test_trainer import trainer

_WAIT_SECONDS = 120.0


def wait_for_file(path: pathlib.Path, otherwise: str) -> None:
    """Blocks until a file exists; raises the given error after a deadline."""
    until = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(otherwise)
        time.sleep(0.01)


class Gated(fsspec.implementations.local.LocalFileSystem):
    """Writes no model before a file is there."""

    def __init__(self, gate: str):
        super().__init__()
        self.gate = pathlib.Path(gate)

    def _open(self, path, mode="rb", **options):
        if "w" in mode and path.endswith("model.keras"):
            wait_for_file(self.gate, "the training waits for this storage")
        return super()._open(path, mode, **options)


def dying(config):
    """Notes the chief's steps. In the second epoch it opens the gate, and dies."""
    import keras

    class Note(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if models.rank() != 0:
                return
            with open(config["notes"], "a") as file:
                file.write(json.dumps([self.epoch, batch]) + "\n")
            if (self.epoch, batch) == (1, 5) and not os.path.exists(config["gate"]):
                pathlib.Path(config["gate"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return [Note()]


class Slow(ray.train.UserCallback):
    """As one that sends each report away, and whose first one takes until the training has ended; notes when."""

    def __init__(self, ended: str, times: str):
        self.ended, self.times = pathlib.Path(ended), times

    def after_report(self, run_context, metrics, checkpoint):
        wait_for_file(self.ended, "the training waits for Ray Train's controller")
        with open(self.times, "a") as file:
            file.write(f"{time.monotonic()}\n")


def noting_the_end(config):
    import keras

    class Note(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            if models.rank() == 0:
                pathlib.Path(config["ended"]).touch()

    return [Note()]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_controller_that_takes_no_reports_does_not_hold_the_training_up(tmp_path, monkeypatch):
    """Ray Train's queue of reports holds one; its controller may wait for its storage, or a processor, too.

    Then it takes one soon after the other, though it polls every 4 s.
    """
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "4")
    ended, times = str(tmp_path / "ended"), str(tmp_path / "times")
    config, slow = {"epochs": 6, "ended": ended}, [Slow(ended, times)]
    result = trainer(tmp_path, config=config, callbacks=noting_the_end, keep=2, run_callbacks=slow).fit()
    first, *_, last = map(float, pathlib.Path(times).read_text().split())
    assert last - first < 4 * 4, "five polls"
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "run").glob("checkpoint_*/"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_epoch_checkpoint_is_written_during_the_next_epoch_and_outlives_its_worker(tmp_path):
    """14 steps an epoch. The storage takes the first epoch's checkpoint when the second has made five steps, in which
    the chief dies before it can report it. The run resumes from it, and lists it; so does one that is started again
    after Ray's list has lost the last."""
    files = {"gate": str(tmp_path / "gate"), "notes": str(tmp_path / "notes")}

    def run():
        storage = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Gated(files["gate"])))
        return trainer(
            tmp_path,
            name="run",
            config={"batch_size": 7, **files},
            callbacks=dying,
            failures=1,
            checkpoint_every="epoch",
            storage_filesystem=storage,
        ).fit()

    result = run()
    steps = [tuple(json.loads(line)) for line in (tmp_path / "notes").read_text().splitlines()]
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    assert steps == [*everything[:20], *everything[14:]]
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3]
    path = tmp_path / "run" / "checkpoint_manager_snapshot.json"
    listed = json.loads(path.read_text())
    listed["checkpoint_results"].pop()
    listed["checkpoint_report_indices"].pop()
    listed["latest_checkpoint_result"] = listed["checkpoint_results"][-1]
    path.write_text(json.dumps(listed))
    again = run()
    assert len((tmp_path / "notes").read_text().splitlines()) == len(steps), "nothing was left to do"
    assert list(again.metrics_dataframe["epoch"]) == [1, 2, 3]
    assert again.checkpoint.path == result.checkpoint.path
