"""Two steps of Keras over all nodes, as with `raytf run`; `examination` starts this script on each."""

from __future__ import annotations


def main() -> None:
    """Trains a small model for two steps; all workers must end with the same finite weights."""
    import zlib

    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    rows = 8 * strategy.num_replicas_in_sync
    data = tf.data.Dataset.from_tensor_slices((np.ones((rows, 4), "float32"), np.ones((rows, 1), "float32")))
    model.fit(data.repeat().batch(rows), steps_per_epoch=2, epochs=1, verbose=0)
    weights = model.get_weights()
    if not all(np.isfinite(weight).all() for weight in weights):
        raise SystemExit("the weights are not finite after two steps")
    digest = tf.constant(zlib.crc32(b"".join(weight.tobytes() for weight in weights)), tf.int64)
    total = strategy.reduce("SUM", strategy.run(lambda: tf.identity(digest)), axis=None)
    if int(total) != int(digest) * strategy.num_replicas_in_sync:
        raise SystemExit("this worker's weights are not those of all workers after two steps")


if __name__ == "__main__":
    main()
