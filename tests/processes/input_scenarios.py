"""Scenarios of the parity tests whose rows come as a trainer's do: from Arrow tables, through a `Feed`."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf
from keras import layers

from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column
from raytf.data.feed import Feed, open_feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.runtime.topology import Shard
from tests.processes.scenarios import BATCH, ROWS, classes, results, scenario


def fed(p, table, features, labels, shuffle="full", batch=BATCH):
    """This worker's part of a table, as a trainer's worker has it."""
    parts = [table.slice(start, 13) for start in range(0, len(table), 13)]
    stored = StoredDataset(parts, [len(part) for part in parts], table.column_names)
    sampling = Sampling(global_batch=batch, seed=5, shuffle=shuffle)
    return Feed(stored, BatchSpec.parsed(features, labels), sampling, Shard(p.rank, p.world)).dataset()


def texts(rows: int) -> pa.Table:
    """Tokens of which the longest few are rare, so that a worker's own longest is seldom that of the batch."""
    random = np.random.default_rng(4)
    lengths = np.where(random.random(rows) < 0.1, random.integers(9, 15, rows), random.integers(1, 5, rows))
    tokens = [random.integers(1, 20, size).tolist() for size in lengths]
    return pa.table({"tokens": pa.array(tokens, pa.list_(pa.int64())), "label": classes(rows=rows)})


@scenario
def padded_lists_without_mask(p):
    """Convolution, attention and average pooling see what lists are filled up with: as much on each worker as alone.

    In the last batch one worker has one row, and the others have none.
    """
    tokens = Column("tokens", pad="batch")
    train = fed(p, texts(2 * BATCH + 1), tokens, "label")
    validation = fed(p, texts(40), tokens, "label", "none", 16)

    def build():
        inputs = keras.Input((None,), dtype="int64")
        x = layers.Embedding(20, 6)(inputs)
        x = layers.Conv1D(8, 3, padding="same", activation="tanh")(x)
        x = layers.MultiHeadAttention(2, 4)(x, x)
        x = layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling1D()(x))
        model = keras.Model(inputs, x)
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        model = build()
    history = model.fit(train, epochs=2, validation_data=validation, verbose=0, shuffle=False)
    return results(model, history)


class _Counted(keras.utils.PyDataset):
    """Batches whose width differs, and which change with each reading: what is read too often is seen."""

    def __init__(self, batches):
        super().__init__()
        self.batches, self.read = batches, 0

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        self.read += 1
        return self.batches[index]

    def on_epoch_end(self):
        self.batches = self.batches[1:] + self.batches[:1]


