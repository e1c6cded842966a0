"""Shapes are learnt without reading: what gives its rows once, or counts its readings, is read as in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.parallel import epoch_iterator


class Iterator:
    """What Keras has of a dataset for an epoch."""

    def __init__(self, dataset, adapter=None):
        self._distributed_dataset, self.data_adapter = dataset, adapter


def once():
    """A generator of batches whose widths differ, and what it has been asked for."""
    asked = []

    def generate():
        asked.append(1)
        for width in (2, 3):
            yield np.zeros((4, width, 3)), np.zeros((4, 1))

    return generate, asked


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_no_row_is_read_where_ranks_are_known(kind):
    generate, asked = once()
    first = {
        "dense": tf.TensorSpec((None, None, 3), tf.float64),
        "ragged": tf.RaggedTensorSpec((None, None, 3), tf.float64, 1),
        "sparse": tf.SparseTensorSpec((None, None, 3), tf.float64),
    }[kind]
    signature = (first, tf.TensorSpec((None, 1), tf.float64))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    x, y = epoch_iterator._example_batch(Iterator(dataset), tf.distribute.get_strategy(), eager=False)
    assert isinstance(x, keras.KerasTensor) and x.shape == (None, None, 3) and y.shape == (2, 1)
    assert not asked


def test_what_keras_has_read_of_a_generator_is_taken_where_every_size_is_needed():
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    generate, _ = once()
    adapter = GeneratorDataAdapter(generate())
    dataset = adapter.get_tf_dataset()
    x, y = epoch_iterator._example_batch(Iterator(dataset, adapter), tf.distribute.get_strategy(), eager=True)
    assert x.shape == (4, 2, 3) and y.shape == (4, 1)
    assert [x.shape[1] for x, _ in dataset] == [2, 3], "it still gives all"


def test_what_must_be_read_is_warned_of():
    generate, asked = once()
    dataset = tf.data.Dataset.from_generator(generate, output_types=(tf.float64, tf.float64))
    with pytest.warns(UserWarning, match="output_signature"):
        epoch_iterator._example_batch(Iterator(dataset), tf.distribute.get_strategy(), eager=False)
    assert asked
