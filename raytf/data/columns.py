"""Columns of a dataset, and their conversion to the tensors that a model receives."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from raytf import validation
from raytf.errors import ConfigError


@dataclass(frozen=True)
class Column:
    """Describes how a column of a dataset becomes a tensor. Trainers take it wherever they take the name of a column.

    Args:
        name: Name of the column.
        ragged: Whether lists of different lengths become a `tf.RaggedTensor`.
        pad: Length to which lists are padded, at least 1. Or "batch": the longest list of each global batch. So the
            result does not depend on the number of workers.
        pad_value: Value that lists are padded with; 0 by default.
        bucket: Whether rows with lists of similar lengths share a batch, which saves padding. Needs `ragged` or `pad`.
        fill: Value that replaces nulls. Without it columns with nulls are refused.
        image: Shape `(height, width, channels)` of images, for bytes of PNG, JPEG, GIF or BMP files. They are decoded,
            and resized where they differ, to uint8.
        draft: Whether JPEG files of at least twice the size of `image` are decoded at a reduced size. It is a half, a
            quarter or an eighth of their own, and they are resized afterwards. This is faster, and pixels are means of
            several of the file's.
        shape: Shape of a row, for raw bytes of a fixed size. Needs `dtype`.
        dtype: NumPy dtype that numbers are converted to. None keeps the column's.

    Raises:
        ConfigError: The options do not go together.

    Example:
        >>> import raytf
        >>> tokens = raytf.Column("tokens", pad="batch", pad_value=0)
        >>> photo = raytf.Column("jpeg", image=(224, 224, 3))
    """

    name: str
    _: KW_ONLY
    ragged: bool = False
    pad: int | str | None = None
    pad_value: float = 0
    bucket: bool = False
    fill: Any = None
    image: tuple[int, int, int] | None = None
    draft: bool = False
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        validation.check_kind("name of a Column", self.name, str, "a text", "Name a column", optional=False)
        for name in ("ragged", "bucket", "draft"):
            validation.check_flag(f"{name} of a Column", getattr(self, name))
        for name, least in (("image", 1), ("shape", 0)):
            _check_sizes(name, getattr(self, name), least)
        whole = isinstance(self.pad, numbers.Integral) and not isinstance(self.pad, bool) and self.pad > 0
        wrong = [
            (self.ragged and self.pad is not None, "ragged and pad exclude each other", "ragged=True and pad"),
            (self.pad not in (None, "batch") and not whole, 'pad must be a length of at least 1, or "batch"', self.pad),
            (self.bucket and not self.is_list, "bucket needs ragged or pad", "bucket=True alone"),
            (self.image is not None and len(self.image) != 3, "image must be (height, width, channels)", self.image),
            (self.draft and self.image is None, "draft needs image", "draft=True alone"),
            (self.shape is not None and self.dtype is None, "shape needs dtype", self.shape),
        ]
        for bad, rule, received in wrong:
            if bad:
                raise ConfigError(rule, f"{received!r} for {self.name!r}", "Correct the Column")
        for name in ("image", "shape", "fill"):
            object.__setattr__(self, name, _hashable(getattr(self, name)))
        if whole:
            object.__setattr__(self, "pad", int(self.pad))  # others ask for an int, which NumPy's are not
        if self.dtype is not None:
            try:
                np.dtype(self.dtype)
            except TypeError as error:
                raise ConfigError(
                    "dtype must be one of NumPy's", repr(self.dtype), 'Use "float32", "int64", ...'
                ) from error

    @property
    def is_list(self) -> bool:
        """Returns whether rows may differ in length."""
        return self.ragged or self.pad is not None

    @property
    def pads_batch(self) -> bool:
        """Returns whether lists are padded to the longest one of their global batch."""
        return self.pad == "batch"


def _hashable(value: Any) -> Any:
    """Returns lists and arrays as tuples: equal columns are found by their hash, and read once."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _check_sizes(name: str, value: Any, least: int) -> None:
    expected = "a tuple of sizes"
    validation.check_kind(
        f"{name} of a Column", value, (tuple, list), expected, f"Pass one, such as {name}=(28, 28, 1)"
    )
    for size in value or ():
        validation.check_whole(f"A size of a Column's {name}", size, least)


