"""Nulls anywhere in a column are refused, or filled; never numbers that nobody wrote."""

import numpy as np
import pyarrow as pa
import pytest

from raytf.data import gather
from raytf.data.columns import Column, Columns, parse
from raytf.data.reader import sources as sources_of
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError

PAIRS, I32 = pa.list_(pa.int32(), 2), pa.int32()


def tensors(storage):
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(I32, [2]), storage)


def dictionary(indices):
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array([5, None, 6]))


def gathered(tables, spec):
    source = gather.source(tables, Columns.from_spec(spec, "x"))
    table = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    row = np.concatenate([np.arange(len(t)) for t in tables])
    return source.gather(gather.RowLocations(table, row))


# (column with nulls, options, what replaces them, what comes then)
CASES = {
    "ragged": (pa.array([[6, None, 8], [9]]), {"ragged": True}, -1, [[6, -1, 8, 9], [3, 1]]),
    "pad": (pa.array([[6, None, 8], [9]]), {"pad": 3}, -1, [[6, -1, 8, 9], [3, 1]]),
    "pad batch": (pa.array([[6, None, 8], [9]]), {"pad": "batch"}, -1, [[6, -1, 8, 9], [3, 1]]),
    "large": (pa.array([[6, None], [9]], pa.large_list(I32)), {"ragged": True}, 0, [[6, 0, 9], [2, 1]]),
    "null list": (pa.array([[6], None]), {"ragged": True}, [], [[6], [1, 0]]),
    "one length": (pa.array([[6, None], [7, 9]]), {}, 0, [[[6, 0], [7, 9]]]),
    "fixed size": (pa.array([[6, None], [7, 9]], PAIRS), {}, 0, [[[6, 0], [7, 9]]]),
    "fixed size, null list": (pa.array([[6, 7], None], PAIRS), {}, [0, 1], [[[6, 7], [0, 1]]]),
    "lists of lists": (pa.array([[[1, None]], [[3, 4]]]), {}, 0, [[[[1, 0]], [[3, 4]]]]),
    "null list in a list": (pa.array([[None], [[3, 4]]], pa.list_(pa.list_(I32))), {}, [1, 2], [[[[1, 2]], [[3, 4]]]]),
    "tensor": (tensors(pa.array([[1, None], [3, 4]], PAIRS)), {}, 0, [[[1, 0], [3, 4]]]),
    "null tensor": (tensors(pa.array([None, [3, 4]], PAIRS)), {}, [8, 9], [[[8, 9], [3, 4]]]),
    "strings in lists": (pa.array([["a", None], ["b", ""]]), {}, "?", [[["a", "?"], ["b", ""]]]),
    "booleans in lists": (pa.array([[True, None]]), {}, False, [[[True, False]]]),
    "dictionary": (dictionary([0, 1, None]), {}, 7, [[5, 7, 7]]),
    "dictionary in lists": (
        pa.ListArray.from_arrays(pa.array([0, 3, 4], I32), dictionary([0, 1, None, 2])),
        {"ragged": True},
        7,
        [[5, 7, 7, 6], [3, 1]],
    ),
    "image": (pa.array([b"png", None]), {"image": (2, 2, 3)}, b"none", [[b"png", b"none"]]),
    "bytes": (pa.array([b"ab", None], pa.binary(2)), {"shape": (2,), "dtype": "uint8"}, b"cd", [[[97, 98], [99, 100]]]),
}


@pytest.mark.parametrize("case", CASES)
def test_nulls_are_refused_or_filled(case):
    """Also where the block is a part of a larger array."""
    array, options, fill, expected = CASES[case]
    extended = pa.concat_arrays([array, array, array])
    whole = pa.table({"x": extended}).slice(len(array), len(array))
    for tables in ([pa.table({"x": array})], [whole]):
        with pytest.raises(ConfigError, match=r"\d null\(s\).* of 'x'.*Column\('x', fill=\.\.\.\)"):
            gather.source(tables, Columns.from_spec(Column("x", **options), "x"))
        filled = gathered(tables, Column("x", **options, fill=fill))
        assert [one.tolist() for one in filled] == expected
        assert not any(one.dtype.kind == "f" for one in filled), "integers stay integers"


