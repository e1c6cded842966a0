"""A run that is killed within an epoch, and a run that is started again there, resume at the next step."""

from __future__ import annotations

import csv
import json
import os

import numpy as np
import pytest

import raytf
from tests.cluster import models
from tests.cluster.test_trainer import assert_equal, trainer
from tests.logged import warnings_logged

pytestmark = pytest.mark.usefixtures("ray_cluster")


def noted(config):
    """Each worker's batches, as (epoch, batch), and an error at one of them."""
    import keras

    return [
        models.note_steps(config["notes"], config.get("fail")),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=10),
        keras.callbacks.CSVLogger(config["csv"]),
    ]


def batches(notes, rank):
    """[(epoch, batch), ...] of each process of a rank, in the order in which they came."""
    found = {}
    for line in (notes / f"{rank}.json").read_text().splitlines():
        pid, *place = json.loads(line)
        found.setdefault(pid, []).append(tuple(place))
    return list(found.values())


def divided(config):
    """A model that counts as large: both workers write its checkpoints, each a part."""
    from raytf.worker import writers

    writers.LEAST_BYTES, writers.FEWEST = 1, 2
    return models.accumulating(config)


def filtered():
    """97 rows of 120, whose number is known after an execution only."""
    least = float(np.sort(models.rows(120)["x5"])[23])
    return models.dataset(120).filter(lambda row: row["x5"] >= least)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_and_a_new_start_within_epochs_change_nothing(tmp_path):
    """97 rows, filtered and streamed, in batches of 7 are 14 steps, of which 3 make an execution, and 4 an update. Rank
    1 dies in a step of the second epoch; the run fails in the third; its last checkpoint is cut off; it is started
    again."""

    def run(name, **config):
        notes = tmp_path / f"{name}_notes"
        notes.mkdir(exist_ok=True)
        inside = {"marker": str(tmp_path / f"{name}_killed"), "rank_": 1, "step": 19}
        arguments = {"batch_size": 7, "notes": str(notes), "csv": str(tmp_path / f"{name}.csv"), "inside": inside}
        made = trainer(
            tmp_path,
            name=name,
            config=arguments | config,
            callbacks=noted,
            build=divided,
            datasets={"train": filtered(), "validation": models.dataset(41, 1)},
            failures=1,
            steps_per_execution=3,
            materialize={"train": False, "validation": True},
            window=21,
            checkpoint_every="2 steps",
        )
        return made, notes

    (tmp_path / "quiet_killed").touch()
    quiet, _ = run("quiet")
    expected = quiet.fit()
    broken, notes = run("broken", fail=[2, 9])
    with pytest.raises(raytf.TrainingError, match="on purpose"):
        broken.fit()
    assert (tmp_path / "broken_killed").exists()
    steps = sorted(path.name for path in (tmp_path / "broken").glob("step_*"))
    assert steps[-1] == "step_000000000037" and len(steps) == 2
    first, second = batches(notes, 1)
    assert first[-1] == (1, 3), "it was inside this execution"
    assert second[0] == (1, 3), "which is made again, and nothing before it"
    assert second[-1] == (2, 9)
    parts = sorted(path.name for path in (tmp_path / "broken" / steps[-1]).glob("model.keras*"))
    assert [name[:16] for name in parts] == [f"model.keras.{i:04d}" for i in range(3)], "of two workers, and the end"
    os.truncate(tmp_path / "broken" / steps[-1] / parts[1], 1000)
    # of those that come faster than they are written some are left out, so the end of an epoch may be the newest
    step, newest = max(
        (json.loads((path / "state.json").read_text())["step"], path.name)
        for path in (tmp_path / "broken").iterdir()
        if (path / "state.json").exists() and path.name != steps[-1]
    )
    again, _ = run("broken")
    with warnings_logged(f"Damaged: {steps[-1]}.*Using the checkpoint {newest} instead"):
        result = again.fit()
    assert batches(notes, 1)[-1][0] == divmod(step, 14)
    assert_equal(result, expected, 0)
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3]
    for left, right in zip(*(raytf.load_model(r).optimizer.variables for r in (result, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    rows = [list(csv.DictReader((tmp_path / f"{name}.csv").open(newline=""))) for name in ("broken", "quiet")]
    assert [row["epoch"] for row in rows[0]] == ["0", "1", "2"]
    for left, right in zip(*rows, strict=True):
        np.testing.assert_allclose([float(v) for v in left.values()], [float(v) for v in right.values()], atol=1e-6)
