"""Two steps of Keras over all nodes, as with `raytf run`; `examination` starts this script on each."""

from __future__ import annotations


def main() -> None:
    """Trains a small model for two steps; every worker must end with finite weights."""
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
    if not all(np.isfinite(weight).all() for weight in model.get_weights()):
        raise SystemExit("the weights are not finite after two steps")


if __name__ == "__main__":
    main()
