"""What `raytf.fit` is given becomes rows as Keras would see them, or is refused by name."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.fitting import arrays


def batches(data, batch=4):
    """All batches of one worker, as its model gets them."""
    from raytf.data.feed import Feed
    from raytf.data.sampling import Sampling
    from raytf.fitting.fit_worker import restructure

    blocks = StoredDataset([data.table], [data.table.num_rows], data.table.column_names)
    feed = Feed(blocks, data.batch, Sampling(global_batch=batch, shuffle="none"))
    return list(restructure(feed.dataset(), data.structure))


X, Y, W = np.arange(21.0).reshape(7, 3), np.arange(7), np.ones(7)
A, B = np.arange(7, dtype="uint8"), np.array(list("abcdefg"))
GIVEN = {
    "arrays": (X, Y, W),
    "x alone": (X, None, None),
    "one number a row": (Y, X, None),
    "a dict": ({"a": A, "b": B}, Y, None),
    "a list": ([X, A], [Y, X], None),
    "a list alone": ([X, A], None, None),
    "nested": ({"a": [X, {"c": A}], "b": B}, (Y, {"z": X}), None),
    "weights of each output": (X, {"p": Y, "q": X}, W),
    "a frame": (pd.DataFrame({"p": [1, 2, 3], "q": [0.5, 1, 2]}), pd.Series([1, 0, 1]), None),
    "pictures": (np.zeros((7, 2, 2, 3), "uint8"), Y, None),
    "booleans": (X > 3, Y > 2, None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GIVEN)
def test_batches_are_those_of_keras(name):
    from keras.src import tree
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    x, y, w = GIVEN[name]
    expected = [
        tree.map_structure(lambda part: np.asarray(part), batch)
        for batch in ArrayDataAdapter(_texts(x), _texts(y), w, batch_size=4).get_tf_dataset()
    ]
    found = batches(arrays.check_rows(x, y, w, None, None, None))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        other = _as_given(other, y, w)
        tree.assert_same_structure(tree.map_structure(np.asarray, one), other)
        for part, its in zip(tree.flatten(one), tree.flatten(other), strict=True):
            assert np.asarray(part).dtype == its.dtype and tuple(part.shape) == its.shape
            np.testing.assert_array_equal(np.asarray(part), its)


def _texts(structure):
    """Keras takes texts in arrays of objects."""
    from keras.src import tree

    as_objects = lambda part: part.astype(object) if getattr(part, "dtype", None) == B.dtype else part
    return structure if structure is None else tree.map_structure(as_objects, structure)


def _as_given(batch, y, w):
    """Keras' batches keep what is None."""
    if isinstance(batch, tuple):
        batch = tuple(part for part in batch if part is not None)
        return batch[0] if len(batch) == 1 and not isinstance(batch[0], (tuple, list)) else batch
    return batch


@pytest.mark.slow
def test_class_weights_and_an_arrow_table_and_ragged_rows():
    import tensorflow as tf

    ((_, _, weights), _) = batches(arrays.check_rows(X, Y % 2, None, {0: 1.0, 1: 3.0}, None, None))
    np.testing.assert_array_equal(weights, [1, 3, 1, 3])
    ((x, _), _) = batches(arrays.check_rows(pa.table({"a": Y, "b": Y}), Y, None, None, None, None))
    np.testing.assert_array_equal(x, np.stack([Y, Y], 1)[:4])
    mixed = pd.DataFrame({"a": [1, 2], "b": [True, False], "c": np.array([0.5, 2], "float32")})
    ((x,),) = batches(arrays.check_rows([mixed], None, None, None, None, None))[0]
    np.testing.assert_array_equal(x, [[1, 1, 0.5], [2, 0, 2]])
    ragged = tf.ragged.constant([[1], [2, 3], [], [4], [5], [6], [7, 8]])
    ((x, _), _) = batches(arrays.check_rows(ragged, Y, None, None, None, None))
    assert x.to_list() == [[1], [2, 3], [], [4]]


def test_columns_of_a_frame():
    frame = pd.DataFrame({"word": list("abc"), "age": [1, 2, 3], "y": [0.5, 1, 2]})
    data = arrays.check_rows(frame, None, None, None, {"words": "word", "numbers": ["age"]}, "y")
    (((x, y)),) = batches(data)
    assert x["words"].numpy().tolist() == [b"a", b"b", b"c"] and x["numbers"].shape == (3, 1) and y.shape == (3,)


