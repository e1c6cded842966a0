"""A training loop of its own: strategy.run, strategy.reduce and experimental_distribute_dataset."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
GLOBAL_BATCH_SIZE = 32 * strategy.num_replicas_in_sync

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 4)).astype("float32")
y = (x @ np.array([[1.0], [-2.0], [3.0], [0.5]]) + 0.7).astype("float32")
dataset = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512, seed=1).batch(GLOBAL_BATCH_SIZE)
)

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input(shape=(4,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1)
    loss_object = tf.keras.losses.MeanSquaredError(reduction="none")


def train_step(inputs):
    features, targets = inputs
    with tf.GradientTape() as tape:
        per_example = loss_object(targets, model(features, training=True))
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH_SIZE)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def distributed_train_step(inputs):
    per_replica = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)


for epoch in range(8):
    total, batches = 0.0, 0
    for batch in dataset:
        total += distributed_train_step(batch)
        batches += 1
    print(f"epoch {epoch + 1}: loss {float(total) / batches:.5f}")
print("weights:", np.round(model.weights[0].numpy().ravel(), 3).tolist(), "converged:", float(total) / batches < 1e-3)
