"""Classifies a user's function of a batch by its results on a batch and on the halves of that batch.

The rows are synthetic, and no change of a trial persists. A function that compares rows has other results for a row
next to different ones. The mean over a batch is the mean of its halves' means, a sum the sum of their sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.compat import keras_objects
from raytf.compat.tensorflow import recording
from raytf.parallel import step as step_module
from raytf.parallel.constant_draws import constant_draws

# Rows of a tried batch; its halves suit functions that use rows in twos or threes.
_ROWS = 24
_FEW_ROWS = 4
# Rows and numbers of a batch for positions that are named in code, as values[:100].
_MANY_ROWS, _MANY_NUMBERS = 1024, 1 << 18
# Maximum size of one tried tensor; above it, dimensions between the rows and the last one shrink.
_MOST_NUMBERS = 1 << 21
_SMALL, _UNKNOWN_SIZE = 4, 4
# A number of rows: every tensor with a dimension has rows.
ANY_ROWS = -1
# Numbers that mark labels as missing, in addition to those in a function's own code.
_MISSING = (-1.0, -100.0, -999.0, -9999.0, 255.0)
_MOST_MISSING, _LARGEST, _DEEPEST = 20, 1e9, 4
# Values later in a training: of a number that is 0, and of a count of steps.
_LATE_NUMBER, _LATE_STEP = 0.37, 1_000_000
# Numbers of one trial: the second half has each twice, and one row without.
_MISSING_AT_ONCE = (_ROWS // 2 - 1) // 2
# Entries of a list or a dict in which such a number is looked for.
_MOST_ENTRIES = 64
# Ways in which values of halves make the value of the whole.
IDENTICAL, MEAN, SUM = "same", "mean", "sum"


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """The result of a function's trials.

    Args:
        ways: How the values of halves make the value of the whole: `IDENTICAL`, `MEAN` and `SUM`. It has all three if
            every value was zero.
        rows: Whether the function returns a value for each row, which depends on that row only.
        why: Error of the trials if they have no result, otherwise None. It is "" if the function draws random numbers
            other than TensorFlow's.
        zeros: Positions of the values that were zero in all trials. Nothing is known of these, as rows that count may
            be unlike the synthetic ones.
    """

    ways: frozenset[str] = frozenset()
    rows: bool = False
    why: str | None = None
    zeros: frozenset[int] = frozenset()

    @property
    def unknown(self) -> bool:
        """Returns whether the trials have no result."""
        return self.why is not None


@dataclasses.dataclass(frozen=True)
class MaskedLabels:
    """Labels or tokens of which a function may skip some. A mean over the remaining ones is no mean over rows.

    Args:
        labels: Nest of their tensors among the function's arguments.
        code: User code that may contain the values of skipped ones.
    """

    labels: Any
    code: Sequence[Any] = ()


def whole_numbers(given: Any) -> list:
    """Returns the tensors of whole numbers in a nest, such as tokens."""
    return [leaf for leaf in tree.flatten(given) if hasattr(leaf, "dtype") and tf.as_dtype(leaf.dtype).is_integer]


def probe(
    function: Callable, given: Any, rows: int | None = ANY_ROWS, masked: MaskedLabels | None = None
) -> ProbeResult:
    """Tries a function on a batch and on its halves, with synthetic rows.

    Args:
        function: function(given) -> a tensor or a nest of tensors.
        given: Nest of tensors, symbolic or not, and other arguments.
        rows: Number of rows, see `has_rows`.
        masked: Labels of which some may be missing.
    """
    with tf.init_scope(), recording(), step_module.override_state(step=None, whole_batch=None, trial=True):
        result = _tried(function, given, rows, masked)
        if result.why == "":
            with constant_draws(own_thread=True):  # what it is without its random numbers
                result = _tried(function, given, rows, masked)
    return result


def _tried(function: Callable, given: Any, rows: int | None, masked: MaskedLabels | None) -> ProbeResult:
    """Returns the outcome of all trials; the first that draws random numbers ends them."""
    outcomes: list[ProbeResult] = []
    error: Exception | None = None
    changing: list[Any] = []
    for kind in range(3):
        try:
            outcomes.append(_probe_once(function, given, rows, kind, scope=lambda: _TrialScope(changing)))
        except Exception as raised:
            error = raised
        if outcomes and outcomes[-1].unknown:
            return outcomes[-1]
    if (many := _many(given, rows)) and (few := _combined(outcomes)) and (few.rows or few.ways):
        with contextlib.suppress(Exception):  # a function of fewer rows alone
            outcomes.append(_probe_once(function, given, rows, 0, count=many))
    if changing:
        with contextlib.suppress(Exception):  # such as a position beyond those that there are
            outcomes.append(_probe_once(function, given, rows, 0, scope=lambda: _TrialScope(changing, is_late=True)))
    if masked is not None and any(trial.rows or MEAN in trial.ways for trial in outcomes):
        outcomes += _probe_with_masks(function, given, rows, masked)
    return _combined(outcomes) or ProbeResult(why=f"{type(error).__name__}: {error}")


def _combined(outcomes: Sequence[ProbeResult]) -> ProbeResult | None:
    """Returns the outcome of all trials, or None without one."""
    if not outcomes or any(trial.unknown for trial in outcomes):
        return ProbeResult(why="") if outcomes else None
    informative = [
        trial for trial in outcomes if trial.ways != frozenset((IDENTICAL, MEAN, SUM)) or trial.rows
    ] or outcomes
    ways = frozenset.intersection(*(trial.ways for trial in informative))
    zeros = frozenset.intersection(*(trial.zeros for trial in outcomes))
    return ProbeResult(ways, all(trial.rows for trial in outcomes), zeros=zeros)


def probe_cached(
    step: step_module.Step,
    owner: Any,
    function: Callable,
    given: Any,
    rows: int | None = ANY_ROWS,
    *,
    index: int = 0,
    masked: MaskedLabels | None = None,
) -> ProbeResult:
    """Returns `probe`, computed once for each function and shapes of a model.

    Args:
        step: The step of the replica that is traced or runs.
        owner: The object that the function belongs to.
        function, given, rows, masked: As for `probe`.
        index: Index of the function among those of `owner`.
    """
    key = (id(owner), index, *(_signature(leaf, rows) for leaf in tree.flatten(given)))
    trials = {} if step.notes is None else step.notes.trials
    if key not in trials:
        trials[key] = owner, probe(function, given, rows, masked)
    return trials[key][1]


def _signature(leaf: Any, rows: int | None) -> Any:
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    shape = tuple(leaf.shape)
    return str(leaf.dtype), ("rows", *shape[1:]) if has_rows(leaf, rows) else shape


def _probe_with_masks(function: Callable, given: Any, rows: int | None, masked: MaskedLabels) -> list[ProbeResult]:
    """Returns outcomes with missing labels of a function that does not draw; skips numbers that it refuses."""
    outcomes: list[ProbeResult] = []
    numbers = _numbers_in(masked.code)
    parts = [numbers[i : i + _MISSING_AT_ONCE] for i in range(0, len(numbers), _MISSING_AT_ONCE)]
    pending = [*parts, [float("nan")]]
    while pending:
        mask = _MaskNumbers({id(leaf) for leaf in tree.flatten(masked.labels)}, pending.pop(0))
        try:
            outcomes.append(_probe_once(function, given, rows, 0, mask))
        except Exception:  # such as an unknown class, although another number marks missing labels
            pending += [[number] for number in mask.numbers] if len(mask.numbers) > 1 else []
    return outcomes


def _numbers_in(code: Sequence[Any]) -> list[float]:
    """Returns integers in functions' code, in values that they use, and in objects' attributes, and the usual ones.

    Values are numbers, and lists and dicts of numbers.
    """
    numbers: dict[float, None] = {}

    def visit(value, depth: int) -> None:
        if isinstance(value, (bool, complex)) or depth > _DEEPEST:
            return
        if isinstance(value, (int, float, np.integer, np.floating)):
            if value == round(value) if abs(value) < _LARGEST else False:
                numbers.setdefault(float(value))
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            if isinstance(value, dict):  # a config's own `values` would count its keys as read
                value = dict.values(value) if issubclass(type(value), dict) else value.values()
            for item in itertools.islice(value, _MOST_ENTRIES):
                visit(item, depth + 1)
        elif isinstance(value, types.CodeType):
            for constant in value.co_consts:
                visit(constant, depth)
        elif isinstance(value, types.MethodType):
            visit(value.__func__, depth)
        elif isinstance(value, types.FunctionType) and not value.__module__.startswith(("keras.", "tensorflow.")):
            visit(value.__code__, depth)
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            named = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
            for item in (*cells, *named, *(value.__defaults__ or ())):
                visit(item, depth + 1)

    for item in code:
        visit(item, 0)
    for number in _MISSING:
        numbers.setdefault(number)
    for item in code:
        classes = [kind for kind in type(item).__mro__ if not kind.__module__.startswith(("keras.", "tensorflow."))]
        of_classes = [a for kind in classes for a in vars(kind).values() if not isinstance(a, types.FunctionType)]
        for attribute in (*getattr(item, "__dict__", {}).values(), *of_classes):
            visit(attribute, 1)
    return [*numbers][:_MOST_MISSING]


@dataclasses.dataclass(frozen=True)
class _MaskNumbers:
    """The ids of labels, and the numbers that mark rows as missing."""

    labels: set[int]
    numbers: Sequence[float]


class _TrialScope(keras.StatelessScope):
    """The scope of a trial's call, which notes the variables that hide what a function is later in a training.

    Those are numbers that are 0, such as a loss weight that a callback raises, and counts of steps.

    Args:
        changing: List to which these variables are added.
        is_late: Whether they have values as later in a training.
    """

    def __init__(self, changing: list, is_late: bool = False):
        super().__init__()
        self._changing, self._is_late = changing, is_late

    def get_current_value(self, variable):
        """Returns the value within this scope, or None for the variable's own."""
        value, kind = super().get_current_value(variable), tf.as_dtype(variable.dtype)
        number = keras_objects.variable_of(variable)
        excluded = variable.synchronization == "on_read" or not (kind.is_floating or kind in (tf.int32, tf.int64))
        if value is not None or number is None or tuple(variable.shape) or excluded:
            return value
        # a function's graph would keep the value
        if not tf.executing_eagerly() or (variable.name != "iteration" and float(tf.convert_to_tensor(number)) != 0):
            return None
        self._changing.append(variable)
        return tf.constant(_LATE_NUMBER if kind.is_floating else _LATE_STEP, kind) if self._is_late else None


