"""raytf trains Keras 3 and TensorFlow models on a Ray cluster. Importing it imports neither TensorFlow nor Ray."""

from __future__ import annotations

import importlib

from raytf.console import quiet, quiet_import

# What is not raytf's own is Ray's: code for `ray.train.tensorflow` runs with the import changed.
_PLACES = {
    "Column": "raytf.data.columns",
    "KerasTrainer": "raytf.train.trainer",
    "TensorflowTrainer": "raytf.train.trainer",
    "TensorflowConfig": "raytf.train.backend",
    "ReportCallback": "raytf.worker.callbacks",
    "ReportCheckpointCallback": "ray.train.tensorflow.keras",
    "TensorflowCheckpoint": "ray.train.tensorflow",
    "evaluate": "raytf.fitting.calls",
    "fit": "raytf.fitting.calls",
    "predict": "raytf.fitting.calls",
    "get_dataset": "raytf.worker.dataset",
    "keep_token": "raytf.collectives.ring",
    "get_strategy": "raytf.worker.context",
    "load_model": "raytf.worker.checkpoint",
    "on_chief": "raytf.parallel.chief_callbacks",
    "plan": "raytf.train.plan",
    "prepare_dataset_shard": "ray.train.tensorflow",
    "show_result": "raytf.train.results",
    "sweep": "raytf.tune.sweep",
    "ConfigError": "raytf.errors",
    "RaytfError": "raytf.errors",
    "TrainingError": "raytf.errors",
}
__all__ = sorted(_PLACES)
__version__ = "0.1.0"

quiet.ray_starts()
quiet_import.when_imported()


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module 'raytf' has no attribute {name!r}")
    place = _PLACES[name]
    if name == "ReportCallback":
        from raytf.compat import legacy_keras

        place = "raytf.worker.legacy_callbacks" if legacy_keras.is_on() else place
    return getattr(importlib.import_module(place), name)


def __dir__():
    return [*globals(), *__all__]
