"""`raytf.ReportCallback` for Keras 2 as `tf.keras`. Runs on a worker."""

from __future__ import annotations

import os

import numpy as np
import ray.train
import tf_keras

from raytf.storage import scratch
from raytf.storage.checkpoint_files import MODEL


class LegacyReportCallback(tf_keras.callbacks.Callback):
    """Reports metrics and a checkpoint to Ray at the end of every epoch. Every worker needs it.

    The checkpoint contains `model.keras`, as with Ray's `ReportCheckpointCallback`; `raytf.load_model` reads it.

    Args:
        checkpoint: Whether to write a checkpoint with each report. Without one Ray keeps no metrics in the Result.
    """

    def __init__(self, checkpoint: bool = True):
        super().__init__()
        self._checkpoint = checkpoint

    def on_epoch_end(self, epoch, logs=None):
        metrics = {name: np.asarray(value).item() for name, value in (logs or {}).items()} | {"epoch": epoch + 1}
        if not self._checkpoint:
            ray.train.report(metrics)
            return
        with scratch.temporary_folder() as folder:
            # on every worker: reading the statistics of BatchNormalization sums them over all workers
            self.model.save(os.path.join(folder, MODEL))
            chief = ray.train.get_context().get_world_rank() == 0
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder) if chief else None)
