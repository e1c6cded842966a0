"""A worker that is lost within a step is replaced, while the others keep their processes and continue that step."""

from __future__ import annotations

import collections
import glob
import json
import os
import pathlib
import signal
import time

import pytest

import raytf
from raytf.events import Kind
from raytf.testing import CutOff, FaultPlan, Kill
from tests.cluster import models
from tests.cluster.test_trainer import assert_equal, trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]


def noted(config):
    """Each worker's batches, as (process, epoch, batch), what decides by metrics, and kills."""
    import keras

    class Others(keras.callbacks.Callback):
        """Waits for so many spares before some batches; dies as an epoch begins or ends, after a batch, as a
        validation has ended, and when a checkpoint takes its state (the state that a replacement worker would need is
        noted before). Notes how often it was called at an end."""

        raytf_local_batches = True
        epoch = batch = ends = 0
        asked = ()

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            self.die("at_begin", epoch)

        def on_test_end(self, logs=None):
            self.die("tested", self.epoch)

        def on_train_batch_begin(self, batch, logs=None):
            self.batch, until = batch, time.monotonic() + 60
            while len(glob.glob(f"{config['notes']}/ahead_*")) < config.get("spares", {}).get((self.epoch, batch), 0):
                assert time.monotonic() < until, "no spare makes a step ahead"
                time.sleep(0.02)

        def on_train_batch_end(self, batch, logs=None):
            self.die("behind", self.epoch, batch)

        def on_epoch_end(self, epoch, logs=None):
            self.ends += 1
            with open(f"{config['notes']}/ends_{models.rank()}", "a") as file:
                print(epoch, self.ends, round(float(self.model.optimizer.learning_rate), 9), file=file)
            self.die("at_end", epoch)

        def get_state(self):
            if self.asked == (self.epoch, self.batch):
                self.die("copying", *self.asked)
            self.asked = self.epoch, self.batch
            return self.ends

        def set_state(self, state):
            self.ends = state

        def die(self, what, *place):
            if (models.rank(), *place) == config.get(what) and not os.path.exists(f"{config['notes']}/{what}"):
                pathlib.Path(config["notes"], what).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    plan = FaultPlan.from_json(config["plan"])
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=10)
    log = keras.callbacks.CSVLogger(os.path.join(config["notes"], "log.csv"))
    more = [keras.callbacks.ModelCheckpoint(config["best"], "loss", save_best_only=True)] if "best" in config else []
    return [models.note_steps(config["notes"]), plateau, log, *more, Others(), plan.callback(config["notes"])]


def noting_spares(config):
    """`mlp`, which notes in which processes it is built ahead, and when."""
    from raytf.collectives import recovery_client

    if recovery_client.client.warms_up:
        pathlib.Path(config["notes"], f"ahead_{os.getpid()}").write_text(repr(time.time()))
    return models.mlp(config)


def steps(notes, rank):
    """[(process, epoch, batch), ...] in the order in which they began."""
    return [tuple(json.loads(line)) for line in (notes / f"{rank}.json").read_text().splitlines()]


def run(tmp_path, name, *faults, workers=2, **more):
    """(result, folder of what its workers noted); of 97 rows in batches of 7: 14 steps an epoch, three epochs."""
    notes = tmp_path / f"{name}_notes"
    notes.mkdir()
    config = {"batch_size": 7, "dropout": 0.2, "notes": str(notes), "plan": FaultPlan(faults).to_json()}
    config |= more.pop("config", {})
    more = {"failures": 6, "tensorflow": {"heal": True}} | more
    made = trainer(tmp_path, name=name, config=config, workers=workers, **{"callbacks": noted} | more)
    return made.fit(), notes


# What becomes of losses.
OUTCOMES = (Kind.WORKERS_STARTED, Kind.WORKER_REPLACED, Kind.WORKERS_RECONNECTED, Kind.RECOVERY_FAILED)


def outcomes(result):
    """(kind, ranks) of what has become of losses, in order."""
    return [(event.kind, event.ranks) for event in raytf.run_events(result) if event.kind in OUTCOMES]


def replaced(result):
    """Returns how often each rank was replaced, of a run that was not restarted."""
    assert {kind for kind, _ in outcomes(result)[1:]} <= {Kind.WORKER_REPLACED, Kind.WORKERS_RECONNECTED}
    return collections.Counter(rank for _, ranks in outcomes(result) for rank in ranks)


def assert_healed(notes, workers, lost):
    """Each has made every step once, but for the step in which it was lost."""
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    for rank in range(workers):
        places = [tuple(place) for _, *place in steps(notes, rank)]
        assert list(dict.fromkeys(places)) == everything, f"rank {rank}"
        assert len(places) == len(everything) + lost.count(rank), "the step in which it was lost was begun twice"


