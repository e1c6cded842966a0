"""Digests of tables: of the rows, however they are divided."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from raytf.identity import fingerprint

ROWS = 1500


def table(**changes):
    """Columns of many kinds."""
    rng, rows = np.random.default_rng(0), range(ROWS)
    columns = {
        "number": rng.normal(size=ROWS).astype("f4"),
        "whole": pa.array([None if k % 7 == 0 else k for k in rows]),
        "text": [None if k % 5 == 0 else "w" * (k % 9) for k in rows],
        "truth": [None if k % 17 == 0 else bool(k % 3) for k in rows],
        "list": [[1.0 * k] * (k % 4) for k in rows],
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 3.0)), 3),
        "struct": [{"a": k, "b": str(k)} for k in rows],
        "dictionary": pa.array([str(k % 3) for k in rows]).dictionary_encode(),
        "nulls within": [None if k % 11 == 0 else [None, k] * (k % 3) for k in rows],
        "nothing": pa.nulls(ROWS),
    }
    return pa.table(columns | changes)


def digest(rows, cuts=(), stride=1):
    ends = [0, *cuts, rows.num_rows]
    parts = [fingerprint.digest(rows.slice(a, b - a), a, stride) for a, b in zip(ends, ends[1:], strict=False)]
    return fingerprint.content_of(parts)


@pytest.mark.parametrize("stride", [1, 7])
def test_how_rows_are_divided_does_not_count(stride):
    rows = table()
    whole = digest(rows, stride=stride)
    for cuts in ([700], [1, 2, 3, 1000], [33, 77, 1499]):
        assert digest(rows, cuts, stride) == whole
    chunked = pa.concat_tables([rows.slice(0, 33), rows.slice(33, 500), rows.slice(533)])
    assert digest(chunked, [77], stride) == whole


def test_values_under_nulls_do_not_count():
    valid = np.arange(ROWS) % 3 == 0
    one, other = (pa.array(np.where(valid, 1.0, under), mask=~valid) for under in (5.0, 6.0))
    assert digest(table(whole=one)) == digest(table(whole=other))


@pytest.mark.parametrize("name", [n for n in table().column_names if n != "nothing"])
@pytest.mark.parametrize("row", [1, 700, 1499])
def test_each_row_counts(name, row):
    rows = table()
    order = np.arange(ROWS)
    order[row] = row - 1  # as the row before it
    other = rows.set_column(rows.column_names.index(name), name, rows.column(name).take(pa.array(order)))
    if other.column(name).to_pylist() != rows.column(name).to_pylist():
        assert digest(other) != digest(rows)


def test_the_order_of_rows_counts():
    rows = table()
    assert digest(rows.take(pa.array(np.arange(ROWS)[::-1]))) != digest(rows)


def test_a_sample_is_spread_over_all_rows():
    assert [fingerprint.stride_of(size << 20) for size in (0, 1, 256, 257, 1024)] == [1, 1, 1, 2, 4]
    rows = pa.table({"x": np.zeros(1000)})
    other = pa.table({"x": np.concatenate([np.zeros(996), np.ones(4)])})
    assert digest(rows, stride=4) != digest(other, stride=4)