# As users write them: the columns of one tensor, and a mapping of these by name of a model's input or output.
ColumnSpec = str | Column | Sequence[str | Column]
ColumnSpecs = ColumnSpec | Mapping[str, ColumnSpec]


@dataclass(frozen=True)
class Columns:
    """Columns of one tensor.

    Args:
        parts: Columns of the dataset.
        stacked: Whether the columns become one float32 vector, as a list does; else there is one column.
    """

    parts: tuple[Column, ...]
    stacked: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def stored(self) -> str:
        """Returns the name of the column in which `gather.stack` stores the vectors; no dataset has such a name."""
        return f"raytf: {self.parts!r}"

    @staticmethod
    def from_spec(spec: ColumnSpec, role: str) -> Columns:
        """Returns the columns of one tensor from "column", Column("column"), or a list of them."""
        if isinstance(spec, str | Column):
            return Columns((_column(spec),), False)
        if isinstance(spec, Sequence) and spec and all(isinstance(part, str | Column) for part in spec):
            return Columns(tuple(map(_column, spec)), True)
        raise ConfigError(
            f"{role} must be a column, a list of columns, or a dict of these by input name",
            repr(spec),
            "Name columns of the dataset",
        )


def _column(spec: str | Column) -> Column:
    return Column(spec) if isinstance(spec, str) else spec


def parse(spec: ColumnSpecs | None, role: str) -> Columns | dict[str, Columns] | None:
    """Parses the trainers' argument `features`, `labels` or `sample_weights`."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        return {str(name): Columns.from_spec(part, f"{role}[{name!r}]") for name, part in spec.items()}
    return Columns.from_spec(spec, role)


def read(entry: Any) -> ColumnSpecs:
    """Returns columns as users write them, from what `fingerprint.columns_fingerprint` writes into a checkpoint.

    Raises:
        ConfigError: The value has another form.
    """
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or not entry:
        raise ConfigError("A checkpoint names the columns of its rows", repr(entry)[:200], "Pass features=...")
    if entry.keys() == {"stacked"} and isinstance(entry["stacked"], list):
        return [_read_column(part) for part in entry["stacked"]]
    if _is_column(entry):
        return _read_column(entry)
    return {name: read(part) for name, part in entry.items()}


def _is_column(entry: Any) -> bool:
    known = {field.name for field in dataclasses.fields(Column)}
    return isinstance(entry, dict) and len(entry) > 1 and "name" in entry and entry.keys() <= known


def _read_column(entry: Any) -> str | Column:
    if isinstance(entry, str):
        return entry
    if not _is_column(entry):
        raise ConfigError("A checkpoint names the columns of its rows", repr(entry)[:200], "Pass features=...")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Column(given.pop("name"), **given)


def flat(spec) -> list[Columns]:
    """Returns the `Columns` of a parsed spec, in order."""
    return [] if spec is None else list(spec.values()) if isinstance(spec, dict) else [spec]


@contextlib.contextmanager
def of_dataset(name: str) -> Iterator[None]:
    """Adds the dataset's name to a ConfigError in the context, for the dataset "validation" only."""
    try:
        yield
    except ConfigError as error:
        if name != "validation":
            raise
        raise type(error)(f"In the dataset {name!r} {error.rule}", error.received, error.fix) from None


def check_names(spec, schema_names: Sequence[str], role: str) -> None:
    """Raises ConfigError for a column that is missing in the dataset."""
    for part in flat(spec):
        for name in part.names:
            if name not in schema_names:
                raise ConfigError(
                    f"{role} must name columns of the dataset, which has {', '.join(map(repr, schema_names))}",
                    repr(name),
                    "Name one of these",
                )
