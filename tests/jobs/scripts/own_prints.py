"""A train loop that prints and warns on every worker, and asks Keras for its lines."""

from ray.train import ScalingConfig

import raytf


def loop():
    import logging
    import warnings

    import keras
    import numpy as np
    import ray.train
    import tensorflow as tf

    strategy = raytf.get_strategy()
    rank = ray.train.get_context().get_world_rank()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((40, 2), "float32")
    print("the same of both")
    for _ in range(2):
        warnings.warn("be careful", stacklevel=1)  # Python itself shows it once
    logging.getLogger("mine").warning("be careful, too")
    tf.get_logger().warning("a warning of TensorFlow's\nof two lines")
    print("this is rank", rank)
    if rank == 1:
        warnings.warn("only here", stacklevel=1)
    model.fit(x, x[:, :1], batch_size=20, epochs=2)
    model.fit(x, x[:, :1], batch_size=20, epochs=1, verbose=2)
    model.fit(x, x[:, :1], batch_size=20, epochs=3, verbose=0)
    model.evaluate(x, x[:, :1], batch_size=20)
    print("end of", rank)


raytf.TensorflowTrainer(loop, scaling_config=ScalingConfig(num_workers=2)).fit()
print("done")
