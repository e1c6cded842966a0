"""Mixed precision with loss scaling."""

import tensorflow as tf
from digits_data import dataset

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf.keras.mixed_precision.set_global_policy("mixed_float16")

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
train, validation = dataset(64)
history = model.fit(train, validation_data=validation, epochs=2, verbose=2)
print("policy:", model.layers[1].compute_dtype, "scaled:", type(model.optimizer).__name__)
print("loss fell:", history.history["loss"][-1] < history.history["loss"][0])
