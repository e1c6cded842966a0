"""A MultiWorkerMirroredStrategy whose workers use raytf's ring: TensorFlow's cluster is not started.

TensorFlow's public API only reduces over workers by its own collectives. These need a server, a coordination service,
and a fixed set of workers. Imports TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,  # its class of the strategy's inner part is replaced while a strategy is built
    device_util,  # names of devices
    multi_worker_util,  # the chief, and numbers of workers, as TensorFlow counts them
    numpy_dataset,  # the device of NumPy arrays
)
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended  # overridden
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce  # reduces with other launchers
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveReplicaLauncher,  # what `CollectiveLauncher` replaces
)
from tensorflow.python.trackable.base import CheckpointInitialValue  # a variable's restored value

from raytf.compat.patching import overrides, patched
from raytf.compat.versions import uses_private


class CollectiveLauncher:
    """Replaces TensorFlow's `CollectiveReplicaLauncher`.

    Args:
        exchange: A `collectives.exchange.Exchange`.
    """

    def __init__(self, exchange: Any):
        self._exchange = exchange

    @overrides(CollectiveReplicaLauncher)
    def can_order_nccl(self) -> bool:
        return True

    @overrides(CollectiveReplicaLauncher)
    def batch_all_reduce(self, input_tensor_packs: Sequence[Sequence], options=None) -> list:
        return [total for pack in input_tensor_packs for total in self._exchange.add(_tensors(pack))]

    @overrides(CollectiveReplicaLauncher)
    def all_gather(self, input_tensor, axis, options=None):
        return self._exchange.gather(_tensors([input_tensor]), axis)[0]

    @overrides(CollectiveReplicaLauncher)
    def all_reduce_indexed_slices(self, input_slices: tf.IndexedSlices, options=None) -> tf.IndexedSlices:
        values, indices = self._exchange.gather([input_slices.values, input_slices.indices])
        return tf.IndexedSlices(values, indices, input_slices.dense_shape)


def _tensors(values: Sequence) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(value) for value in values]


class RingAllReduce(CollectiveAllReduce):
    """Reduces over the ring instead of TensorFlow's collectives, for one device in each worker."""

    def __init__(self, device: str, workers: int, options, exchange: Any):
        super().__init__([device], workers, options)
        self._launchers = [CollectiveLauncher(exchange)]


class RingExtended(CollectiveAllReduceExtended):
    """Implements the strategy over the ring; its devices are those of a single process, "/job:localhost/...".

    Args:
        container_strategy, cluster_resolver, communication_options: As in TensorFlow.
        exchange: A `collectives.exchange.Exchange`.
    """

    def __init__(self, container_strategy, cluster_resolver, communication_options, exchange: Any):
        self._exchange = exchange
        super().__init__(container_strategy, cluster_resolver, communication_options)

    @overrides(CollectiveAllReduceExtended)
    def _initialize_multi_worker(self, cluster_resolver):
        self._cluster_spec = multi_worker_util.normalize_cluster_spec(cluster_resolver.cluster_spec())
        self._task_type, self._task_id = cluster_resolver.task_type, cluster_resolver.task_id
        task = self._cluster_spec, self._task_type, self._task_id
        self._id_in_cluster = multi_worker_util.id_in_cluster(*task)
        self._num_workers = multi_worker_util.worker_count(self._cluster_spec, self._task_type)
        self._is_chief = multi_worker_util.is_chief(*task)
        self._worker_device = device_util.canonicalize("/device:CPU:0")
        self._host_input_device = numpy_dataset.SingleDevice(self._worker_device)
        self._cross_device_ops = self._host_cross_device_ops = RingAllReduce(
            self._worker_device, self._num_workers, self._communication_options, self._exchange
        )
        self._initialize_single_worker((self._worker_device,))
        self._num_devices_per_worker, self._local_device_type = 1, "CPU"
        self._rpc_layer = cluster_resolver.rpc_layer

    @overrides(CollectiveAllReduceExtended)
    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        def initial_value():
            with tf.device(device):
                value = kwargs["initial_value"]
                value = value() if callable(value) else value
                if isinstance(value, CheckpointInitialValue):
                    value = value.wrapped_value
                value = tf.convert_to_tensor(value, kwargs.get("dtype"))
                return value if self._exchange.initializes_locally else self._exchange.broadcast(value)

        return initial_value


@uses_private("tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended")
def ring_extended(exchange: Any):
    """Builds a MultiWorkerMirroredStrategy inside the context without TensorFlow's cluster.

    Args:
        exchange: A `collectives.exchange.Exchange` of the workers, with TensorFlow's ranks.
    """
    extended = functools.partial(RingExtended, exchange=exchange)
    return patched(collective_all_reduce_strategy, "CollectiveAllReduceExtended", extended)
