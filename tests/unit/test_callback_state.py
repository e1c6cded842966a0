"""Counters and best values of callbacks continue; arguments, paths and what derives from them are the new run's own."""

import collections
import json
import os
import threading

import keras
import numpy as np
import pytest

from raytf.errors import ConfigError
from raytf.storage import checkpoint_files, plain_values
from raytf.worker.callback_state import CallbackStates


def carried(tmp_path, before, after, during=lambda *callbacks: None, chief=True):
    """What is left of callbacks in those of another process."""
    states = CallbackStates(before)
    for callback in before:
        callback.on_train_begin()
    states.begin()
    during(*before)
    entries, arrays = states.state()
    path = tmp_path / "x.npz"
    np.savez(path, **{str(i): a for i, a in enumerate(arrays)})
    states = CallbackStates(after)
    for callback in after:
        callback.on_train_begin()
    with checkpoint_files.npz_arrays(str(tmp_path), "x.npz") as found:
        states.restore(json.loads(json.dumps(entries)), found, chief)
    return after


def monitored(callback, losses):
    """A model that a callback has watched for some epochs."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    callback.set_model(model)
    for epoch, loss in enumerate(losses):
        callback.on_epoch_end(epoch, {"loss": loss})
    return callback


def test_changed_argument_holds_and_counters_continue(tmp_path):
    def stop(patience, delta):
        return keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=delta, restore_best_weights=True)

    def plateau(factor):
        return keras.callbacks.ReduceLROnPlateau("loss", factor=factor, patience=2, cooldown=3)

    def during(stop, plateau):
        monitored(stop, [1.0, 0.5, 0.7])
        monitored(plateau, [1.0, 0.5, 0.6, 0.6, 0.6])

    before = [stop(5, 0.1), plateau(0.5)]
    early, reduce = carried(tmp_path, before, [stop(50, 0.2), plateau(0.1)], during)
    assert (early.patience, early.min_delta, early.wait, early.best, early.best_epoch) == (50, 0.2, 1, 0.5, 1)
    for left, right in zip(early.best_weights, before[0].best_weights, strict=True):
        np.testing.assert_array_equal(left, right)
    assert (reduce.factor, reduce.cooldown_counter, reduce.wait, reduce.best) == (0.1, 2, 0, 0.5)
    monitored(early, [0.55])
    assert early.wait == 2 and early.min_delta == -0.2, "the comparison is chosen anew, with the new difference"


def test_files_are_the_new_runs_own(tmp_path):
    """Paths, and texts that `set_model` and constructors derive from them, are no state of any worker."""

    def callbacks(name):
        folder = str(tmp_path / name)
        found = [
            keras.callbacks.CSVLogger(f"{folder}.csv", separator=name),
            keras.callbacks.BackupAndRestore(folder),
            keras.callbacks.TensorBoard(folder, write_graph=False),
            keras.callbacks.ModelCheckpoint(f"{folder}.keras", "loss", save_best_only=True, mode="min"),
        ]
        for callback in found:
            callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        return found

    def during(csv, backup, board, saver):
        csv.on_epoch_end(0, {"loss": 1.0})
        saver.on_epoch_end(0, {"loss": 0.5})
        backup._current_epoch = 7
        board._global_train_batch = 9

    before = callbacks("a")
    after = callbacks("b")
    csv, backup, board, saver = carried(tmp_path, before, after, during)
    for callback in (*before, *after):
        callback.on_train_end()
    assert (saver.best, backup._current_epoch, board._global_train_batch) == (0.5, 7, 9)
    assert csv.keys == ["loss", "val_loss"] and csv.sep == "b"
    paths = [v for c in after for v in vars(c).values() if isinstance(v, str) and os.sep in v]
    assert len(paths) >= 9 and not any(str(tmp_path / "a") in path for path in paths)


class Own(keras.callbacks.Callback):
    """A user's callback with much to remember."""

    def __init__(self, countdown, rate, name="run"):
        super().__init__()
        self.countdown, self._rate, self.limit = countdown, rate, 2 * countdown
        self.seen, self.last, self.best = collections.deque(maxlen=2), None, {}

    def on_train_begin(self, logs=None):
        self.base, self.place = self._rate * 10, "logs/train"

    def count(self):
        self.countdown -= 1
        self.seen.append((float("nan"), np.float32(0.1)))
        self.last, self.best = {1: b"\0", (2, 3): {4}}, {"val/loss": np.ones((2, 1), "float16")}
        self.kept, self.relative, self.lock = ["/tmp/x"], "logs/epoch_3", threading.Lock()


