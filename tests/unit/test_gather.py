import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data import columns, gather, reader
from raytf.data.columns import Column, Columns
from raytf.data.reader import sources
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
    stacked = gather.source(blocks, Columns.from_spec(["a", "b", "c"], "x")).gather(
        gather.RowLocations(block, rows - starts[block])
    )[0]
    np.testing.assert_array_equal(stacked, data[rows])
    assert stacked.dtype == np.float32
    assert not count or stacked.ctypes.data % gather.ALIGNMENT == 0
    single = gather.source(blocks, Columns.from_spec("b", "x")).gather(
        gather.RowLocations(block, rows - starts[block])
    )[0]
    np.testing.assert_array_equal(single, data[rows, 1])


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "int32", "int64", "uint32", "float16", "float32", "float64"]
)
def test_a_number_keeps_its_type(dtype):
    source = gather.source([table(x=pa.array(np.arange(5).astype(dtype)))], Columns.from_spec("x", "x"))
    assert source.dtype == np.dtype(dtype) and source.shape == ()


def test_tensors_lists_booleans_and_times():
    images = np.arange(24, dtype="uint8").reshape(2, 3, 4)
    kinds = table(
        image=pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        vector=pa.array([[1.0, 2.0], [3.0, 4.0]]),
        matrix=pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        fixed=pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
        flag=pa.array([True, False]),
        pixels=pa.array([bytes(range(6)), bytes(range(6, 12))], pa.binary(6)),
        code=pa.array(["b", "a"]).dictionary_encode(),
        time=pa.array([0, 10**9], pa.timestamp("ns")),
    )

    def column_array(table, name, **options):
        return gather.column_array(table, Column(name, **options))

    np.testing.assert_array_equal(column_array(kinds, "image"), images)
    assert column_array(kinds, "vector").tolist() == [[1, 2], [3, 4]]
    assert column_array(kinds, "matrix").shape == (2, 2, 2)
    assert column_array(kinds, "fixed").tolist() == [[1, 2], [3, 4]]
    assert column_array(kinds, "flag").tolist() == [True, False]
    assert column_array(kinds, "flag", dtype="float32").dtype == np.float32
    assert column_array(kinds, "pixels", shape=(2, 3), dtype="uint8").tolist()[1] == [[6, 7, 8], [9, 10, 11]]
    assert column_array(kinds, "time").tolist() == [0, 10**9]


def gathered(array, spec, rows=(1, 0, 1)):
    """Returns rows of a column that is stored in two tables."""
    cut = len(array) // 2
    tables = [table(x=array[:cut]), table(x=array[cut:])]
    rows = np.array(rows, int)
    return gather.source(tables, Columns.from_spec(spec, "x")).gather(
        gather.RowLocations((rows >= cut).astype(int), rows - (rows >= cut) * cut)
    )


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_string_is_no_part_of_a_vector_and_may_be_an_input(kind):
    data = table(a=[1.0, 2.0], s=pa.array(["x", "y"]).cast(kind))
    with pytest.raises(ConfigError, match=r"single numbers; received: 's' of type .*features=\{.*'s': 's'"):
        gather.stack(data, Columns.from_spec(["a", "s"], "x"))


def test_strings_and_bytes_are_whole():
    assert gathered(pa.array(["a", "bc", ""]), "x", (2, 1, 1))[0].tolist() == ["", "bc", "bc"]
    assert gathered(pa.array([b"a\0\0", b""]), "x")[0].tolist() == [b"", b"a\0\0", b""]
    assert gathered(pa.array(["u", "v", "u"]).dictionary_encode(), "x", (1, 2))[0].tolist() == ["v", "u"]


@given(st.lists(st.lists(st.integers(-100, 100), max_size=7), min_size=2, max_size=30), st.data())
def test_lists_of_different_lengths_in_any_order(lists, data):
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=40))
    values, lengths = gathered(pa.array(lists, pa.list_(pa.int32())), Column("x", ragged=True), rows)
    assert values.dtype == np.int32
    assert [part.tolist() for part in np.split(values, np.cumsum(lengths))[:-1]] == [lists[row] for row in rows]