def test_a_worker_and_the_chief(tmp_path):
    """Rank 1 dies before step 20, the chief before step 33; the chief's state of callbacks is another's then. Standby
    workers replace them, which have made a step of the model before that. Before step 28 both live, and lose each
    other: they are reconnected."""
    expected, _ = run(tmp_path, "quiet")
    kills = Kill(rank=1, step=20), Kill(rank=0, step=33)
    options = {"tensorflow": {"heal": True, "spares": 1}, "build": noting_spares}
    result, notes = run(
        tmp_path, "killed", *kills, CutOff(rank=1, step=28), config={"spares": {(1, 6): 1, (2, 5): 2}}, **options
    )
    assert_equal(result, expected, 0)
    assert_healed(notes, 2, [1, 0])
    assert outcomes(result) == [
        (Kind.WORKERS_STARTED, ()),
        (Kind.WORKER_REPLACED, (1,)),
        (Kind.WORKERS_RECONNECTED, ()),
        (Kind.WORKER_REPLACED, (0,)),
    ]
    assert [kind for kind, _ in outcomes(expected)] == [Kind.WORKERS_STARTED]
    for kill in kills:
        _, spare = dict.fromkeys(process for process, *_ in steps(notes, kill.rank))
        (marker,) = (path for path in notes.glob("fault-*") if path.read_text() == f"{kill}\n")
        assert float((notes / f"ahead_{spare}").read_text()) < marker.stat().st_mtime


def dying_in_validation(config):
    """`accumulating`, which also dies once in its step of validation number 2 of the second epoch, and once where it is
    built for a worker that takes a lost one's place."""
    import tensorflow as tf

    from raytf.collectives import recovery_client

    marker = pathlib.Path(config["notes"], "replacing")
    if recovery_client.client.replacement_state is not None and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    model = models.accumulating(config)
    die = models.death(**config["validating"])

    class Dying(type(model)):
        def test_step(self, data):
            tf.py_function(die, [], [])
            return super().test_step(data)

    model.__class__ = Dying
    return model


def ends(notes, rank):
    """What a worker has noted of the ends of epochs, and of one that was made again once."""
    return list(dict.fromkeys((notes / f"ends_{rank}").read_text().splitlines()))


def test_three_workers_within_executions_a_validation_and_the_first_step(tmp_path):
    """Three steps are an execution, and four an update. The chief dies before the first step of all, and so does the
    worker that is to replace it; rank 1 in a step within an execution; the chief in the validation of the second
    epoch, and as it copies what a checkpoint is to hold; rank 2 before the first step of the third.

    Between two epochs rank 2 dies in `on_epoch_end` of the first, rank 1 as the second begins for it, when the others
    are within its first step, and the chief as the last one ends, after its row of a log."""
    options = {"build": dying_in_validation, "workers": 3, "steps_per_execution": 3, "checkpoint_every": "5 steps"}
    options["failures"] = 9
    inside = {"marker": str(tmp_path / "killed"), "rank_": 1, "step": 19}
    validating = {"marker": str(tmp_path / "validating"), "rank_": 0, "step": 8}
    config = {"inside": inside, "validating": validating}
    for marker in ("killed", "validating"):
        (tmp_path / marker).touch()
    expected, _ = run(tmp_path, "quiet", config=config, **options)
    for marker in ("killed", "validating"):
        (tmp_path / marker).unlink()
    config |= {"copying": (0, 2, 6), "tested": (2, 0), "at_begin": (1, 1), "at_end": (0, 2)}
    result, notes = run(tmp_path, "broken", Kill(rank=0, step=0), Kill(rank=2, step=28), config=config, **options)
    assert all((notes / name).exists() for name in ("replacing", "copying", "tested", "at_begin", "at_end"))
    assert replaced(result) == {0: 4, 1: 2, 2: 2}
    assert_equal(result, expected, 0)
    assert len(result.metrics_dataframe) == 3 and len(result.best_checkpoints) == len(expected.best_checkpoints)
    before = tmp_path / "quiet_notes"
    assert all(ends(notes, rank) == ends(before, rank) for rank in range(3)), "callbacks go on from what they held"
    assert (notes / "log.csv").read_text() == (before / "log.csv").read_text()


def with_a_moving_copy(config):
    """A model whose step moves a copy of its weights before it has gradients."""
    import keras
    from keras import layers

    class Copying(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(4, "softmax")])
            self.shadow = layers.Dense(4, trainable=False)
            self.shadow.build((None, 8))

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            for copy, its in zip(self.shadow.weights, self.net.trainable_variables[-2:], strict=True):
                copy.assign(0.9 * copy + 0.1 * its)
            return super().train_step(data)

    keras.config.set_floatx("float64")
    model = Copying()
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_all_workers_restart_where_a_step_changes_weights_before_its_gradients(tmp_path):
    """In the replacement worker these have moved twice, which is found out before a callback sees it.

    One that dies in a callback of the user's at the end of an epoch is replaced: all have the weights after it. Where
    the chief dies, and it alone knows which epoch was the best one so far, all restart from its last checkpoint."""
    expected, _ = run(tmp_path, "quiet", build=with_a_moving_copy)
    options = {"build": with_a_moving_copy, "config": {"at_end": (1, 0), "best": str(tmp_path / "best.keras")}}
    result, notes = run(tmp_path, "killed", Kill(rank=1, step=20), Kill(rank=0, step=33), **options)
    assert (notes / "at_end").exists()
    assert_equal(result, expected, 0)
    assert outcomes(result) == [
        (Kind.WORKERS_STARTED, ()),
        (Kind.WORKER_REPLACED, (1,)),
        (Kind.WORKER_REPLACED, (1,)),  # and then it is found out
        (Kind.WORKERS_STARTED, ()),
        (Kind.RECOVERY_FAILED, (0,)),
        (Kind.WORKERS_STARTED, ()),
    ]