def test_a_users_callback_keeps_its_values_with_their_types(tmp_path):
    before, same, other = Own(5, 0.1), Own(5, 0.1), Own(9, 0.1)
    carried(tmp_path, [before], [same], Own.count)
    assert (same.countdown, same.limit, same.base, same.place) == (4, 10, 1.0, "logs/train")
    assert same.seen.maxlen == 2 and np.isnan(same.seen[0][0]) and type(same.seen[0][1]) is np.float32
    assert same.last == {1: b"\0", (2, 3): {4}} and same.best["val/loss"].dtype == np.float16
    assert same.relative == "logs/epoch_3" and not hasattr(same, "kept") and not hasattr(same, "lock")
    assert (carried(tmp_path, [before], [other])[0].countdown, other.limit) == (9, 18), "an argument was changed"
    elsewhere = carried(tmp_path, [Own(5, 0.1)], [Own(5, 0.1)], Own.count, chief=False)[0]
    assert elsewhere.countdown == 4 and not hasattr(elsewhere, "relative"), "the chief's file"


def test_what_begins_as_derived_follows_changed_arguments_only(tmp_path):
    """A base rate that the first run saw is kept by the second; with another argument it is derived again."""

    class Base(keras.callbacks.Callback):
        def __init__(self, scale, rate_of_model, folder="/a"):
            super().__init__()
            self.scale, self.seen, self.folder = scale, rate_of_model, folder

        def on_train_begin(self, logs=None):
            self.base = self.seen * self.scale

    assert carried(tmp_path, [Base(2, 0.1)], [Base(2, 0.05)])[0].base == 2 * 0.1
    assert carried(tmp_path, [Base(2, 0.1, "/a/x")], [Base(2, 0.05, "/b/y")])[0].base == 2 * 0.1, "another folder"
    assert carried(tmp_path, [Base(2, 0.1)], [Base(3, 0.05)])[0].base == 3 * 0.05


def test_callbacks_may_come_go_and_move(tmp_path):
    def make(kind, **state):
        callback = kind()
        vars(callback).update(state)
        return callback

    class One(keras.callbacks.Callback):
        count = 0

    class Two(One):
        pass

    def during(*callbacks):
        for number, callback in enumerate(callbacks, 1):
            callback.count = number

    with pytest.warns(UserWarning) as caught:
        after = carried(tmp_path, [One(), One(), Two()], [keras.callbacks.TerminateOnNaN(), Two(), One()], during)
    assert [getattr(c, "count", None) for c in after] == [None, 3, 1]
    assert [str(w.message) for w in caught] == [
        "Callbacks that the checkpoint does not know start from scratch: TerminateOnNaN",
        "The state of callbacks that the run has no longer is dropped: One",
    ]


def test_callback_may_define_its_own_state(tmp_path):
    class OwnState(keras.callbacks.Callback):
        value = None

        def get_state(self):
            return self.value

        def set_state(self, state):
            self.value = state

    def during(callback):
        callback.value = {"seen": {1, 2}, "at": "/tmp/x"}

    assert carried(tmp_path, [OwnState()], [OwnState()], during)[0].value == {"seen": {1, 2}, "at": "/tmp/x"}

    def wrong(callback):
        callback.value = {"file": [object()]}

    with pytest.raises(
        ConfigError, match=r"get_state\(\).*OwnState: the value\['file'\]\[0\] is of type builtins.object"
    ):
        carried(tmp_path, [OwnState()], [OwnState()], wrong)


