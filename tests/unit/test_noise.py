"""What users did not cause is not warned of, and what is said to them helps."""

import ast
import logging
import pathlib

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import raytf
from raytf.compat.tensorflow import own_function
from raytf.errors import ConfigError
from raytf.fitting import arrays

# Functions that are traced once, or are the user's own.
_ONCE = {"export.py", "dry_run.py", "transport.py", "call.py", "tensorflow.py"}


def test_raytfs_own_functions_are_no_retracing_of_the_users(caplog):
    def made(of):
        def double(x):
            return 2 * x

        return of(double)

    with caplog.at_level(logging.WARNING, "tensorflow"):
        for _ in range(8):
            assert float(made(own_function)(tf.constant(2.0))) == 4.0
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "tensorflow"):
        for _ in range(8):
            made(tf.function)(tf.constant(2.0))
    assert any("retracing" in record.getMessage() for record in caplog.records), "TensorFlow warns no more: simplify"


def test_all_of_raytfs_own_functions_are_made_so():
    root = pathlib.Path(raytf.__file__).parent
    found = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "tf.function"
    }
    assert found <= _ONCE


@pytest.mark.parametrize(
    "make",
    [
        lambda dense: scipy.sparse.csr_matrix(dense),
        lambda dense: scipy.sparse.coo_array(dense),
        lambda dense: tf.sparse.from_dense(dense),
        lambda dense: tf.RaggedTensor.from_tensor(dense[:, :, None], ragged_rank=1),
    ],
)
def test_the_advice_for_what_is_not_dense_makes_it_dense(make):
    dense = np.arange(6.0).reshape(3, 2)
    x = make(dense)
    with pytest.raises(ConfigError) as caught:
        arrays.of(x, None, None, None, None, None)
    found = eval(str(caught.value).rpartition("Make it dense: ")[2].rstrip("."), {"x": x, "tf": tf})
    np.testing.assert_array_equal(np.asarray(found).reshape(3, 2), dense)
    arrays.of(np.asarray(found), None, None, None, None, None)
