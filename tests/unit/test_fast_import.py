"""What comes after Keras is imported finds the collector at work, and less often, and other packages when used."""

import os
import subprocess
import sys

import pytest

AFTER = """
import gc
from raytf.compat.fast_import import import_keras, quick

import_keras()
assert gc.isenabled() and gc.get_freeze_count() > 100_000 and gc.get_threshold()[0] == 50_000
gc.set_threshold(700)
import_keras()
assert gc.get_threshold()[0] == 700, "it is imported already"
gc.disable()
with quick():
    with quick():
        pass
assert not gc.isenabled(), "as it was"
"""


@pytest.mark.slow
def test_the_collector_after_the_import():
    subprocess.run([sys.executable, "-c", AFTER], check=True, timeout=120)


DEFERRED = """
import sys
from raytf.compat.fast_import import import_keras

import_keras()
import keras
assert not sys.modules.keys() & {"sklearn", "matplotlib"} and not hasattr(keras.wrappers, "__file__")
from keras import wrappers
from keras.wrappers import SKLearnClassifier
assert "sklearn" in sys.modules and "matplotlib" not in sys.modules
from keras.src.wrappers.sklearn_wrapper import SKLearnClassifier as its
assert SKLearnClassifier is its is keras.wrappers.SKLearnClassifier is wrappers.SKLearnClassifier
assert keras._tf_keras.keras.wrappers.SKLearnRegressor.__name__ == "SKLearnRegressor"
from keras.visualization import plot_image_gallery
from keras.src.visualization.plot_image_gallery import plot_image_gallery as its
assert plot_image_gallery is its is keras.visualization.plot_image_gallery and "matplotlib" in sys.modules
"""


@pytest.mark.slow
def test_packages_that_few_use_of_keras_come_with_their_first_use(tmp_path):
    for name in ("sklearn/__init__", "matplotlib/__init__", "matplotlib/pyplot", "matplotlib/patches"):
        path = tmp_path / f"{name}.py"  # for the packages, which an environment may lack
        path.parent.mkdir(exist_ok=True)
        path.touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", DEFERRED], check=True, timeout=120, env=environment)
