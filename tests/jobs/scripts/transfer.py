"""Transfer learning: train a head on frozen layers, then unfreeze them and compile again."""

import tensorflow as tf
from digits_data import dataset

strategy = tf.distribute.MultiWorkerMirroredStrategy()
train, validation = dataset(64)
with strategy.scope():
    base = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Flatten(),
        ]
    )
    base.trainable = False
    inputs = tf.keras.Input((8, 8, 1))
    outputs = tf.keras.layers.Dense(10)(base(inputs, training=False))
    model = tf.keras.Model(inputs, outputs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
before = [w.numpy().copy() for w in base.weights]
model.fit(train, epochs=2, verbose=2)
print("frozen stayed:", all((w.numpy() == b).all() for w, b in zip(base.weights, before)))

base.trainable = True
with strategy.scope():
    model.compile(tf.keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
model.fit(train, validation_data=validation, epochs=1, verbose=2)
print("unfrozen changed:", bool((base.weights[0].numpy() != before[0]).any()))