def of_any_width(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Global batches of sequences; each batch has a width of its own."""
    random = np.random.default_rng(8)
    make = lambda rows, width: (random.normal(size=(rows, width, 3)), random.normal(size=(rows, 1)))
    return [make(8 if i < steps - 1 else 5, 2 + i % 4) for i in range(steps)]


def sequence_model(p):
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([layers.Conv1D(4, 2), layers.GlobalAveragePooling1D(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


@scenario
def python_generator_is_read_once(p):
    """The first `fit` on a generator trains on each of its batches, and `evaluate` on another one, too."""
    model = sequence_model(p)
    history = model.fit((batch for batch in of_any_width(9)), epochs=1, verbose=0)
    found = model.evaluate((batch for batch in of_any_width(5)), verbose=0, return_dict=True)
    steps = np.asarray(int(model.optimizer.iterations))
    # alone Keras counts one step more, for the end of the data
    return results(model, history) | {f"e:{k}": np.asarray(v) for k, v in found.items()} | {"bits:steps": steps}


@scenario
def python_generator_in_several_epochs(p):
    """With `steps_per_epoch` an epoch continues where the one before has stopped."""
    model = sequence_model(p)
    batches = of_any_width(12)[:-1] * 2  # of one size: Keras must not reach the end
    return results(model, model.fit((batch for batch in batches), epochs=3, steps_per_epoch=4, verbose=0))


@scenario
def datasets_that_know_how_often_they_are_read(p):
    """A `PyDataset`, and a `tf.data` pipeline whose generator continues, give each epoch what one process gets."""
    batches = of_any_width(6)
    counted = _Counted(batches)
    model = sequence_model(p)
    out = results(model, model.fit(counted, epochs=3, shuffle=False, verbose=0))
    readings = iter(range(10))

    def generator():
        reading = next(readings)
        for x, y in batches:
            yield x + reading, y

    signature = (tf.TensorSpec((None, None, 3), tf.float64), tf.TensorSpec((None, 1), tf.float64))
    dataset = tf.data.Dataset.from_generator(generator, output_signature=signature)
    history = model.fit(dataset, epochs=2, verbose=0)
    return out | {f"generator:{key}": value for key, value in results(model, history).items()}


class _Sums(keras.layers.Layer):
    """Weights of words that are there, by number; takes sparse rows and lists."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(12, 3))

    def call(self, x):
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(x, tf.convert_to_tensor(self.kernel))
        if isinstance(x, tf.RaggedTensor) or x.dtype == tf.int64:  # the latter while shapes are worked out
            return tf.reduce_sum(tf.gather(tf.convert_to_tensor(self.kernel), x), 1)
        return keras.ops.matmul(x, self.kernel)

    def compute_output_shape(self, shape):
        return (shape[0], 3)


def few_rows_of(kind: str):
    """Global batches of which the last has one row: tf.SparseTensor or tf.RaggedTensor."""
    random = np.random.default_rng(2)
    dense = random.normal(size=(9, 12)) * (random.random((9, 12)) < 0.3)
    x = tf.sparse.from_dense(dense)
    if kind == "ragged":
        x = tf.ragged.constant([np.flatnonzero(row).tolist() for row in dense], dtype=tf.int64)
    return tf.data.Dataset.from_tensor_slices((x, random.normal(size=(9, 1)))).batch(4)


def _no_row_for_a_worker(p, kind):
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        if kind == "sparse":
            inputs = keras.Input((12,), sparse=True)
        else:
            inputs = keras.Input((None,), dtype="int64", ragged=True)
        outputs = layers.Dense(1)(layers.Activation("tanh")(_Sums()(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    data = few_rows_of(kind)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    found = model.evaluate(data, verbose=0, return_dict=True)
    return results(model, history) | {f"e:{key}": np.asarray(value) for key, value in found.items()}


@scenario
def sparse_rows_of_which_a_worker_has_none(p):
    return _no_row_for_a_worker(p, "sparse")


@scenario
def lists_of_which_a_worker_has_none(p):
    return _no_row_for_a_worker(p, "ragged")


@scenario
def objects_from_the_chief(p):
    """What a train loop broadcasts: any object, of any size, signed."""
    from raytf.collectives import communicator, signed

    own = [{"rank": p.rank, "rows": np.arange(size)} for size in (0, 5, 70_000)]
    if communicator.spans_workers(p.strategy):
        own = [signed.broadcast(p.strategy, one) for one in own]
    return {f"{i}": np.asarray([one["rank"], len(one["rows"]), one["rows"].sum()]) for i, one in enumerate(own)}


@scenario
def sparse_rows_of_a_generator(p):
    """Batches of unknown sizes, of which the last has fewer rows than there are workers; SciPy's matrices."""
    import scipy.sparse

    random = np.random.default_rng(2)
    dense = random.normal(size=(11, 12)) * (random.random((11, 12)) < 0.3)
    y = random.normal(size=(11, 1))

    def batches():
        for begin, end in ((0, 4), (4, 7), (7, 10), (10, 11)):
            yield scipy.sparse.csr_matrix(dense[begin:end]), y[begin:end]

    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((12,), sparse=True), layers.Dense(3, "tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(batches(), epochs=1, verbose=0)
    found = model.evaluate(batches(), verbose=0, return_dict=True)
    return results(model, history) | {f"e:{key}": np.asarray(value) for key, value in found.items()}


def of_function(p, make, **options):
    """This worker's part of a tf.data function's dataset, as a trainer's worker has it."""
    sampling, shard = Sampling(global_batch=BATCH, seed=5, shuffle="none"), Shard(p.rank, p.world)
    return open_feed(TFData(make, **options), BatchSpec(None), sampling, shard, strategy=p.strategy).dataset()


def _dense_model(p):
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _pairs(rows: int) -> tf.data.Dataset:
    random = np.random.default_rng(3)
    return tf.data.Dataset.from_tensor_slices((random.normal(size=(rows, 5)), random.integers(0, 3, rows)))


@scenario
def tf_data_of_global_batches(p):
    """Cached, shuffled, drawn, filtered and weighted by class; the last batch has one row, and is not known before."""

    def train(context):
        rows = _pairs(2 * BATCH + 1).cache().shuffle(BATCH, reshuffle_each_iteration=True)
        rows = rows.map(lambda x, y: (x + 0.1 * tf.random.normal([5], dtype=x.dtype), y)).filter(lambda x, y: y < 3)
        return rows.batch(context.batch).prefetch(2)

    model = _dense_model(p)
    given = of_function(p, train, class_weight={0: 1.0, 1: 3.0, 2: 0.5})
    validation = of_function(p, lambda context: _pairs(BATCH + 3), rows=True)
    return results(model, model.fit(given, epochs=3, validation_data=validation, verbose=0, shuffle=False))


@scenario
def tf_data_that_shards_itself(p):
    """A step's rows are those of all shards; the last has one row, so that one worker's shard alone has this batch."""

    def train(context):
        return _pairs(2 * BATCH + 1).shard(context.num_shards, context.index).batch(context.batch)

    model = _dense_model(p)
    given = of_function(p, train, shards_itself=True)
    return results(model, model.fit(given, epochs=2, verbose=0, shuffle=False))


@scenario
def tf_data_of_lists(p):
    """A dict with ragged rows, of which a worker has none at the end; endless, in epochs of five steps."""
    random = np.random.default_rng(2)
    words = tf.ragged.constant([random.integers(0, 12, size).tolist() for size in random.integers(1, 6, 9)], tf.int64)
    y = random.normal(size=(9, 1))

    def train(context):
        return tf.data.Dataset.from_tensor_slices(({"words": words}, y)).batch(4).repeat()

    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((None,), dtype="int64", ragged=True, name="words")
        model = keras.Model({"words": inputs}, layers.Dense(1)(layers.Activation("tanh")(_Sums()(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    given = of_function(p, train, steps_per_epoch=5)
    return results(model, model.fit(given, epochs=3, verbose=0, shuffle=False))


class _WithWorkers(_Counted):
    """Threads of its own read the batches."""

    def __init__(self, batches):
        keras.utils.PyDataset.__init__(self, workers=2)
        self.batches, self.read = batches, 0


@scenario
def tf_data_of_a_py_dataset(p):
    """Made again in each epoch; its workers read ahead."""
    model = sequence_model(p)
    given = of_function(p, lambda context: _WithWorkers(of_any_width(6)))
    return results(model, model.fit(given, epochs=2, verbose=0, shuffle=False))


@scenario
def tf_data_that_differs_between_workers(p):
    """Each worker learns it by an exchange before the first step, and none waits for another."""

    def other_types(context):
        return tf.data.Dataset.range(ROWS).batch(context.batch).map(lambda x: tf.cast(x, f"int{32 << p.rank % 2}"))

    def other_rows(context):
        own = iter([np.full(BATCH, p.rank)])
        return tf.data.Dataset.from_generator(lambda: own, output_signature=tf.TensorSpec((None,), tf.int64))

    def uneven(context):
        return tf.data.Dataset.range(BATCH * (1 + context.index)).batch(BATCH)

    cases = [
        (other_types, {}, "other shapes or types on worker 1"),
        (other_rows, {"steps_per_epoch": 1}, "other rows in the first batch on worker 1"),
        (uneven, {"shards_itself": True, "uneven": "error"}, "1, 2 batches by worker"),
        (lambda context: uneven(context).take(0), {"shards_itself": True}, "a dataset without a batch"),
    ]
    for make, options, wanted in cases if p.world > 1 else ():
        try:
            of_function(p, make, **options)
        except ConfigError as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(wanted)
    return {}