def test_two_at_once_and_two_neighbours_at_once(tmp_path):
    """Of four workers ranks 0 and 2 die before step 20, and both are replaced in place: after a checkpoint, which has
    averaged moving statistics, and so are rank 3 before the first checkpoint, and rank 1 as the second epoch ends. Then
    ranks 1 and 2 do before step 33: what rank 1 had for itself is lost with rank 2, and all restart from the last
    checkpoint."""
    options = {"workers": 4, "checkpoint_every": "5 steps", "config": {"normalized": True}}
    expected, _ = run(tmp_path, "quiet", **options)
    options["config"] |= {"at_end": (1, 1), "behind": (3, 0, 4)}
    kills = [Kill(rank=0, step=20), Kill(rank=2, step=20), Kill(rank=1, step=33), Kill(rank=2, step=33)]
    result, notes = run(tmp_path, "killed", *kills, **options)
    assert_equal(result, expected, 0)
    assert outcomes(result) == [
        (Kind.WORKERS_STARTED, ()),
        (Kind.WORKER_REPLACED, (3,)),
        (Kind.WORKER_REPLACED, (0, 2)),
        (Kind.WORKER_REPLACED, (1,)),
        (Kind.RECOVERY_FAILED, (1, 2)),
        (Kind.WORKERS_STARTED, ()),
    ]
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    for rank in range(4):
        made = steps(notes, rank)
        assert list(dict.fromkeys((epoch, batch) for _, epoch, batch in made)) == everything
        assert len(made) <= len(everything) + (rank in (0, 2)) + 6, "those since the end of the epoch, at most"


def looking(config):
    """`noted`, and a callback that looks at batches: it sums their losses, lowers the rate by them, notes both, and
    dies before or after that, or before a batch, in each of the places of `deaths`. Once it evaluates the model, which
    resets metrics."""
    import keras
    import numpy as np

    class Looking(keras.callbacks.Callback):
        seen = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            self.die("begins", batch)

        def on_train_batch_end(self, batch, logs=None):
            self.die("ends", batch)
            self.seen += logs["loss"]
            self.model.optimizer.learning_rate = 0.01 / (1 + self.seen)
            with open(f"{config['notes']}/batches_{models.rank()}", "a") as file:
                print(self.epoch, batch, repr(float(logs["loss"])), repr(self.seen), file=file)
            if (self.epoch, batch) == (1, 3):
                rows = models.rows(23, 3)
                x = np.stack([rows[name] for name in models.FEATURES], 1)
                self.model.evaluate(x, rows["label"], batch_size=8, verbose=0)
            self.die("told", batch)

        def die(self, what, batch):
            for number, place in enumerate(config.get("deaths", ())):
                marker = pathlib.Path(config["notes"], f"death_{number}")
                if tuple(place) == (what, models.rank(), self.epoch, batch) and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

    return [*noted(config), Looking()]


def batches(notes, rank):
    """Returns the notes of `looking`, with those of a batch that it was called for again."""
    return list(dict.fromkeys((notes / f"batches_{rank}").read_text().splitlines()))


def test_between_two_steps_of_an_epoch_in_which_callbacks_look_at_batches_and_a_checkpoint_is_kept(tmp_path):
    """Of three workers rank 1 dies in `on_train_batch_end`, and so does its replacement; the chief, after that callback
    and before a checkpoint of that step; rank 2 before a batch, after an evaluation, when the others are in its step;
    rank 1 after an epoch's last batch, and the chief before the callback of the next one's first batch. All are
    replaced in place."""
    options = {"workers": 3, "checkpoint_every": "5 steps", "callbacks": looking, "failures": 9}
    expected, before = run(tmp_path, "quiet", **options)
    deaths = [("ends", 1, 0, 3), ("ends", 1, 0, 3), ("told", 0, 0, 9), ("begins", 2, 1, 4), ("told", 1, 1, 13)]
    deaths += [("ends", 0, 2, 0)]
    result, notes = run(tmp_path, "broken", config={"deaths": deaths}, **options)
    assert len(list(notes.glob("death_*"))) == len(deaths)
    found = replaced(result)
    # the replacement of rank 1 dies before it has joined, or after that
    assert (found[0], found[2]) == (2, 1) and found[1] in (2, 3), found
    assert_equal(result, expected, 0)
    for rank in range(3):
        assert batches(notes, rank) == batches(before, rank), "callbacks go on from what they held"
        assert ends(notes, rank) == ends(before, rank)
    assert (notes / "log.csv").read_text() == (before / "log.csv").read_text()
