"""What a process gets that begins after the last step of an epoch, when callbacks have changed the model since."""

import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.collectives import recovery_client
from raytf.errors import RaytfError
from raytf.parallel import assigned, own_state, trainer
from raytf.storage import checkpoint_files
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.folder_contents import write_files
from raytf.worker import checkpoint, replacement, step_checkpoints
from raytf.worker.callback_state import CallbackStates

trainer.install()


@pytest.fixture
def model():
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(400), keras.layers.Dense(1)])
        made.compile("sgd", "mse", run_eagerly=True)
    made.fit(np.ones((4, 6)), np.ones((4, 1)), verbose=0)
    made.__dict__["_raytf_last"] = {"loss": 0.5}, 4
    return made


def note(model, epoch_ends):
    """Returns (the note after an epoch's last step, or another one, a callback's attribute of then)."""
    callback = keras.callbacks.Callback()
    states = CallbackStates([callback])
    callback.counts = np.arange(3)
    state = CheckpointState(epoch=0, step=4, seed=1, stopped=False, history=[], epoch_step=4)
    parts = checkpoint.checkpoint_parts(model, state, states, metrics={})
    return replacement._StepBoundary(model, parts, {"reports": 2}, 4, 16, epoch_ends), callback


@pytest.fixture
def noted(model):
    return note(model, epoch_ends=True)


def test_a_new_process_gets_what_was_there_before_callbacks_and_this_one_keeps_what_they_did(model, noted, tmp_path):
    image, callback = noted
    before, rate = model.get_weights(), float(model.optimizer.learning_rate)
    model.optimizer.learning_rate = 0.25
    model.layers[1].set_weights([w + 1 for w in model.layers[1].get_weights()[:1]] + [np.ones(1)])
    model.layers[1].kernel.assign(before[2])  # as it was
    callback.counts += 1
    place = image()
    write_files(place.files, str(tmp_path))
    assert (place.step, place.tag, place.at_end, place.shared_state) == (
        4,
        16,
        True,
        {"reports": 2, "last": ({"loss": 0.0}, 4)},
    )
    assert float(model.optimizer.learning_rate) == 0.25 and model.get_weights()[3].tolist() == [1.0]
    other = callback.__class__()
    checkpoint.restore_callbacks(str(tmp_path), CallbackStates([other]))
    assert other.counts.tolist() == [0, 1, 2]
    checkpoint.restore(str(tmp_path), model)
    assert float(model.optimizer.learning_rate) == rate
    for left, right in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change", [lambda w: w * 0.5, lambda w: w[:, ::-1], lambda w: np.where(np.arange(400) == 7, 0, w)]
)
def test_no_process_gets_weights_that_a_compiled_function_has_changed(model, noted, change):
    kernel = model.layers[0].kernel
    changed = change(kernel.numpy())
    tf.function(lambda: kernel.value.assign(changed))()
    with pytest.raises(RaytfError, match="a callback has changed .*kernel since the last step"):
        noted[0]()


def test_what_is_no_longer_asked_for_is_not_noted(model):
    """Nor is what a training step assigns, or each worker has for itself."""
    watch = assigned.AssignmentWatch(model)
    with recovery_client.client.execution():
        model.optimizer.learning_rate = 0.5
    model.layers[0].bias.assign(model.layers[0].bias + 1)
    model.metrics[0].reset_state()
    assert [variable.path for variable, _ in watch.old_values()] == [model.layers[0].bias.path]
    kept = weakref.ref(watch)
    del watch
    assert kept() is None
    model.layers[0].kernel.assign(model.layers[0].kernel + 1)


def test_assignment_in_a_graph_or_in_a_replica_is_reported_as_a_change(model, noted):
    bias = model.layers[1].bias
    tf.function(lambda: bias.assign(bias + 1))()
    with pytest.raises(RaytfError, match="a callback has changed .*bias in a graph or a replica since the last step"):
        noted[0]()


def test_assignments_of_a_traced_function_are_seen_after_other_steps(model):
    """The call that traces it is seen after its own step, and the others after theirs."""
    bias = model.layers[1].bias
    halve = tf.function(lambda: bias.assign(bias * 0.5 + 1))
    first, _ = note(model, epoch_ends=False)
    halve()
    with pytest.raises(RaytfError, match="a callback has changed .*bias in a graph"):
        first()
    second, _ = note(model, epoch_ends=False)
    assert second().step == 4, "it is not called behind each step"
    halve()
    with pytest.raises(RaytfError, match="a callback has changed .*bias since the last step"):
        second()


def test_state_that_workers_join_is_taken_as_it_is(monkeypatch):
    """A new process takes it before it has the others' ring, where a sum is that of workers which are all alike."""

    class Counts(keras.layers.Layer):
        def build(self, shape):
            add = lambda name: self.add_weight(name=name, trainable=False, aggregation=name)
            self.joined = list(map(add, ("sum", "mean", "only_first_replica")))

    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        made = keras.Sequential([keras.Input((6,)), Counts()])
    joined = made.layers[0].joined
    for variable in joined:
        variable.assign(4000)
    content = own_state.content_of(made)
    for variable in joined:
        variable.assign(0)
    monkeypatch.setattr(type(strategy.extended), "_reduce_to", lambda extended, way, value, *_: 3 * value)
    own_state.take(made, content)
    assert list(map(int, joined)) == [4000] * 3


def test_callback_that_needs_the_begin_of_a_batch_is_named(model):
    class Timing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            return self.began + batch

    model.__dict__["_raytf_callbacks"] = [keras.callbacks.Callback(), timing := Timing()]
    position = types.SimpleNamespace(epoch_step=3, steps=3)
    last = replacement.RecoveryCallback(types.SimpleNamespace(position=position, replacement_state=None))
    last.set_model(model)
    with pytest.raises(
        RaytfError, match=r"accept the end of a batch .* Timing with AttributeError: .*began.* get_state"
    ):
        last._end_batch()
    timing.began = 0
    last._end_batch()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("begun", "made"), [(True, 4), (False, 5)])
def test_what_callbacks_did_at_the_begin_of_a_step_is_not_done_twice(model, tmp_path, begun, made):
    """A process within the step that the others are in gets what their callbacks held after its begin."""

    class Counting(keras.callbacks.Callback):
        made = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.made += 1
            self.model.optimizer.learning_rate = 1 / self.made

    counting = Counting()
    states = CallbackStates([counting])
    counting.made = 4
    state = CheckpointState(epoch=0, step=4, seed=1, stopped=False, history=[], epoch_step=4)
    parts = checkpoint.checkpoint_parts(model, state, states, metrics={})
    checkpoint.write(str(tmp_path), model, parts, checkpoint_files.VERSION)
    model.optimizer.learning_rate = 0.25
    training = types.SimpleNamespace(
        folder=str(tmp_path),
        state=state,
        states=states,
        position=types.SimpleNamespace(steps=9, resume_at=lambda *_: tf.data.Dataset.range(9)),
        iterator=lambda: types.SimpleNamespace(begin_at=lambda *_: None),
        replacement_state=types.SimpleNamespace(after_step=not begun, steps_in_execution=0),
    )
    before = step_checkpoints.PrepareMidEpochResume.create(training)
    after = step_checkpoints.MidEpochResume(training, before)
    callbacks = keras.callbacks.CallbackList([before, counting, after], model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_train_batch_begin(4)
    assert (counting.made, float(model.optimizer.learning_rate)) == (made, pytest.approx(1 / made))
    callbacks.on_train_batch_begin(5)
    assert counting.made == made + 1, "it counts on"
