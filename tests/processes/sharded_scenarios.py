"""Trainings whose optimizer's state is shared out, or not: what both must have alike, to the bit."""

from __future__ import annotations

import dataclasses
import functools
import os
import zipfile

import keras
import numpy as np
from keras import layers
from pyarrow.fs import LocalFileSystem

from raytf.compat import keras as compat_keras
from raytf.compat.patching import patched
from raytf.parallel import shards
from raytf.storage import checkpoint_files, step_folders
from raytf.worker import checkpoint, replacement
from raytf.worker.checkpoint_saver import CheckpointSaver
from raytf.worker.fit import build_from_data
from tests.processes import resume_scenarios
from tests.processes.scenarios import Place, classes, floats, results

HIDDEN = 61  # no multiple of anything


def _excluding():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _clipping():
    return keras.optimizers.AdamW(0.01, weight_decay=0.05, clipvalue=0.01)


def _scheduled():
    rate = keras.optimizers.schedules.CosineDecay(0.02, 8, warmup_steps=3, warmup_target=0.03)
    return keras.optimizers.Adam(rate)


KINDS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": _excluding,
    "schedule": _scheduled,
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "decay": lambda: keras.optimizers.Adam(0.01, weight_decay=0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.001),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001, weight_decay=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001, beta=0.1),
}


def _dense(optimizer, hidden=2, **compiled):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(HIDDEN, "relu", kernel_constraint=keras.constraints.MaxNorm(1.5)),
            *(layers.Dense(HIDDEN, "tanh") for _ in range(hidden)),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(4, "softmax"),
        ]
    )
    model.compile(optimizer(), "sparse_categorical_crossentropy", **compiled)
    return model


def _table(optimizer, **compiled):
    tokens = keras.Input((), dtype="int32")
    hidden = layers.Dense(HIDDEN, "relu")(layers.Embedding(50, 24)(tokens))
    model = keras.Model(tokens, layers.Dense(4, "softmax")(hidden))
    model.compile(optimizer(), "sparse_categorical_crossentropy", **compiled)
    return model


def _trained(place: Place, build, features, epochs=2):
    data = place.data((features, classes()))
    with place.strategy.scope():
        keras.utils.set_random_seed(7)
        model = build()
    shards.attach(model, place.strategy)
    with place.strategy.scope():
        build_from_data(model, data)
    ring = shards.gradient_ring.ring_of(place.strategy)
    before = 0 if ring is None else ring.ring.sent
    history = model.fit(data, epochs=epochs, verbose=0)
    sent = 0 if ring is None else ring.ring.sent - before
    size = sum(np.asarray(v).nbytes for v in model.optimizer.variables)
    why = replacement._unrecoverable(model, ring) or ""
    assert ("exists nowhere else" in why) == shards.has_shards(model)
    with shards.gather_full_state(model):
        saved = {}
        if place.rank == 0:
            own = compat_keras.own_state(model.optimizer)
            saved = {f"o{key}": np.array(compat_keras.as_array(v)) for key, v in own.items()}
    return results(model, history) | saved | {"bytes": size, "sent": sent}


def _in_parts(place: Place):
    """Both workers save each a part of two checkpoints. Returns what the chief reads of the second, as bytes."""
    data = place.data((floats(6), classes()))
    with place.strategy.scope():
        keras.utils.set_random_seed(7)
        model = _dense(KINDS["adam"])
    shards.attach(model, place.strategy)
    with place.strategy.scope():
        build_from_data(model, data)
    saver, read = CheckpointSaver(LocalFileSystem(), place.folder), {}
    for step in (1, 2):
        model.fit(data, epochs=1, verbose=0)
        name = step_folders.folder_name(step)
        with shards.gather_full_state(model, writers=place.world):
            if place.rank == 0:
                state = checkpoint.CheckpointState(1, step, 7, False, [])
                saver.save_async(name, model, checkpoint.checkpoint_parts(model, state), place.world)
            else:
                saver.save_part(name, model, place.rank, place.world)
        saver.close()
    if place.rank == 0:
        folder = os.path.join(place.folder, name)
        checkpoint_files.check_folder(folder)
        with checkpoint_files.whole_folder(folder) as whole:
            with zipfile.ZipFile(os.path.join(whole, checkpoint_files.MODEL)) as archive:
                read["file"] = np.frombuffer(archive.read("model.weights.h5"), np.uint8)
            read["parts"] = sum(part.startswith(checkpoint_files.MODEL) for part in os.listdir(folder))
    return read


