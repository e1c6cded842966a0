"""Parts of global batches with sparse rows: each replica gets its rows, or none, and knows all other dimensions."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import worker_part


class Group:
    """What `cut` asks of a strategy: `workers` with one device each."""

    def __init__(self, workers):
        self.num_replicas_in_sync = workers
        self.extended = self
        self.worker_devices = ["/cpu:0"]


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    workers=st.integers(1, 4),
    seed=st.integers(0, 9),
    known=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_parts_of_all_workers_are_the_global_batches(sizes, workers, seed, known):
    random = np.random.default_rng(seed)
    batches = [random.integers(0, 3, (size, 3)).astype("float64") for size in sizes]

    def generate():
        for dense in batches:
            yield tf.sparse.from_dense(dense), tf.RaggedTensor.from_tensor(dense, padding=0), dense.sum(1)

    signature = (
        tf.SparseTensorSpec((None, 3), tf.float64),
        tf.RaggedTensorSpec((None, None), tf.float64, 1, tf.int64),
        tf.TensorSpec((None,), tf.float64),
    )
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    if known:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(sizes)))
    assert worker_part.has_sparse(dataset)
    parts = [worker_part.cut(dataset, Group(workers), worker) for worker in range(workers)]
    assert all(part.cardinality() == dataset.cardinality() for part in parts)
    assert all(part.element_spec[0].shape.as_list() == [None, 3] for part in parts)
    assert all(map(worker_part.is_worker_part, parts))
    for dense, *its in zip(batches, *parts, strict=True):
        assert [x.dense_shape.numpy()[1] for x, _, _ in its] == [3] * workers
        np.testing.assert_array_equal(np.concatenate([tf.sparse.to_dense(x) for x, _, _ in its]), dense)
        lists = [row for _, ragged, _ in its for row in ragged.to_list()]
        assert lists == tf.RaggedTensor.from_tensor(dense, padding=0).to_list()
        np.testing.assert_array_equal(np.concatenate([y for _, _, y in its]), dense.sum(1))


@pytest.mark.parametrize("rows", [0, 2])
def test_a_replica_without_rows_computes_on_a_row_of_the_right_width(rows):
    from raytf.parallel.step import with_placeholder

    sparse = tf.sparse.slice(tf.sparse.from_dense(np.eye(4)), [0, 0], [rows, 4])
    ragged = tf.ragged.constant([[1], [2, 3]])[:rows]
    x, lists = with_placeholder((sparse, ragged), tf.constant(rows))
    assert x.dense_shape.numpy().tolist() == [max(rows, 1), 4]
    assert lists.nrows() == max(rows, 1) and lists.to_list() == (ragged.to_list() or [[]])
