"""A Python function that TensorFlow calls raises, and its own error is reported. No Ray."""

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.errors import ConfigError, one_line, with_cause
from raytf.parallel import trainer
from raytf.runtime.failures import is_consequence

RULE = ConfigError("A column must hold no nulls", "1 null(s) of 'y', double", "Use raytf.Column('y', fill=...)")


def generated():
    yield 1.0
    try:
        raise KeyError("within")
    except KeyError:
        raise RULE from None


def from_generator():
    return tf.data.Dataset.from_generator(generated, output_signature=tf.TensorSpec((), "float32"))


def fails(*_):
    raise KeyError("nope")


def in_a_graph(dataset):
    @tf.function
    def sum_of(iterator):
        return next(iterator) + next(iterator)

    return sum_of(iter(dataset))


CALLS = {
    "eagerly": (lambda: list(from_generator()), f"ConfigError: {RULE}"),
    "ahead": (lambda: list(from_generator().map(tf.negative).prefetch(2)), f"ConfigError: {RULE}"),
    "in a graph": (lambda: in_a_graph(from_generator()), f"ConfigError: {RULE}"),
    "py_function": (lambda: tf.py_function(fails, [1], tf.float32), "KeyError: 'nope'"),
    "numpy_function in a map": (
        lambda: list(tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(fails, [x], tf.float32))),
        "KeyError: 'nope'",
    ),
}


@pytest.mark.parametrize("how", CALLS)
def test_the_cause_is_pythons_own(how):
    call, line = CALLS[how]
    with pytest.raises(tf.errors.OpError) as caught:
        call()
    found, place, number = one_line(caught.value).rpartition(" (test_tensorflow_errors.py, line ")
    assert found == line and place and int(number.removesuffix(")")) < 32, (found, number)
    assert not is_consequence(caught.value)


def test_an_error_of_tensorflows_own_is_its_own():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(tf.zeros(3), [2, 2])
    line = one_line(caught.value)
    assert line.startswith("InvalidArgumentError: Input to reshape is a tensor with 3 values") and "Reshape" in line
    assert one_line(ValueError("a\nTraceback (most recent call last):\n  File x\nKeyError: b")) == "ValueError: a"


class _Cubed(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x / 0.0, "cubes of zero")


# Each with what the error of a step must say, at its begin.
STEPS = {
    "label": ((), 74, "Received a label value of 74 which is outside the valid range of [0, 3)"),
    "layer": ((_Cubed(name="cubed"),), 0, "cubes of zero : Tensor had NaN values"),
}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_an_error_of_a_step_begins_with_its_cause(kind, eagerly):
    """Operation and step with it; the whole text follows, and what it was pickles."""
    trainer.install()
    between, label, message = STEPS[kind]
    model = keras.Sequential([keras.Input((6,)), *between, keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=eagerly)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(np.zeros((8, 6), "float32"), np.full(8, label), batch_size=4, verbose=0)
    line = one_line(caught.value)
    assert line.startswith(f"InvalidArgumentError: {message}") and ", in step " in line and "(operation " in line
    assert "CheckNumerics" in line if kind == "layer" else "SparseSoftmaxCrossEntropyWithLogits" in line
    again = pickle.loads(pickle.dumps(caught.value))
    assert one_line(again) == line and "The whole text of TensorFlow: " in str(again)
    assert not is_consequence(caught.value)


def test_python_error_in_a_step_contains_its_own_type_and_the_step():
    trainer.install()

    def fails(x):
        raise KeyError("nope")

    rows = tf.data.Dataset.range(4).batch(2)
    rows = rows.map(lambda x: (tf.numpy_function(fails, [x], tf.float32), tf.zeros([2])))
    rows = rows.map(lambda x, y: (tf.ensure_shape(x, [2, 6]), y))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError) as caught:
        model.fit(rows, verbose=0)
    assert one_line(caught.value).startswith("KeyError: 'nope' (test_tensorflow_errors.py, line ")
    assert ", in step " in one_line(caught.value)


def compiled(function=None):
    """A model of six numbers, whose layer calls a function."""
    layers = [] if function is None else [keras.layers.Lambda(function, output_shape=(6,))]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def read_file(x):
    content = tf.io.read_file(tf.strings.join(["/no/such/", tf.strings.as_string(x)]))
    return tf.zeros([6]) + tf.cast(tf.strings.length(content), tf.float32), 0.0


def allocate(x):
    size = tf.cast(tf.reduce_max(x), tf.int64) + (1 << 45)
    return x + tf.reduce_sum(tf.random.uniform([size]))


@pytest.mark.parametrize(
    "kind, cause",
    [("not found", "NotFoundError: /no/such/2; No such file"), ("out of memory", "ResourceExhaustedError: OOM when ")],
)
def test_file_and_memory_that_are_missing_are_named_with_the_step(kind, cause):
    trainer.install()
    with pytest.raises(tf.errors.OpError) as caught:
        if kind == "not found":
            compiled().fit(tf.data.Dataset.range(2, 6).map(read_file).batch(2), verbose=0)
        else:
            compiled(allocate).fit(np.zeros((4, 6)), np.zeros(4), batch_size=2, verbose=0)
    line = one_line(caught.value)
    assert line.startswith(cause) and ", in step " in line, line


def test_error_of_a_validation_or_a_prediction_contains_the_step():
    """The second call counts its own steps."""
    trainer.install()
    model = compiled(lambda x: tf.debugging.check_numerics(x, "a bad row"))
    good, bad = np.zeros((8, 6), "float32"), np.zeros((8, 6), "float32")
    bad[5] = np.nan
    for call, clause in (
        (lambda x: model.evaluate(x, np.zeros(8), batch_size=2, verbose=0), ", in step 3 of a validation"),
        (lambda x: model.predict(x, batch_size=2, verbose=0), ", in step 3 of a prediction"),
    ):
        call(good)
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call(bad)
        line = one_line(caught.value)
        assert line.startswith("InvalidArgumentError: a bad row : Tensor had NaN values (operation ") and clause in line


class Value:
    """As a `RemoteValue` of a span of steps."""

    def __init__(self, error=None):
        self._error = error


def test_error_of_a_span_on_a_parameter_servers_worker_contains_steps_and_worker():
    from raytf.parameter_server.coordinator import _location

    text = "Additional GRPC error information from remote target /job:worker/replica:0/task:1"
    error = tf.errors.InvalidArgumentError(None, None, text)
    spans = [(4, 6, Value()), (6, 8, Value(error)), (8, 9, Value())]
    assert _location(error, spans, 10) == "in one of the steps 17 to 18, on worker 1"
    assert _location(error, [(4, 5, Value(error))], 0, " of a validation") == "in step 5 of a validation, on worker 1"
    unknown = tf.errors.InvalidArgumentError(None, None, "no")
    assert _location(unknown, spans, 10) == "in one of the steps 15 to 19"
    remote = f"{text} while calling /tensorflow.eager.EagerService/RunComponentFunction:\n:{{}}\n"
    graph = (
        "Detected at node f/Gather defined at (most recent call last):\n<stack>\nindices[0] = 50 is not in [0, 10)\n"
    )
    found = with_cause(f"{graph}\t [[{{{{node f/Gather}}}}]]\n{remote}", "in step 5")
    assert found.startswith("indices[0] = 50 is not in [0, 10) (operation f/Gather), in step 5")
    found = with_cause(f"{graph}{remote}", "in step 5")
    assert found.startswith("indices[0] = 50 is not in [0, 10) (operation f/Gather), in step 5")
