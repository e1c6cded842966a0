"""Parameter servers and `fit`, with the options of Kubeflow's sample of that name, as of release 1.9."""

import argparse
import os

import mnist_utils
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--data_path", default="mnist.npz")
parser.add_argument("--dropout", type=float, default=0.9)
parser.add_argument("--batch_size", type=int, default=100)
parser.add_argument("--learning_rate", type=float, default=0.001)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--fake_data", nargs="?", const=True, type=bool, default=False)
options = parser.parse_args()
os.environ["GRPC_FAIL_FAST"] = "use_caller"
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    print("serving")
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    ).join()
strategy = tf.distribute.ParameterServerStrategy(
    resolver, variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, 1)
)
with strategy.scope():
    model = mnist_utils.build_model(options.learning_rate, options.dropout)
train = mnist_utils.rows(3000).repeat().batch(options.batch_size)
history = model.fit(train, epochs=options.epochs, steps_per_epoch=30, verbose=0).history
print("loss fell", history["loss"][-1] < history["loss"][0], "on", model.trainable_variables[0].device)
