"""raytf trains Keras 3 and TensorFlow models on a Ray cluster. Importing it imports neither TensorFlow nor Ray."""

from __future__ import annotations

import importlib

from raytf import quiet, quiet_import

# What is not raytf's own is Ray's: code for `ray.train.tensorflow` runs with the import changed.
_PLACES = {
    "Column": "columns",
    "KerasTrainer": "trainer",
    "TensorflowTrainer": "trainer",
    "TensorflowConfig": "backend",
    "ReportCallback": "callbacks",
    "ReportCheckpointCallback": "ray.train.tensorflow.keras",
    "TensorflowCheckpoint": "ray.train.tensorflow",
    "evaluate": "fitting",
    "fit": "fitting",
    "predict": "fitting",
    "get_dataset": "dataset",
    "get_strategy": "context",
    "load_model": "checkpoint",
    "on_chief": "chief_callbacks",
    "plan": "planning",
    "prepare_dataset_shard": "ray.train.tensorflow",
    "show_result": "summary",
    "sweep": "sweeping",
    "ConfigError": "errors",
    "RaytfError": "errors",
    "TrainingError": "errors",
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
        from raytf import legacy_keras

        place = "legacy_callbacks" if legacy_keras.is_on() else place
    return getattr(importlib.import_module(place if "." in place else f"raytf.{place}"), name)


def __dir__():
    return [*globals(), *__all__]
