"""What a user's function does with the rows of a batch, found out by trying it on a batch and on its halves.

The rows are made up, and nothing that a trial changes stays. A function that compares rows gives something else for a
row when others stand beside it; a mean over a batch is the mean of those of its halves, a sum their sum.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.parallel import step as step_module

# Of a batch that is tried; functions that take rows in twos or threes take its halves, too.
_ROWS = 24
_FEW_ROWS = 4
# Numbers of one tensor that is tried, at most; dimensions between rows and the last one are made small then.
_MOST_NUMBERS = 1 << 21
_SMALL, _UNKNOWN_SIZE = 4, 4
# In the place of a number of rows: whatever has a dimension has rows.
ANY = -1
# Numbers by which labels say that they are missing, beside those in a function's own code.
_MISSING = (-1.0, -100.0, -999.0, -9999.0, 255.0)
_MOST_MISSING, _LARGEST, _DEEPEST = 11, 1e9, 3
# Ways in which values of halves make the value of the whole.
SAME, MEAN, SUM = "same", "mean", "sum"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What trials of a function have found.

    Args:
        ways: in which the values of halves make that of the whole, of `SAME`, `MEAN` and `SUM`; all where every value
            was zero.
        rows: whether the function gives values row by row, each of which depends on its own row alone.
        why: what went wrong, where nothing was found out; or "" where it draws random numbers.
    """

    ways: frozenset[str] = frozenset()
    rows: bool = False
    why: str | None = None

    @property
    def unknown(self) -> bool:
        """Whether nothing was found out."""
        return self.why is not None


@dataclasses.dataclass(frozen=True)
class Missing:
    """Labels of which a function may leave some out: a mean over the others is none over rows.

    Args:
        labels: a nest of tensors, of those that a function is given.
        code: what the user wrote, in which the numbers may stand that such labels have.
    """

    labels: Any
    code: Sequence[Any] = ()


def outcome(
    function: Callable, given: Any, rows: int | None = ANY, draws: bool = True, missing: Missing | None = None
) -> Outcome:
    """Tries a function on a batch and on its halves, with rows that are made up.

    Args:
        function: function(given) -> a tensor or a nest of tensors.
        given: a nest of tensors, symbolic or not, and of what else it takes.
        rows: see `has_rows`.
        draws: whether it may draw random numbers, so that two calls in a row may differ.
        missing: labels of which some may be missing.
    """
    found: list[Outcome] = []
    error: Exception | None = None
    with tf.init_scope(), step_module.within(step=None, whole_batch=None, trial=True):
        for kind in range(3):
            try:
                found.append(_tried(function, given, rows, kind, draws))
            except Exception as raised:
                error = raised
        if missing is not None and any(one.rows or MEAN in one.ways for one in found):
            found += _tried_with_missing(function, given, rows, draws, missing)
    if any(one.unknown for one in found) or not found:
        return Outcome(why=f"{type(error).__name__}: {error}" if not found else "")
    telling = [one for one in found if one.ways != frozenset((SAME, MEAN, SUM)) or one.rows] or found
    ways = frozenset.intersection(*(one.ways for one in telling))
    return Outcome(ways, all(one.rows for one in found))


def known(
    step: step_module.Step,
    owner: Any,
    function: Callable,
    given: Any,
    rows: int | None = ANY,
    *,
    place: int = 0,
    draws: bool = True,
    missing: Missing | None = None,
) -> Outcome:
    """`outcome`, tried once for each function and shapes of a model; see there.

    Args:
        step: of the replica that is traced or runs.
        owner: what the function belongs to.
        place: of the function among those that belong to it.
        missing: see `outcome`.
    """
    key = (id(owner), place, *(_signature(leaf, rows) for leaf in tree.flatten(given)))
    trials = {} if step.notes is None else step.notes.trials
    if key not in trials:
        trials[key] = owner, outcome(function, given, rows, draws, missing)
    return trials[key][1]


def _signature(leaf: Any, rows: int | None) -> Any:
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    shape = tuple(leaf.shape)
    return str(leaf.dtype), ("rows", *shape[1:]) if has_rows(leaf, rows) else shape


