"""Trains Keras 3 and TensorFlow models on a Ray cluster. Importing it imports neither, and changes nothing.

* A compiled model: `fit`, `evaluate`, `predict`, with the arguments of the Keras methods.
* A run that is stored, resumes and survives failures: `KerasTrainer`; many runs: `sweep`; its resource needs: `plan`.
* A custom train loop: `TensorflowTrainer`, `get_strategy`, `get_dataset`, `Position`, `ReportCallback`.
* The model of a run: `load_model`, `export`; the events of a run: `run_events`.
* Data and set-up: `read_tfrecords`, `adapt`, `Column`, `TFData`, `TensorflowConfig`, `on_chief`.
* Errors: `ConfigError`, `TrainingError`, `StoppedError`.

Example:
    >>> import raytf
    >>> history = raytf.fit(model, x, y, batch_size=256, epochs=5, num_workers=2)    # `model` holds the weights
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of `_MODULES`, for type checkers and editors
    from ray.train.tensorflow import TensorflowCheckpoint as TensorflowCheckpoint
    from ray.train.tensorflow import prepare_dataset_shard as prepare_dataset_shard
    from ray.train.tensorflow.keras import ReportCheckpointCallback as ReportCheckpointCallback

    from raytf.data.columns import Column as Column
    from raytf.data.preprocessing import adapt as adapt
    from raytf.data.tf_data import TFData as TFData
    from raytf.data.tfrecords import read_tfrecords as read_tfrecords
    from raytf.errors import ConfigError as ConfigError
    from raytf.errors import RaytfError as RaytfError
    from raytf.errors import StoppedError as StoppedError
    from raytf.errors import TrainingError as TrainingError
    from raytf.events import run_events as run_events
    from raytf.fitting.calls import evaluate as evaluate
    from raytf.fitting.calls import fit as fit
    from raytf.fitting.calls import predict as predict
    from raytf.fitting.predictor import Predictor as Predictor
    from raytf.parallel.chief_callbacks import on_chief as on_chief
    from raytf.runtime.settings import TensorflowConfig as TensorflowConfig
    from raytf.train.keras_trainer import KerasTrainer as KerasTrainer
    from raytf.train.plan import plan as plan
    from raytf.train.results import show_result as show_result
    from raytf.train.tensorflow_trainer import TensorflowTrainer as TensorflowTrainer
    from raytf.tune.sweep import sweep as sweep
    from raytf.worker.callbacks import ReportCallback as ReportCallback
    from raytf.worker.context import get_strategy as get_strategy
    from raytf.worker.dataset import Position as Position
    from raytf.worker.dataset import get_dataset as get_dataset
    from raytf.worker.export import export as export
    from raytf.worker.model_loading import load_model as load_model

# Includes the names of Ray's module: code for `ray.train.tensorflow` runs after a change of the import.
_MODULES = {
    "Column": "raytf.data.columns",
    "KerasTrainer": "raytf.train.keras_trainer",
    "TFData": "raytf.data.tf_data",
    "TensorflowTrainer": "raytf.train.tensorflow_trainer",
    "TensorflowConfig": "raytf.runtime.settings",
    "ReportCallback": "raytf.worker.callbacks",
    "ReportCheckpointCallback": "ray.train.tensorflow.keras",
    "TensorflowCheckpoint": "ray.train.tensorflow",
    "adapt": "raytf.data.preprocessing",
    "evaluate": "raytf.fitting.calls",
    "export": "raytf.worker.export",
    "fit": "raytf.fitting.calls",
    "predict": "raytf.fitting.calls",
    "get_dataset": "raytf.worker.dataset",
    "get_strategy": "raytf.worker.context",
    "load_model": "raytf.worker.model_loading",
    "on_chief": "raytf.parallel.chief_callbacks",
    "Position": "raytf.worker.dataset",
    "Predictor": "raytf.fitting.predictor",
    "plan": "raytf.train.plan",
    "read_tfrecords": "raytf.data.tfrecords",
    "run_events": "raytf.events",
    "prepare_dataset_shard": "ray.train.tensorflow",
    "show_result": "raytf.train.results",
    "sweep": "raytf.tune.sweep",
    "ConfigError": "raytf.errors",
    "RaytfError": "raytf.errors",
    "StoppedError": "raytf.errors",
    "TrainingError": "raytf.errors",
}
__all__ = sorted(_MODULES)
__version__ = "0.2.0"


if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module 'raytf' has no attribute {name!r}")
        module, attribute = _MODULES[name], name
        if name == "ReportCallback":
            from raytf.compat import legacy_keras

            if legacy_keras.is_enabled():
                module, attribute = "raytf.worker.legacy_callbacks", "LegacyReportCallback"
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            from raytf.compat import versions

            versions.explain_import_error(error)
            raise


def __dir__() -> list[str]:
    return [*globals(), *__all__]