def _refused(place: Place, build, **_):
    with place.strategy.scope():
        model = build()
    try:
        shards.attach(model, place.strategy)
    except Exception as error:
        return {"refused": str(error)}
    return {"refused": ""}


class _Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(4)

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        return super().train_step(data)


def _own_step():
    model = _Own()
    model.compile("adam", "mse")
    return model


REFUSED = {
    "lamb": lambda: _dense(keras.optimizers.Lamb),
    "muon": lambda: _dense(keras.optimizers.Muon),
    "adafactor": lambda: _dense(keras.optimizers.Adafactor),
    "nadam": lambda: _dense(keras.optimizers.Nadam),
    "own": lambda: _dense(type("Mine", (keras.optimizers.Adam,), {})),
    "clipnorm": lambda: _dense(lambda: keras.optimizers.Adam(clipnorm=1.0)),
    "global_clipnorm": lambda: _dense(lambda: keras.optimizers.Adam(global_clipnorm=1.0)),
    "use_ema": lambda: _dense(lambda: keras.optimizers.Adam(use_ema=True)),
    "accumulation": lambda: _dense(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)),
    "centered": lambda: _dense(lambda: keras.optimizers.RMSprop(centered=True)),
    "loss_scale": lambda: _dense(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())),
    "train_step": _own_step,
}

SCENARIOS = {"in_parts": _in_parts}


def _with_features(name, build, features):
    SCENARIOS[name] = lambda place: _trained(place, build, features())


for _name, _optimizer in KINDS.items():
    _with_features(_name, functools.partial(_dense, _optimizer), lambda: floats(6))
_with_features("table", functools.partial(_table, _clipping), lambda: classes(50).astype("int32"))
# more variables than are compiled together
_with_features("deep", functools.partial(_dense, KINDS["adamw"], hidden=8), lambda: floats(6))
_with_features("executions", functools.partial(_dense, KINDS["adam"], steps_per_execution=3), lambda: floats(6))
_with_features("eager", functools.partial(_dense, KINDS["adam"], run_eagerly=True), lambda: floats(6))


class _Session(resume_scenarios.Stored):
    """The run around a training, whose checkpoints have what all workers have."""

    def save_step(self, name, model, parts, writers=1):
        super().save_step(name, model, parts, writers)
        _plain_keras_reads(os.path.join(self._kept, name, "model.keras"), model)

    def hold_in_memory(self, name, model, parts):
        raise AssertionError("no memory_every was given")


def _plain_keras_reads(file, model):
    read = keras.saving.load_model(file)
    assert [v.shape for v in read.optimizer.variables if len(v.shape)] == [
        v.shape for v in read.trainable_variables for _ in range(2)
    ]
    for left, right in zip(model.trainable_variables, read.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def _case():
    return dataclasses.replace(
        resume_scenarios.CASES["plain"], build=lambda: _dense(KINDS["adam"], metrics=["accuracy"])
    )


def _resumed(place: Place, begins: str | None = None, stop=(1, 5), kept: str | None = None):
    """Trains, perhaps from the checkpoint of another group, and perhaps until it is stopped.

    Args:
        place: where it runs.
        begins: name of the group whose checkpoint it begins with.
        stop: (epoch, step), or None.
        kept: whether its checkpoints are kept.
    """
    folder = lambda name: os.path.join(os.path.dirname(place.folder), f"checkpoints_{name}")
    with patched(resume_scenarios, "Stored", _Session):
        begins = resume_scenarios.newest(folder(begins)) if begins else None
        out = resume_scenarios.train(place, _case(), begins, folder(kept) if kept else None, stop)
    return {} if out is None else {key: value for key, value in out.items() if key[0] in "wh"}


SCENARIOS["quiet"] = functools.partial(_resumed, stop=None)
for _name in ("sharded2", "whole2"):
    SCENARIOS[f"stopped_{_name}"] = functools.partial(_resumed, kept=_name)
    SCENARIOS[f"resumed_{_name}"] = functools.partial(_resumed, begins=_name, stop=None)
_with_features(
    "compiled", functools.partial(_table, KINDS["adam"], jit_compile=True), lambda: classes(50).astype("int32")
)
SCENARIOS |= {f"refused_{name}": functools.partial(_refused, build=build) for name, build in REFUSED.items()}
