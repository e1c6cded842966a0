"""An MLP under MirroredStrategy."""

import tensorflow as tf
from digits_data import arrays

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
tf.keras.utils.set_random_seed(1)  # a few first weights in a hundred are learned from too slowly
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print("replicas:", strategy.num_replicas_in_sync)

images, labels = (its[:1792] for its in arrays())
train = tf.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1).batch(64)
test = tf.data.Dataset.from_tensor_slices((images[1536:], labels[1536:])).batch(64)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(64,)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(train, epochs=6, verbose=2)
loss, accuracy = model.evaluate(test, verbose=0)
print(f"accuracy: {accuracy:.3f}")
