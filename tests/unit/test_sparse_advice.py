"""Messages for users of sparse and ragged arrays contain a fix that works."""

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from raytf.errors import ConfigError
from raytf.fitting import arrays


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
        arrays.check_rows(x, None, None, None, None, None)
    found = eval(str(caught.value).rpartition("Make it dense: ")[2].rstrip("."), {"x": x, "tf": tf})
    np.testing.assert_array_equal(np.asarray(found).reshape(3, 2), dense)
    arrays.check_rows(np.asarray(found), None, None, None, None, None)
