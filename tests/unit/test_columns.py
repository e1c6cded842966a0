import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf import columns
from raytf.columns import Columns, Source, column_array
from raytf.errors import ConfigError


def table(**arrays):
    return pa.table(arrays)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.integers(0, 80))
def test_gather_takes_rows_from_blocks_in_any_order(sizes, seed, count):
    rng = np.random.default_rng(seed)
    data = rng.normal(size=(sum(sizes), 3)).astype("float32")
    starts = np.cumsum([0, *sizes])
    blocks = [table(a=data[s:e, 0], b=data[s:e, 1], c=data[s:e, 2]) for s, e in itertools.pairwise(starts)]
    rows = rng.integers(0, len(data), count)
    block = np.searchsorted(starts, rows, side="right") - 1
    stacked = Source(blocks, Columns(("a", "b", "c"), True)).gather(block, rows - starts[block])
    np.testing.assert_array_equal(stacked, data[rows])
    assert stacked.dtype == np.float32
    assert not count or stacked.ctypes.data % columns.ALIGNMENT == 0
    single = Source(blocks, Columns(("b",), False)).gather(block, rows - starts[block])
    np.testing.assert_array_equal(single, data[rows, 1])


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "int32", "int64", "uint32", "float16", "float32", "float64"]
)
def test_a_number_keeps_its_type(dtype):
    source = Source([table(x=pa.array(np.arange(5).astype(dtype)))], Columns(("x",), False))
    assert source.dtype == np.dtype(dtype) and source.shape == ()


def test_tensors_lists_booleans_strings_and_times():
    images = np.arange(24, dtype="uint8").reshape(2, 3, 4)
    kinds = table(
        image=pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        vector=pa.array([[1.0, 2.0], [3.0, 4.0]]),
        matrix=pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        fixed=pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
        flag=pa.array([True, False]),
        text=pa.array(["a", "bc"]),
        raw=pa.array([b"a\0\0", b""]),
        time=pa.array([0, 10**9], pa.timestamp("ns")),
    )
    np.testing.assert_array_equal(column_array(kinds, "image"), images)
    assert column_array(kinds, "vector").tolist() == [[1, 2], [3, 4]]
    assert column_array(kinds, "matrix").shape == (2, 2, 2)
    assert column_array(kinds, "fixed").tolist() == [[1, 2], [3, 4]]
    assert column_array(kinds, "flag").tolist() == [True, False]
    assert column_array(kinds, "text").tolist() == ["a", "bc"]
    assert column_array(kinds, "raw").tolist() == [b"a\0\0", b""]
    assert column_array(kinds, "time").tolist() == [0, 10**9]


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (pa.array([1, None]), "no nulls"),
        (pa.array([[1], [1, 2]]), "one length"),
        (pa.array([{"a": 1}, {"a": 2}]), "must hold numbers"),
    ],
)
def test_what_has_no_tensor_is_refused(array, rule):
    with pytest.raises(ConfigError, match=rule):
        column_array(table(x=array), "x")


def test_blocks_are_never_handed_out():
    """What is gathered lies in memory of its own, as TensorFlow may write into what it is given."""
    block = table(x=np.arange(64.0))
    view = column_array(block, "x")
    gathered = Source([block], Columns(("x",), False)).gather(np.zeros(64, int), np.arange(64))
    assert not np.shares_memory(view, gathered)


def test_specs():
    assert columns.parse("a", "features") == Columns(("a",), False)
    assert columns.parse(["a", "b"], "features") == Columns(("a", "b"), True)
    assert columns.parse({"i": "a", "j": ["b"]}, "features") == {
        "i": Columns(("a",), False),
        "j": Columns(("b",), True),
    }
    for wrong in ([], 3, ["a", 1]):
        with pytest.raises(ConfigError, match="features must be a column"):
            columns.parse(wrong, "features")
    with pytest.raises(ConfigError, match="which has 'a', 'b'; received: 'c'"):
        columns.check_names(columns.parse("c", "features"), ["a", "b"], "features")
