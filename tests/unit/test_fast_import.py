"""What Keras imports later still works."""

import subprocess
import sys

import pytest

LATER = """
import sys
from raytf.compat.fast_import import import_keras

import_keras()
assert not {"sklearn", "matplotlib"} & set(sys.modules)

import keras
import numpy as np
from keras.wrappers import SKLearnRegressor
from sklearn.base import RegressorMixin

assert issubclass(SKLearnRegressor, RegressorMixin)
keras.visualization.plot_image_gallery(np.zeros((4, 8, 8, 3)), rows=2, cols=2, value_range=(0, 1), path=sys.argv[1])
try:
    keras.wrappers.NoSuchThing
except AttributeError as error:
    assert "NoSuchThing" in str(error)
else:
    raise AssertionError("no such attribute")
"""


@pytest.mark.slow
def test_what_comes_later_still_works(tmp_path):
    picture = tmp_path / "gallery.png"
    subprocess.run([sys.executable, "-c", LATER, str(picture)], check=True, timeout=120)
    assert picture.stat().st_size > 0
