"""A GAN on a real Ray: two optimizers, a `train_step` and no `call`, as in Keras' examples."""

from __future__ import annotations

import io
import os
import zipfile

import h5py
import numpy as np
import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.train import plan as plan_module
from tests.cluster import models

pytestmark = pytest.mark.usefixtures("ray_cluster")


def build_gan(config):
    import keras
    import tensorflow as tf

    class GAN(keras.Model):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator, self.generator = discriminator, generator
            self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

        @property
        def metrics(self):
            return [self.d_metric, self.g_metric]

        def train_step(self, data):
            noise, real = tf.nest.map_structure(lambda x: tf.cast(x, "float64"), data)
            ones, zeros = tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])
            with tf.GradientTape() as tape:
                predicted = self.discriminator(tf.concat([self.generator(noise), real], 0))
                d_loss = self.loss_fn(tf.concat([ones, zeros], 0), predicted)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                g_loss = self.loss_fn(zeros, self.discriminator(self.generator(noise)))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
            self.d_metric.update_state(d_loss)
            self.g_metric.update_state(g_loss)
            return {m.name: m.result() for m in self.metrics}

    keras.config.set_floatx("float64")
    part = lambda *sizes: keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(n, "tanh") for n in sizes)])
    model = GAN(part(8, 1), part(8, 3))
    adam = lambda: keras.optimizers.Adam(0.01)
    model.compile(adam(), adam(), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def trainer(folder, name, workers, kill=None):
    return raytf.KerasTrainer(
        build_gan,
        config={"batch_size": 24, "epochs": 3},
        datasets={"train": models.dataset()},
        features=models.FEATURES[:3],
        labels=models.FEATURES[3:],
        callbacks=None if kill is None else lambda config: [models.kill_once(kill, 1, 1, 2)],
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
        progress=False,
    )


def saved(result) -> dict:
    """All arrays in the file of a run's last checkpoint: weights, and the state of each optimizer."""
    found = {}
    with result.checkpoint.as_directory() as folder, zipfile.ZipFile(os.path.join(folder, "model.keras")) as archive:
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            file.visititems(lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gan_trains_as_on_one_worker_and_resumes_after_a_kill(tmp_path):
    """97 rows in batches of 24: in the last step one worker has no row. A kill changes no bit of either optimizer."""
    import keras

    keras.config.set_floatx("float64")  # what is loaded here is built here
    keras.config.set_dtype_policy("float64")
    one, two = (trainer(tmp_path, f"w{n}", n).fit() for n in (0, 2))  # none: one, which is this process
    killed = trainer(tmp_path, "killed", 2, str(tmp_path / "marker")).fit()
    assert (tmp_path / "marker").exists(), "no kill happened"
    first, second, third = saved(one), saved(two), saved(killed)
    assert {name.split("/")[0] for name in first} >= {"d_optimizer", "g_optimizer"}
    assert {int(values[f"{name}/vars/0"]) for values in (first, second) for name in ("d_optimizer", "g_optimizer")} == {
        15
    }
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=0, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(third[name], second[name], err_msg=name)
    for column in ("d_loss", "g_loss"):
        np.testing.assert_allclose(two.metrics_dataframe[column], one.metrics_dataframe[column], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(killed.metrics_dataframe[column], two.metrics_dataframe[column])
    loaded = raytf.load_model(killed)
    np.testing.assert_array_equal(loaded.generator.get_weights()[0], third["generator/layers/dense/vars/0"])


def test_a_plan_counts_all_optimizers(tmp_path):
    plan = plan_module.plan(trainer(tmp_path, "plan", 2))
    floats = 2 * 8 * (3 * 8 + 8 + 8 + 1 + 3 * 8 + 8 + 8 * 3 + 3)  # Adam's two slots, in float64
    assert plan.optimizer_bytes > floats
    assert plan.gradient_bytes == floats // 2
