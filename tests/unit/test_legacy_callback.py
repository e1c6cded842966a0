"""`raytf.ReportCallback` of a process whose `tf.keras` is Keras 2."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_it_is_a_callback_of_keras_2():
    pytest.importorskip("tf_keras")
    script = "import tf_keras, raytf; assert issubclass(raytf.ReportCallback, tf_keras.callbacks.Callback)"
    environment = os.environ | {"TF_USE_LEGACY_KERAS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