def test_nulls_are_filled_where_a_fill_value_is_given():
    column = pa.array([1, None, 3], pa.int64())
    filled = gathered(column, Column("x", fill=-1), (0, 1, 2))[0]
    assert filled.tolist() == [1, -1, 3] and filled.dtype == np.int64
    assert gathered(pa.array(["a", None]), Column("x", fill="?"), (1,))[0].tolist() == ["?"]
    lists = gathered(pa.array([[1], None]), Column("x", fill=[], ragged=True), (1, 0))
    assert lists[0].tolist() == [1] and lists[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("array", "spec", "rule"),
    [
        (pa.array([1, None]), "x", "no nulls, unless"),
        (pa.array([1, None]), Column("x", fill="a"), "fill must be a value of the column's type"),
        (pa.array([[1], [1, 2]]), "x", "one length, unless"),
        (pa.array([[1], [1, 2]]), Column("x", pad=1), "at least the length of the longest list"),
        (pa.array([1, 2]), Column("x", ragged=True), "for columns of lists"),
        (pa.array([["a"], ["b"]]), Column("x", ragged=True), "must hold numbers"),
        (pa.array([{"a": 1}, {"a": 2}]), "x", "must hold numbers"),
        (pa.array([b"abc", b"abc"], pa.binary(3)), Column("x", shape=(2,), dtype="uint8"), "take the 3 bytes of a row"),
    ],
)
def test_what_has_no_tensor_is_refused(array, spec, rule):
    with pytest.raises(ConfigError, match=rule):
        gather.source([table(x=array)], Columns.from_spec(spec, "x"))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"ragged": True, "pad": 3}, "exclude each other"),
        ({"pad": 0}, "length of at least 1"),
        ({"bucket": True}, "needs ragged or pad"),
        ({"image": (3, 3)}, "height, width, channels"),
        ({"shape": (3,)}, "needs dtype"),
        ({"dtype": "float33"}, "one of NumPy's"),
    ],
)
def test_options_that_do_not_go_together(options, rule):
    with pytest.raises(ConfigError, match=rule):
        Column("x", **options)


def test_options_as_lists_and_numbers_of_numpy():
    """A list, as of a JSON file, is no key; and a length of NumPy's is one."""
    made = Column("x", image=[2, 2, 3], fill=np.array([[1], [2]]))
    assert made == Column("x", image=(2, 2, 3), fill=((1,), (2,))) and hash(made) == hash(made)
    padded = Column("x", pad=np.int64(4))
    assert padded == Column("x", pad=4) and type(padded.pad) is int
    lists, spec = table(x=pa.array([[1], None])), Columns.from_spec(Column("x", ragged=True, fill=[]), "x")
    source, _ = sources([lists], [spec, spec])
    assert source.lengths(gather.RowLocations(np.zeros(2, int), np.arange(2))).tolist() == [1, 0]


def test_numbers_of_a_later_block_never_change():
    whole, part = pa.array([[1], [2]]), pa.array([[0.5]])
    spec = Columns.from_spec(Column("x", ragged=True), "x")
    with pytest.raises(ConfigError, match="one shape and dtype; received: float64 after int64 in 'x'"):
        gather.source([table(x=whole), table(x=part)], spec)
    values, _ = gather.source([table(x=part), table(x=whole)], spec).gather(
        gather.RowLocations(np.array([1, 0]), np.array([1, 0]))
    )
    assert values.tolist() == [2, 0.5]


def test_rows_of_a_stream_never_change(monkeypatch):
    """Its first rows say what TensorFlow converts all rows to."""
    spec = [Columns.from_spec("x", "x")]
    known = sources([table(x=[1, 2])], spec)
    rows = reader.StreamRows(list, 0, 2, spec, known)
    monkeypatch.setattr(rows, "_taken", lambda wanted: [(0, wanted, table(x=[0.5, 1.5]))])
    with pytest.raises(ConfigError, match="float64 after int64 in 'x'"):
        rows.fetch(np.arange(2))
    spec = [Columns.from_spec(Column("x", fill=0), "x")]
    known = sources([table(x=pa.array([1.0, 2.0], pa.float32()))], spec)
    rows = reader.StreamRows(list, 0, 2, spec, known)
    monkeypatch.setattr(rows, "_taken", lambda wanted: [(0, wanted, table(x=pa.nulls(2)))])
    rows.fetch(np.arange(2))  # nulls alone have no type


def test_texts_in_several_chunks():
    """One array of Arrow's usual type holds 2 GiB."""
    parts = pa.chunked_array([["a", "b"], ["c"]])
    source = gather.source([pa.table({"x": parts})], Columns.from_spec("x", "x"))
    assert source.gather(gather.RowLocations(np.zeros(3, int), np.array([2, 0, 1])))[0].tolist() == ["c", "a", "b"]
    assert pa.types.is_large_string(source._parts[0].type)


def test_blocks_are_never_handed_out():
    """What is gathered is stored in memory of its own, as TensorFlow may write into what it is given."""
    block = table(x=np.arange(64.0))
    view = gather.column_array(block, Column("x"))
    (copied,) = gather.source([block], Columns.from_spec("x", "x")).gather(
        gather.RowLocations(np.zeros(64, int), np.arange(64))
    )
    assert not np.shares_memory(view, copied)


def test_specs():
    a, b = Column("a"), Column("b", fill=0)
    assert columns.parse("a", "features") == Columns((a,), False)
    assert columns.parse(["a", b], "features") == Columns((a, b), True)
    assert columns.parse({"i": "a", "j": ["b"]}, "features") == {
        "i": Columns((a,), False),
        "j": Columns((Column("b"),), True),
    }
    for wrong in ([], 3, ["a", 1]):
        with pytest.raises(ConfigError, match="features must be a column"):
            columns.parse(wrong, "features")
    with pytest.raises(ConfigError, match="which has 'a', 'b'; received: 'c'"):
        columns.check_names(columns.parse("c", "features"), ["a", "b"], "features")