REFUSED = {
    "different lengths": ((X, Y[:5]), {}, "x: 7 rows, y: 5 rows"),
    "a generator": ((iter([X]), None), {}, "a generator of type list_iterator"),
    "a list of numbers": (([1.0, 2.0], Y), {}, "Make an array of it"),
    "a mixed frame": ((pd.DataFrame({"a": ["x"] * 7, "b": Y}), Y), {}, "'a' of "),
    "no rows": ((X[:0], Y[:0]), {}, "must hold rows; received: none"),
    "no arrays": (({}, None), {}, "x must hold rows; received: none"),
    "no arrays of labels": ((X, {}), {}, "y must hold rows; received: none"),
    "no columns": ((pd.DataFrame(index=range(7)), Y), {}, "x0 of shape (7, 0)"),
    "no columns of Arrow": ((pa.table({}), Y), {}, "x: 0 rows, y: 7 rows"),
    "weights alone": ((X, None), {"sample_weight": W}, "sample_weight belongs to labels"),
    "both weights": ((X, Y), {"sample_weight": W, "class_weight": {0: 1.0}}, "class_weight is for one output"),
    "columns of arrays": ((X, None), {"features": "a"}, "features= and labels= name columns"),
    "a path alone": (("rows.parquet", None), {}, "need features="),
    "no such path": (("rows.parquet", None), {"features": "a"}, "a path of Parquet that exists"),
    "no such column": ((pd.DataFrame({"a": Y}), None), {"features": "b"}, "features must name columns"),
    "y beside columns": ((pd.DataFrame({"a": Y}), Y), {"features": "a"}, "leave y out"),
    "dates": ((X.astype("datetime64[s]"), Y), {}, "array of numbers or texts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    (x, y), more, text = REFUSED[name]
    arguments = {"sample_weight": None, "class_weight": None, "features": None, "labels": None} | more
    with pytest.raises(ConfigError) as error:
        arrays.check_rows(x, y, **arguments)
    assert text in str(error.value)


def _tf(kind):
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((X.astype("float32"), Y))
    flip = lambda x, y: (x + tf.random.uniform([3]), y)
    return {
        "plain": lambda: rows.map(lambda x, y: (x * 2, y)).cache().batch(3).prefetch(1),
        "shuffled": lambda: rows.shuffle(7).batch(3),
        "endless": lambda: rows.repeat().batch(3),
        "augmented": lambda: rows.map(flip).batch(3),
        "unbatched": lambda: rows,
        "python": lambda: tf.data.Dataset.from_generator(lambda: iter([[1.0]]), output_types=tf.float32),
        "uneven": lambda: rows.batch(2).concatenate(rows.batch(3)),
    }[kind]()


def test_a_tf_data_dataset_is_rows():
    from raytf.fitting import tf_data

    found = tf_data.rows_of(_tf("plain"), "x", {"y": None})
    x, y, w = found.parts
    np.testing.assert_array_equal(x, X * 2)
    assert (found.batch, found.shuffles, w) == (3, False, None) and y.tolist() == Y.tolist()
    assert tf_data.rows_of(_tf("shuffled"), "x", {}).shuffles


@pytest.mark.parametrize(
    "kind, text",
    [
        ("endless", "repeats for ever"),
        ("augmented", "chance in it (RandomUniform)"),
        ("unbatched", "elements that are no batches"),
        ("python", "from_generator"),
        ("uneven", "batches of"),
        ("plain", "Leave them out"),
    ],
)
def test_a_tf_data_dataset_that_is_refused(kind, text):
    from raytf.fitting import tf_data

    with pytest.raises(ConfigError) as error:
        tf_data.rows_of(_tf(kind), "x", {"y": Y if kind == "plain" else None})
    assert text in str(error.value)


def test_validation_split_cuts_texts_as_numbers():
    texts = np.array(["a", "bc", "d", "ef"])
    (x, _, _), (last, _, _) = arrays.split_validation({"t": texts}, np.arange(4), None, 0.25)
    assert np.asarray(x["t"]).tolist() == [b"a", b"bc", b"d"] and np.asarray(last["t"]).tolist() == [b"ef"]
    assert arrays.check_rows(x, None, None, None, None, None).table.num_rows == 3