def _probe_once(
    function: Callable,
    given: Any,
    rows: int | None,
    kind: int,
    mask: _MaskNumbers | None = None,
    count: int | None = None,
    scope: Callable[[], keras.StatelessScope] = keras.StatelessScope,
) -> ProbeResult:
    count, small = _sizes(given, rows) if count is None else (count, {})
    whole = _synthetic(given, rows, count, kind, small, mask)
    cut = lambda leaf, made, start, stop: made[start:stop] if has_rows(leaf, rows) else leaf
    part = lambda start, stop: tree.map_structure(lambda *pair: cut(*pair, start, stop), given, whole)
    half = count // 2
    with scope():  # each call begins with the same state
        value = repeated = _values(function(part(0, count)))
    if mask is None:  # masks are tried for a function that does not draw
        with scope(), step_module.override_state(draws_other=True):
            repeated = _values(function(part(0, count)))
    if not all(map(_alike, value, repeated)):
        return ProbeResult(why="")
    halves = []
    for start in (0, half):
        with scope():
            halves.append(_values(function(part(start, start + half))))
    return _compared(value, *halves, count)


def _compared(whole: Sequence[np.ndarray], first: Sequence, second: Sequence, count: int) -> ProbeResult:
    """Returns the outcome for the values of a batch and of its halves, which have equal numbers of rows."""
    ways = set()
    if all(len({a.shape for a in three}) == 1 for three in zip(whole, first, second, strict=True)):
        if all(map(_alike, whole, first)) and all(map(_alike, whole, second)):
            ways.add(IDENTICAL)
        if all(_alike(w, (a + b) / 2) for w, a, b in zip(whole, first, second, strict=True)):
            ways.add(MEAN)
        if all(_alike(w, a + b) for w, a, b in zip(whole, first, second, strict=True)):
            ways.add(SUM)
    by_row = all(
        w.ndim and len(w) % count == 0 and len(a) * 2 == len(b) * 2 == len(w) and _alike(w, np.concatenate([a, b]))
        for w, a, b in zip(whole, first, second, strict=True)
    )
    zeros = {i for i, three in enumerate(zip(whole, first, second, strict=True)) if not any(map(np.any, three))}
    return ProbeResult(frozenset(ways), by_row, zeros=frozenset(zeros))


