"""An LSTM on sequences of varying length, padded in buckets: which of two tokens is more frequent?"""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
sequences = [rng.integers(1, 3, rng.integers(2, 24)) for _ in range(640)]
labels = [int((s == 2).mean() > 0.5) for s in sequences]


def generate():
    yield from zip(sequences, labels)


dataset = tf.data.Dataset.from_generator(
    generate, output_signature=(tf.TensorSpec((None,), tf.int64), tf.TensorSpec((), tf.int64))
)
dataset = dataset.bucket_by_sequence_length(
    lambda sequence, label: tf.shape(sequence)[0],
    bucket_boundaries=[8, 16],
    bucket_batch_sizes=[32, 32, 32],
)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(3, 8, mask_zero=True),
            tf.keras.layers.LSTM(16),
            tf.keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(dataset, epochs=4, verbose=2)
print("loss fell:", history.history["loss"][-1] < history.history["loss"][0])
