"""ParameterServerStrategy with a ClusterCoordinator: one script for the chief, the workers and the servers."""

import os

os.environ["GRPC_FAIL_FAST"] = "use_caller"

import numpy as np
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    )
    print("serving")
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input(shape=(4,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)


def dataset_fn(context):
    x = np.random.default_rng(context.input_pipeline_id if context else 0).normal(size=(256, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(64).repeat().batch(16)


@tf.function
def step(iterator):
    def replica(features, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features, training=True) - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    features, targets = next(iterator)
    return strategy.run(replica, args=(features, targets))


@tf.function
def per_worker_dataset():
    return strategy.distribute_datasets_from_function(dataset_fn)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset))
for epoch in range(3):
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(40)]
    coordinator.join()
    print(f"epoch {epoch + 1}: loss {losses[-1].fetch():.6f}")
print("on", sorted({v.value.device for v in model.trainable_variables}))