def _values(value: Any) -> list[np.ndarray]:
    arrays = []
    for leaf in tree.flatten(value):
        tensor = tf.convert_to_tensor(leaf)
        arrays.append(
            (tensor if tensor.dtype.is_floating or tensor.dtype.is_integer else tf.cast(tensor, tf.int32)).numpy()
        )
    return arrays


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    kind = tf.as_dtype(a.dtype)
    tolerance = 0.0
    if kind.is_floating:
        eps = float(np.spacing(np.ones((), a.dtype)))
        tolerance = 4 * eps if kind.size == 2 else max(100 * eps, 1e-6)  # float64 may have been computed in float32
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def has_rows(leaf: Any, rows: int | None) -> bool:
    """Returns whether a tensor has a first dimension that may be the one of the batch.

    Args:
        leaf: A leaf of a nest, which may be no tensor.
        rows: Number of rows of the batch if it is known while the step is traced, or None, or `ANY_ROWS`.
    """
    shape = getattr(leaf, "shape", None)
    if shape is None or tf.TensorShape(shape).rank in (None, 0):
        return False
    return shape[0] is None or rows == ANY_ROWS or shape[0] == rows


def _sizes(given: Any, rows: int | None) -> tuple[int, dict[int, int]]:
    """Returns (number of rows to try, {index of a dimension to shrink: its size})."""
    inner = [_inner(leaf) for leaf in tree.flatten(given) if has_rows(leaf, rows)]
    largest = max(inner, key=math.prod, default=[])
    if math.prod(largest) * _ROWS <= _MOST_NUMBERS:
        return _ROWS, {}
    small = math.prod(largest) * _FEW_ROWS > _MOST_NUMBERS
    return _FEW_ROWS, dict(enumerate(largest[:-1])) if small else {}