def test_how_many_and_where():
    table = pa.table({"x": pa.array([[1, None, None], None, [2]])})
    with pytest.raises(ConfigError, match=r"received: 1 null\(s\) and 2 null\(s\) inside the rows of 'x', list<"):
        gathered([table], Column("x", ragged=True))


@pytest.mark.parametrize(
    ("array", "fill"),
    [
        (pa.array([[1, None]]), []),
        (pa.array([[1], None]), 0),
        (pa.array([[1], None, [None]]), [7]),
        (pa.array([[1, None]]), 0.5),
        (pa.array([[1, 2], None], PAIRS), [0]),
    ],
)
def test_a_fill_of_another_type_is_refused(array, fill):
    with pytest.raises(ConfigError, match=r"fill must be a value of .* null\(s\) of type .* in 'x'"):
        gathered([pa.table({"x": array})], Column("x", ragged=True, fill=fill))


def test_nulls_outside_of_a_part_do_not_matter():
    lists = pa.table({"x": [[None, 1], [2], [3, 4], [None]]}).slice(1, 2)
    values, lengths = gathered([lists], Column("x", ragged=True))
    assert values.tolist() == [2, 3, 4] and lengths.tolist() == [1, 2] and values.dtype == np.int64
    for kind in (pa.list_(I32), PAIRS):
        pairs = pa.table({"x": pa.array([[None, 1], [2, 3], [4, None]], kind)}).slice(1, 1)
        (values,) = gathered([pairs], "x")
        assert values.tolist() == [[2, 3]] and values.dtype == np.int32


def test_blocks_of_nulls_or_empty_lists_alone_have_the_others_type():
    """Ray Data gives such a block a type of its own."""
    blocks = [pa.table({"x": pa.array([None, None])}), pa.table({"x": [1, 2]})]
    assert gathered(blocks, Column("x", fill=-1))[0].tolist() == [-1, -1, 1, 2]
    blocks = [pa.table({"x": [[], []]}), pa.table({"x": pa.array([[1], [2, 3]], pa.list_(I32))})]
    values, lengths = gathered(blocks, Column("x", ragged=True))
    assert values.tolist() == [1, 2, 3] and lengths.tolist() == [0, 0, 1, 2] and values.dtype == np.int32


@pytest.mark.parametrize("copied_bytes", [0, 1 << 20])
def test_stacked_columns(copied_bytes):
    table = pa.table({"a": [1.0, None, 3.0], "b": [4, 5, 6]})
    with pytest.raises(ConfigError, match=r"1 null\(s\) of 'a'"):
        sources_of([table], [Columns.from_spec(["a", "b"], "x")], copied_bytes)
    columns = parse([Column("a", fill=2), "b"], "x")
    (source,) = sources_of([table], [columns], copied_bytes)
    places = gather.RowLocations(np.zeros(3, int), np.array([2, 1, 0]))
    assert source.gather(places)[0].tolist() == [[3, 6], [2, 5], [1, 4]]
    stacked = table.append_column(columns.stored, gather.stack(table, columns))
    (source,) = sources_of([stacked], [columns], copied_bytes)
    assert source.gather(places)[0].tolist() == [[3, 6], [2, 5], [1, 4]]


def test_blocks_are_as_safe_as_streams():
    """Both go through the same sources; the first rows alone are seen before workers start."""
    from raytf.data.reader import StoredReader

    good, bad = pa.table({"x": [[1, 2]] * 200}), pa.table({"x": [[1, None]]})
    blocks = StoredDataset([good, bad], [200, 1], ["x"])
    assert StoredReader(blocks.first(), [Columns.from_spec("x", "x")])
    with pytest.raises(ConfigError, match=r"1 null\(s\) inside"):
        StoredReader(blocks, [Columns.from_spec("x", "x")])
