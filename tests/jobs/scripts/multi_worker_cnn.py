"""A CNN through `fit` under MultiWorkerMirroredStrategy, with the usual callbacks."""

import argparse
import json
import os

import tensorflow as tf
from digits_data import dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--output", default="output")
options = parser.parse_args()

task = json.loads(os.environ["TF_CONFIG"])["task"]
strategy = tf.distribute.MultiWorkerMirroredStrategy()

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(0.2),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.01),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"learning rate of epoch {epoch + 1}: {float(model.optimizer.learning_rate):.6f}")


callbacks = [
    tf.keras.callbacks.TensorBoard(os.path.join(options.output, "logs")),
    tf.keras.callbacks.ModelCheckpoint(os.path.join(options.output, "best.keras"), save_best_only=True),
    tf.keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=10.0),
    tf.keras.callbacks.EarlyStopping(patience=2, min_delta=10.0, restore_best_weights=True),
    PrintLR(),
]
train, validation = dataset(64)
history = model.fit(
    train,
    validation_data=validation,
    epochs=options.epochs,
    callbacks=callbacks,
    verbose=2 if task["index"] == 0 else 0,
)
print("epochs:", len(history.history["loss"]), "weights:", f"{sum(float(tf.reduce_sum(w)) for w in model.weights):.5f}")