def _many(given: Any, rows: int | None) -> int:
    """Returns an even number of rows beyond positions that code names; 0 if the rows are large."""
    largest = max((math.prod(_inner(leaf)) for leaf in tree.flatten(given) if has_rows(leaf, rows)), default=0)
    count = min(_MANY_ROWS, _MANY_NUMBERS // max(1, largest)) // 2 * 2
    return count if largest and count > _ROWS else 0


def _inner(leaf: Any) -> list[int]:
    return [size or _UNKNOWN_SIZE for size in leaf.shape[1:]]


def _synthetic(
    given: Any, rows: int | None, count: int, kind: int, small: dict[int, int], mask: _MaskNumbers | None = None
) -> Any:
    """Returns the nest with `count` synthetic rows in each tensor with rows; other values are unchanged.

    Args:
        kind: Kind of numbers, 0 to 2.
        small: Dimensions to shrink, see `_sizes`.
        mask: Labels in which some rows have these numbers, see `_with_mask`.
    """
    random = np.random.default_rng(kind)
    first = next((leaf for leaf in tree.flatten(given) if has_rows(leaf, rows)), None)

    def made(leaf):
        if not has_rows(leaf, rows):
            return leaf
        inner = [min(size, _SMALL) if small.get(i) == size else size for i, size in enumerate(_inner(leaf))]
        dtype, shape = tf.as_dtype(leaf.dtype), (count, *inner)
        # the rows of the halves differ, to reveal a function that is no mean
        second = (np.arange(count) >= count // 2).reshape(count, *[1] * len(inner))
        numbers = random.uniform(0.05, 0.55, shape) + 0.4 * second
        if not dtype.is_floating or (kind == 2 and leaf is first):
            numbers = numbers > 0.5  # a class that every loss accepts
        elif kind == 1:
            numbers = random.normal(size=shape) * (1 + second) + second
        made_up = tf.cast(tf.constant(numbers, tf.bool if numbers.dtype == bool else tf.float64), dtype)
        if mask is None or id(leaf) not in mask.labels or dtype in (tf.bool, tf.string):
            return made_up
        return _with_mask(made_up, count, mask.numbers)

    return tree.map_structure(made, given)


def _with_mask(made_up: tf.Tensor, count: int, numbers: Sequence[float]) -> tf.Tensor:
    """Returns labels with these numbers, as far as their dtype allows: once in the first half, twice in the second.

    The number may mark rows to skip, or those to take. The last row has none.
    """
    values, kind, half = made_up.numpy(), made_up.dtype, count // 2
    fit = np.array([n for n in numbers if kind.is_floating or kind.min <= n <= kind.max])
    if not len(fit):
        return made_up
    if 2 * len(fit) < half:
        values[: len(fit)] = values[half : half + len(fit)] = _in_rows(fit, values)
        values[half + len(fit) : half + 2 * len(fit)] = _in_rows(fit, values)
    else:  # few large rows: a different number in each position, in the first half in some
        second_half = values[half : count - 1]
        values[half : count - 1] = np.resize(fit, second_half.shape).astype(second_half.dtype)
        row = values[0].reshape(-1)
        row[: row.size // 2] = np.resize(fit, row.size // 2)
        values[0] = row.reshape(values[0].shape)
    return tf.constant(values, kind)


def _in_rows(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    return numbers.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)