def _tried_with_missing(
    function: Callable, given: Any, rows: int | None, draws: bool, missing: Missing
) -> list[Outcome]:
    """Outcomes with labels that are missing; none of numbers that the function does not take."""
    found: list[Outcome] = []
    numbers = _numbers_in(missing.code)
    left = [numbers, [float("nan")]]
    while left:
        gone = _Gone({id(leaf) for leaf in tree.flatten(missing.labels)}, left.pop(0))
        try:
            found.append(_tried(function, given, rows, 0, draws, gone))
        except Exception:  # such as of a class that there is not, where another is what is left out
            left += [[number] for number in gone.numbers] if len(gone.numbers) > 1 else []
    return found


def _numbers_in(code: Sequence[Any]) -> list[float]:
    """Whole numbers of functions' code, of what they refer to, and of objects' attributes; and the usual ones."""
    found: dict[float, None] = {}

    def look(value, depth: int) -> None:
        if isinstance(value, (bool, complex)) or depth > _DEEPEST:
            return
        if isinstance(value, (int, float, np.integer, np.floating)):
            if value == round(value) if abs(value) < _LARGEST else False:
                found.setdefault(float(value))
        elif isinstance(value, types.CodeType):
            for constant in value.co_consts:
                look(constant, depth)
        elif isinstance(value, types.MethodType):
            look(value.__func__, depth)
        elif isinstance(value, types.FunctionType) and not value.__module__.startswith(("keras.", "tensorflow.")):
            look(value.__code__, depth)
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            named = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
            for one in (*cells, *named, *(value.__defaults__ or ())):
                look(one, depth + 1)

    for one in code:
        look(one, 0)
        for attribute in getattr(one, "__dict__", {}).values():
            look(attribute, 1)
    return [*dict.fromkeys((*found, *_MISSING))][:_MOST_MISSING]


@dataclasses.dataclass(frozen=True)
class _Gone:
    """The ids of labels, and the numbers that some of their rows have."""

    labels: set[int]
    numbers: Sequence[float]


def _tried(
    function: Callable, given: Any, rows: int | None, kind: int, draws: bool, gone: _Gone | None = None
) -> Outcome:
    count, small = _sizes(given, rows)
    whole = _made_up(given, rows, count, kind, small, gone)
    cut = lambda leaf, made, start, stop: made[start:stop] if has_rows(leaf, rows) else leaf
    part = lambda start, stop: tree.map_structure(lambda *pair: cut(*pair, start, stop), given, whole)
    half = count // 2
    with keras.StatelessScope():
        value = _values(function(part(0, count)))
        again = _values(function(part(0, count))) if draws else value
    if not all(map(_alike, value, again)):
        return Outcome(why="")
    halves = []
    for start in (0, half):
        with keras.StatelessScope():
            halves.append(_values(function(part(start, start + half))))
    return _compared(value, *halves, count)


def _compared(whole: Sequence[np.ndarray], first: Sequence, second: Sequence, count: int) -> Outcome:
    """What the values of a batch and of its halves, of as many rows each, say of the function."""
    ways = set()
    if all(len({a.shape for a in three}) == 1 for three in zip(whole, first, second, strict=True)):
        if all(map(_alike, whole, first)) and all(map(_alike, whole, second)):
            ways.add(SAME)
        if all(_alike(w, (a + b) / 2) for w, a, b in zip(whole, first, second, strict=True)):
            ways.add(MEAN)
        if all(_alike(w, a + b) for w, a, b in zip(whole, first, second, strict=True)):
            ways.add(SUM)
    by_row = all(
        w.ndim and len(w) % count == 0 and len(a) * 2 == len(b) * 2 == len(w) and _alike(w, np.concatenate([a, b]))
        for w, a, b in zip(whole, first, second, strict=True)
    )
    return Outcome(frozenset(ways), by_row)


