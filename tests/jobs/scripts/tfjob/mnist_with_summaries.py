"""One worker that trains and writes summaries, with the options of Kubeflow's sample of that name."""

import argparse

import mnist_utils
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--fake_data", nargs="?", const=True, type=bool, default=False)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--learning_rate", type=float, default=0.001)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.9)
parser.add_argument("--data_path", default="mnist.npz")
parser.add_argument("--log_dir", default="/tmp/tensorflow/mnist/logs/mnist_with_summaries")
options = parser.parse_args()
summaries = tf.keras.callbacks.TensorBoard(log_dir=options.log_dir, histogram_freq=1)
train, validation = mnist_utils.rows(3000).batch(options.batch_size), mnist_utils.rows(300).batch(options.batch_size)
model = mnist_utils.build_model(options.learning_rate, options.dropout)
history = model.fit(train, epochs=options.epochs, validation_data=validation, callbacks=[summaries], verbose=0).history
print("learning rate", options.learning_rate, "fell", history["loss"][-1] < history["loss"][0])
