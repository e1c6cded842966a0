"""Workers gather rows out of the blocks that all share, and hold no copy of all of them."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import gather, sampling, stored
from raytf.data import reader as reader_module
from raytf.data.columns import Column, Columns, parse
from raytf.data.reader import StoredReader
from raytf.data.stored import StoredDataset

ROWS = 6000
RNG = np.random.default_rng(0)
DATA = {
    "id": np.arange(ROWS),
    "x": RNG.normal(size=ROWS).astype("float32"),
    "y": RNG.integers(0, 99, ROWS, np.int16),
    "image": RNG.integers(0, 255, (ROWS, 5, 3), np.uint8),
    "word": np.array([f"w{i}" for i in range(ROWS)]),
    "tokens": [[i] * (i % 5) for i in range(ROWS)],
    "pair": RNG.normal(size=(ROWS, 2)),
}
SPECS = {
    "features": parse(
        {
            "stacked": ["x", Column("y", dtype="float64")],
            "image": "image",
            "word": "word",
            "id": Column("id", dtype="int32"),
            "tokens": Column("tokens", ragged=True),
            "pair": "pair",
        },
        "features",
    )
}
COLUMNS = list(SPECS["features"].values())


def table(start, stop):
    part = {name: values[start:stop] for name, values in DATA.items()}
    part["image"] = pa.FixedShapeTensorArray.from_numpy_ndarray(part["image"])
    part["pair"] = pa.FixedSizeListArray.from_arrays(pa.array(part["pair"].ravel()), 2)
    return pa.table(part)


def made(cuts, chunks=1):
    """Blocks that are cut here, of so many chunks each."""
    tables = []
    for start, stop in zip((0, *cuts), (*cuts, ROWS), strict=True):
        inner = np.linspace(start, stop, chunks + 1).astype(int)
        tables.append(pa.concat_tables([table(a, b) for a, b in zip(inner[:-1], inner[1:], strict=True)]))
    return StoredDataset(tables, [len(t) for t in tables], list(DATA))


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    if request.param == "large":
        monkeypatch.setattr(gather, "COPIED_BYTES", 100)
        monkeypatch.setattr(reader_module, "COPIED_BYTES", 100)
    return request.param


def check(gathered, rows):
    """What a `reader.Rows` gathers, by column, for the dataset's rows."""
    stacked, image, word, numbers, tokens, lengths, pair = gathered
    assert stacked.dtype == np.float32 and numbers.dtype == np.int32
    np.testing.assert_array_equal(stacked, np.stack([DATA["x"], DATA["y"].astype("float32")], 1)[rows])
    np.testing.assert_array_equal(image, DATA["image"][rows])
    np.testing.assert_array_equal(word, DATA["word"][rows].astype(object))
    np.testing.assert_array_equal(numbers, rows)
    np.testing.assert_array_equal(lengths, np.asarray(rows) % 5)
    np.testing.assert_array_equal(tokens, np.repeat(rows, np.asarray(rows) % 5))
    np.testing.assert_array_equal(pair, DATA["pair"][rows])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("shuffle", ["full", "window"])
@pytest.mark.parametrize("prepared", [False, True])
def test_rows_are_the_same_in_whatever_blocks(size, chunks, shuffle, prepared):
    found = made((2500, 2600), chunks)
    if prepared:
        tables = [stored._prepared(SPECS, block) for block in found.refs]
        assert all(column.num_chunks == 1 for block in tables for column in block.columns)
        assert "x" not in tables[0].column_names, "what is stacked is kept once"
        found = StoredDataset(tables, found.rows, found.columns)
    reader = StoredReader(found, COLUMNS)
    plan = sampling.Sampler(rows=tuple(found.rows), global_batch=100, shuffle=shuffle, window=700, seed=1).epoch(2)
    rows = reader.rows(plan, 2, 0)
    for chunk in range(plan.chunks):
        positions = plan.positions(chunk)
        check(rows.gather(positions), plan.row_numbers(positions))
        check(rows.gather(np.sort(positions)[:50]), plan.row_numbers(np.sort(positions)[:50]))
    assert len(rows.gather(positions[:0])[0]) == 0


def test_large_columns_are_not_copied(monkeypatch):
    monkeypatch.setattr(gather, "COPIED_BYTES", 100)
    monkeypatch.setattr(reader_module, "COPIED_BYTES", 100)
    found = made((3000,), chunks=2)
    prepared = [stored._prepared(SPECS, block) for block in found.refs]
    for its, columns in ((found.refs, COLUMNS[1:2] + COLUMNS[3:4]), (prepared, COLUMNS[:2] + COLUMNS[3:4])):
        reader = StoredReader(StoredDataset(its, found.rows, found.columns), columns)
        shared = [buffer for block in its for column in block.columns for buffer in _buffers(column)]
        for source in reader.sources:
            for array in source._arrays._arrays:
                assert any(start <= array.ctypes.data < start + size for start, size in shared)
    lists, texts = StoredReader(StoredDataset(prepared, found.rows, found.columns), [COLUMNS[4], COLUMNS[2]]).sources
    for values, offsets in zip(lists._values, lists._offsets, strict=True):
        for array in (values, offsets):
            assert any(start <= array.ctypes.data < start + size for start, size in shared)
    for part in texts._parts:
        assert any(start <= part.buffers()[2].address < start + size for start, size in shared)


def _buffers(column):
    return [(b.address, b.size) for chunk in column.chunks for b in chunk.buffers() if b is not None]


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=60), st.integers(0, 10**9), st.integers(0, 2**32 - 1))
def test_ranges_are_those_of_searchsorted(sizes, begin, seed):
    starts = begin + np.cumsum([0, *sizes])[:-1]
    numbers = np.random.default_rng(seed).integers(starts[0], starts[-1] + sizes[-1] + 1, 100)
    assert np.array_equal(sampling.Ranges(starts).find(numbers), np.searchsorted(starts, numbers, side="right") - 1)


def test_one_column_in_two_ways_stays_as_it_is():
    specs = {
        "features": Columns.from_spec(Column("a", fill=1), "f"),
        "labels": Columns.from_spec(Column("a", fill=2), "l"),
    }
    kept = stored._prepared(specs, pa.table({"a": [None, 3], "b": [1, 2]}))
    assert kept.to_pydict() == {"a": [None, 3]}
    one = stored._prepared({"features": specs["features"]}, pa.table({"a": [None, 3], "b": [1, 2]}))
    assert one.to_pydict() == {"a": [1, 3]}