def _values(value: Any) -> list[np.ndarray]:
    found = []
    for leaf in tree.flatten(value):
        tensor = tf.convert_to_tensor(leaf)
        found.append(
            (tensor if tensor.dtype.is_floating or tensor.dtype.is_integer else tf.cast(tensor, tf.int32)).numpy()
        )
    return found


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    kind = tf.as_dtype(a.dtype)
    tolerance = 0.0
    if kind.is_floating:
        eps = float(np.spacing(np.ones((), a.dtype)))
        tolerance = 4 * eps if kind.size == 2 else max(100 * eps, 1e-6)  # which may have been computed in float32
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def has_rows(leaf: Any, rows: int | None) -> bool:
    """Whether a tensor has a first dimension that may be that of the batch.

    Args:
        leaf: of a nest; it may be no tensor.
        rows: of the batch, where they are known as the step is traced; or None, or `ANY`.
    """
    shape = getattr(leaf, "shape", None)
    if shape is None or tf.TensorShape(shape).rank in (None, 0):
        return False
    return shape[0] is None or rows == ANY or shape[0] == rows


def _sizes(given: Any, rows: int | None) -> tuple[int, dict[int, int]]:
    """(rows to be tried, {place of a dimension: its size} of those that are to be made small)."""
    inner = [_inner(leaf) for leaf in tree.flatten(given) if has_rows(leaf, rows)]
    largest = max(inner, key=math.prod, default=[])
    if math.prod(largest) * _ROWS <= _MOST_NUMBERS:
        return _ROWS, {}
    small = math.prod(largest) * _FEW_ROWS > _MOST_NUMBERS
    return _FEW_ROWS, dict(enumerate(largest[:-1])) if small else {}


def _inner(leaf: Any) -> list[int]:
    return [size or _UNKNOWN_SIZE for size in leaf.shape[1:]]


def _made_up(
    given: Any, rows: int | None, count: int, kind: int, small: dict[int, int], gone: _Gone | None = None
) -> Any:
    """The nest with `count` rows in the place of those of each tensor; what has none is left as it is.

    Args:
        kind: of numbers, 0 to 2.
        small: see `_sizes`.
        gone: of labels some rows of the second half, but the last one, have these numbers.
    """
    random = np.random.default_rng(kind)
    first = next((leaf for leaf in tree.flatten(given) if has_rows(leaf, rows)), None)

    def made(leaf):
        if not has_rows(leaf, rows):
            return leaf
        inner = [min(size, _SMALL) if small.get(i) == size else size for i, size in enumerate(_inner(leaf))]
        dtype, shape = tf.as_dtype(leaf.dtype), (count, *inner)
        # the rows of the halves differ, so that what is no mean shows it
        second = (np.arange(count) >= count // 2).reshape(count, *[1] * len(inner))
        numbers = random.uniform(0.05, 0.55, shape) + 0.4 * second
        if not dtype.is_floating or (kind == 2 and leaf is first):
            numbers = numbers > 0.5  # a class that every loss knows
        elif kind == 1:
            numbers = random.normal(size=shape) * (1 + second) + second
        made_up = tf.cast(tf.constant(numbers, tf.bool if numbers.dtype == bool else tf.float64), dtype)
        if gone is None or id(leaf) not in gone.labels or dtype in (tf.bool, tf.string):
            return made_up
        return _with_gone(made_up, count, gone.numbers)

    return tree.map_structure(made, given)


def _with_gone(made_up: tf.Tensor, count: int, numbers: Sequence[float]) -> tf.Tensor:
    """Labels of which the rows of the second half, but the last one, have other numbers, as far as their type has."""
    values, kind = made_up.numpy(), made_up.dtype
    fit = [n for n in numbers if kind.is_floating or kind.min <= n <= kind.max]
    rows = range(count // 2, count - 1)
    if len(fit) > len(rows):  # few rows, which are large: in each place another number
        places = values[rows.start : rows.stop]
        values[rows.start : rows.stop] = np.resize(np.array(fit), places.shape).astype(places.dtype)
        return tf.constant(values, kind)
    for row, number in zip(rows, fit, strict=False):
        values[row] = number
    return tf.constant(values, kind)
