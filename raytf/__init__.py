"""raytf trains Keras 3 and TensorFlow models on a Ray cluster. Importing it imports neither TensorFlow nor Ray."""

from __future__ import annotations

import importlib

_PLACES = {
    "Column": "columns",
    "KerasTrainer": "trainer",
    "TensorflowTrainer": "trainer",
    "TensorflowConfig": "backend",
    "ReportCallback": "callbacks",
    "evaluate": "fitting",
    "fit": "fitting",
    "predict": "fitting",
    "get_dataset": "feed",
    "get_strategy": "strategy",
    "load_model": "checkpoint",
    "plan": "planning",
    "show_result": "summary",
    "sweep": "sweeping",
    "ConfigError": "errors",
    "RaytfError": "errors",
    "TrainingError": "errors",
}
__all__ = sorted(_PLACES)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module 'raytf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"raytf.{_PLACES[name]}"), name)


def __dir__():
    return [*globals(), *__all__]
