"""Tune's Keras callback reports to a trial: on a worker it would report nothing, so it is refused by name."""

import keras
import numpy as np
import pytest
from ray.train.tensorflow.keras import ReportCheckpointCallback
from ray.tune.integration.keras import TuneReportCheckpointCallback

import raytf
from raytf.compat import patching
from raytf.errors import ConfigError
from raytf.parallel import trainer
from raytf.validation import check_callbacks


class Own(TuneReportCheckpointCallback):
    """A user's subclass."""


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize("kind", [TuneReportCheckpointCallback, Own])
def test_it_is_refused_by_name_with_what_to_use(kind):
    for given in ([keras.callbacks.History(), kind()], kind(), keras.callbacks.CallbackList([kind()]), [[kind()]]):
        with pytest.raises(ConfigError, match=r"TuneReportCheckpointCallback.*raytf\.ReportCallback"):
            check_callbacks(given)
    for given in (None, [], [keras.callbacks.History(), ReportCheckpointCallback()], keras.callbacks.CallbackList()):
        check_callbacks(given)


def test_raytf_fit_refuses_it_before_a_worker_starts():
    x = np.zeros((4, 2))
    with pytest.raises(ConfigError, match=r"ray\.tune\.report"):
        raytf.fit(model(), x, x[:, :1], callbacks=[TuneReportCheckpointCallback()])


def test_fit_in_a_worker_refuses_it():
    patching.replacements()  # the trainer's are among them
    with pytest.raises(ConfigError, match="workers run outside"):
        trainer._fit(None, model(), np.zeros((4, 2)), np.zeros((4, 1)), callbacks=[TuneReportCheckpointCallback()])