@pytest.mark.parametrize(
    "entry",
    [
        *(None, {}, {"class": 1}, {"class": "History"}, {"class": "History", "attributes": [], "arguments": {}}),
        {"class": "History", "arguments": {}, "attributes": {"x": {"value": {"$": "code"}, "derived": False}}},
        {"class": "History", "arguments": {}, "attributes": {"x": {"value": {"$": ["a"]}, "derived": False}}},
    ],
)
def test_what_is_no_state_is_refused(entry):
    with pytest.raises(ValueError):
        CallbackStates([keras.callbacks.History()]).restore([entry], {}, True)


@pytest.mark.parametrize(
    "value",
    [
        *(
            [1, 2.5, None, True, "é\ud800"],
            (1, (2,), [()]),
            {3, 1},
            pytest.param(frozenset({"b", "a"}), id="a frozenset"),
            b"\0\xff",
            1j,
            -0.0,
            10**40,
        ),
        *({1: "a", "1": 2}, {"$": 1}, {(1, 2): {"x": float("inf")}}, collections.deque([1], 3), np.float64("nan")),
        *(
            np.int64(3),
            np.bool_(True),
            np.str_("é"),
            np.bytes_(b"q\0x"),
            np.datetime64("2020-01-01", "s"),
            np.float16(2),
        ),
        *(
            np.arange(6).reshape(2, 3).T,
            np.zeros((0, 3), "f4"),
            np.array(3.0),
            np.array(["a", "bb"]),
            np.array([1], ">i4"),
        ),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value, tmp_path):
    arrays = []
    text = json.dumps(plain_values.encode(value, arrays))
    np.savez(tmp_path / "a.npz", **{str(i): array for i, array in enumerate(arrays)})
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        again = plain_values.decode(json.loads(text), found)
    assert type(again) is type(value) and plain_values.digest(again) == plain_values.digest(value)
    np.testing.assert_equal(again, value)


def test_weights_of_types_that_numpy_does_not_name_come_back(tmp_path):
    import ml_dtypes

    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        arrays = []
        encoded = plain_values.encode([np.ones((2, 3), kind).T, kind(1.5)], arrays)
        np.savez(tmp_path / "a.npz", **{str(i): array for i, array in enumerate(arrays)})
        with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
            array, scalar = plain_values.decode(encoded, found)
        assert array.dtype == kind and array.shape == (3, 2) and array.sum() == 6 and scalar == kind(1.5)


@pytest.mark.parametrize("value", [object(), [print], np.array([object()]), np.zeros(2, [("a", "i4")]), {object(): 1}])
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(TypeError, match="is of type"):
        plain_values.encode(value, [])
    assert plain_values.digest(value) is None


class Counting(keras.callbacks.Callback):
    """Counts within an epoch, and begins again with each."""

    def __init__(self):
        super().__init__()
        self.seen, self.rows, self.lock = 0, [], threading.Lock()

    def on_epoch_begin(self, epoch, logs=None):
        self.seen, self.rows, self.lock, self.epoch = 0, [], threading.Lock(), epoch


class Telling(keras.callbacks.Callback):
    """Returns its own state."""

    def __init__(self):
        super().__init__()
        self.best = np.zeros(2)

    def get_state(self):
        return {"best": self.best}

    def set_state(self, state):
        self.best = state["best"]

    def on_epoch_begin(self, epoch, logs=None):
        self.best = self.best * 0


def test_what_an_epochs_begin_changes_is_put_back():
    """What is no plain value stays as the epoch made it, and so does what it has made new."""
    counting, telling = Counting(), Telling()
    states = CallbackStates([counting, telling])
    counting.seen, counting.rows, telling.best = 7, [np.arange(3)], np.array([1.0, 2.0])
    held = states.copy_states()
    counting.rows[0][:] = 9  # they are copies
    for callback in (counting, telling):
        callback.on_epoch_begin(2)
    lock = counting.lock
    states.restore_copies(held)
    assert (counting.seen, counting.epoch) == (7, 2) and counting.lock is lock
    np.testing.assert_array_equal(counting.rows, [[0, 1, 2]])
    np.testing.assert_array_equal(telling.best, [1.0, 2.0])
