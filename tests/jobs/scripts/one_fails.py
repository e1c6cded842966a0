"""An assertion of tf.debugging that fails on one worker only, while the others continue to the next collective."""

import json
import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x = np.ones((256, 4), "float32")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input(shape=(4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Check(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 5:
            tf.debugging.assert_less(tf.constant(batch), 5, message="batch is too large on this worker")


model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8), epochs=50, callbacks=[Check()], verbose=0)
