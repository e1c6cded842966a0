"""A checkpoint that the chief writes with tf.train.CheckpointManager; called again, it resumes from there."""

import argparse
import json
import os
import tempfile

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--fail-at", type=int, default=-1)
options = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
task = json.loads(os.environ["TF_CONFIG"])["task"]
is_chief = task["type"] == "chief" or (task["type"] == "worker" and task["index"] == 0)

x = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(32)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input(shape=(4,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.05), "mse")
    epoch = tf.Variable(0, dtype=tf.int64)
    model.optimizer.build(model.trainable_variables)
checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, epoch=epoch)
# the others must write too, as it is a collective call; what they write is thrown away
folder = os.path.join(options.output, "checkpoints") if is_chief else tempfile.mkdtemp()
manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
latest = tf.train.latest_checkpoint(os.path.join(options.output, "checkpoints"))
if latest:
    checkpoint.restore(latest).assert_existing_objects_matched()
    print("restored epoch", int(epoch.numpy()), "iterations", int(model.optimizer.iterations.numpy()))
while int(epoch.numpy()) < 4:
    if int(epoch.numpy()) == options.fail_at and not latest:
        raise SystemExit(7)
    history = model.fit(dataset, epochs=1, verbose=0)
    epoch.assign_add(1)
    manager.save()
    print(f"epoch {int(epoch.numpy())}: loss {history.history['loss'][0]:.6f}")
