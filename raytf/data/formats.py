"""What `--data` of a command names: Parquet, CSV, TFRecord, or images, found by the names of files. Driver side."""

from __future__ import annotations

import functools
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from pyarrow import csv, fs

from raytf import logs
from raytf.console.quiet import quiet_native
from raytf.data import class_names, stored
from raytf.data.columns import Column, ColumnSpecs, flat, parse
from raytf.data.file_source import FilePart, FileSource, in_task
from raytf.data.files import CSV_ENDINGS, Files, csv_error, csv_schema, find, retried
from raytf.data.records import cut
from raytf.data.tfrecords import read_tfrecords
from raytf.errors import ConfigError

logger = logs.get_logger(__name__)

# Names that say that a column is the label.
LABELS = ("label", "labels", "target", "targets", "class", "y")
_BLOCK_BYTES = 1 << 20
_SHOWN_CLASSES = 20


@dataclass(frozen=True)
class OpenedFiles:
    """Data that a path names.

    Args:
        format: One of `validation.FORMATS`.
        dataset: The `ray.data.Dataset`.
        schema: Names and types of its columns.
        classes: Values that the numbers of a column represent, by column.
    """

    format: str
    dataset: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read(
    name: str,
    path: str,
    format: str = "auto",
    types: Mapping[str, str] | None = None,
    unreadable: str = "refuse",
    reference: OpenedFiles | None = None,
    labelled: bool = True,
    classes: Mapping[str, Sequence[str]] | None = None,
) -> OpenedFiles:
    """Returns the dataset that a path names.

    Args:
        name: Name of the dataset, for messages.
        path: Path, or a URI.
        format: One of `validation.FORMATS`, or "auto" for that of the files.
        types: Types of columns of CSV files, by name, as Arrow names them; others are inferred.
        unreadable: "refuse" raises ConfigError for an image that cannot be decoded; "skip" leaves it out.
        reference: The training data, whose types and classes this data has, too.
        labelled: Whether images need labels.
        classes: Classes of a run whose model gets the images, by column, {} if it names none. None for a training:
            images have the classes of `reference`, or their own.

    Raises:
        ConfigError: There are no such files, or they do not fit each other.
    """
    kind, files = find(name, path, format)
    if types and kind != "csv":
        raise ConfigError("--types are for CSV files", f"{kind} files in {path!r}", "Leave --types out")
    if kind == "parquet":
        # tasks of Ray run in another folder
        dataset = ray.data.read_parquet(path if "://" in path else os.path.abspath(path))
        with stored.quiet():
            return OpenedFiles(kind, dataset, pa.schema(dataset.schema().base_schema))
    if kind == "tfrecord":
        dataset = read_tfrecords(path)
        return OpenedFiles(kind, dataset, dataset.schema().base_schema)
    if kind == "csv":
        schema = _csv_schema(files, types or {}, reference)
        pieces = [FilePart(path, path, size, None) for path, size in zip(files.paths, files.sizes, strict=True)]
        if reference is None:
            columns = ", ".join(f"{column.name} {column.type}" for column in schema)
            logger.info(
                f"{name}: {len(pieces)} CSV file(s) with the columns {columns}; --types COLUMN=TYPE sets others"
            )
        source = FileSource("CSV", files, pieces, schema, _read_csv)
        return OpenedFiles(kind, ray.data.read_datasource(source), schema)
    known = classes or ({} if reference is None else reference.classes)
    rows, numbered = _labelled(files, known) if labelled else (_paths(files), {})
    for column, values in numbered.items() if reference is None else ():
        shown = ", ".join(values[:_SHOWN_CLASSES]) + (", ..." if len(values) > _SHOWN_CLASSES else "")
        logger.info(f"{name}: {len(rows)} images; {column} is the number, from 0, of one of {shown}")
        if classes is not None and column not in classes:
            logger.warning(
                f"the run does not name its classes: {column} is numbered by these images alone, which must have all "
                "classes of the training"
            )
    schema = pa.schema([("image", pa.binary()), *rows.schema])
    pieces = list(_image_pieces(files, rows, unreadable == "skip"))
    source = FileSource("Images", files, pieces, schema, functools.partial(_read_images, unreadable), numbered)
    return OpenedFiles(kind, ray.data.read_datasource(source), schema, numbered)


def preview(dataset) -> list[str]:
    """Returns a line for each of the first three rows."""
    blocks = stored.first(dataset, {}).get()
    rows = stored.as_table(blocks[0]).slice(0, 3) if blocks else pa.table({})
    return ["  ".join(f"{name}={_shown(value)}" for name, value in row.items()) for row in rows.to_pylist()]


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>" if len(value) > 20 else repr(value)
    text = repr(np.asarray(value).tolist() if isinstance(value, list | np.ndarray) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# ------------------------------------------------------------------------------------------ columns of a model


def roles(
    files: OpenedFiles,
    given: Mapping[str, Any],
    image: tuple[int, int, int] | None,
    trained: Mapping[str, Any] | None = None,
    labelled: bool = True,
    input_size: tuple[int, int, int] | None = None,
    fill: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns features, labels and sample weights: those that are given, of the run, or what the columns are otherwise.

    Args:
        files: The data.
        given: `features`, `labels` and `sample_weights`; None where the command has none.
        image: Height, width and channels to which images are resized, or None for the default.
        trained: The same roles of a run whose model gets the data, or None. They are the default. Columns that are
            given by the same names have the run's options, and others are warned of.
        labelled: Whether labels are needed.
        input_size: Size of images without `image` and without a size of the run; by default that of the first one.
        fill: Texts of the values that replace nulls, by column. A run's columns have those of its training.

    Raises:
        ConfigError: Features are not given, and it is not known which columns they are. Or `fill` names another column,
            or has a value of another type.
    """
    known = {role: spec for role, spec in _of_images(files, trained or {}).items() if spec is not None}
    features, labels, weights = (_preferred(role, given[role], known.get(role)) for role in _ROLES)
    images = files.format == "images"
    if weights is not None and given["sample_weights"] is None and not _has(files, weights):
        logger.warning(f"the run has sample weights of {_names(weights)}, and the data does not: all rows count alike")
        weights = None
    if features is None:
        candidates = [name for name in files.schema.names if name in LABELS]
        labels = candidates[0] if labels is None and len(candidates) == 1 else labels
        features = "image" if images else _features(files.schema, [labels, weights], labelled)
        logger.info(
            f"no --features are given: --features {_names(features)} --labels {_names(labels)} are used. Pass others "
            "to change that"
        )
    chosen = {"features": features, "labels": labels, "sample_weights": weights}
    if taken := [role for role in _ROLES if given[role] is None and chosen[role] is not None and role in known]:
        shown = " ".join(f"{_option(role)} {_names(chosen[role])}" for role in taken)
        logger.info(f"{shown}, as in the training of the run")
    chosen["features"] = _sized(files, features, image, input_size)
    return _filled(files, chosen, fill) if fill else chosen


_ROLES = ("features", "labels", "sample_weights")


def _filled(files: OpenedFiles, chosen: dict[str, Any], fill: Mapping[str, str]) -> dict[str, Any]:
    """Returns columns by role with the values that replace their nulls."""
    used = {name for spec in chosen.values() for name in _each_name(spec)}
    if unused := [name for name in fill if name not in used]:
        raise ConfigError(
            "--fill is for columns of --features, --labels and --sample-weights",
            ", ".join(map(repr, unused)),
            f"Name one of {', '.join(sorted(used))}",
        )

    def replaced(spec):
        if isinstance(spec, Mapping):
            return {name: replaced(part) for name, part in spec.items()}
        if isinstance(spec, str | Column):
            name = spec if isinstance(spec, str) else spec.name
            value = _value(fill[name], files.schema.field(name)) if name in fill else None
            return spec if value is None else replace(Column(name) if isinstance(spec, str) else spec, fill=value)
        return None if spec is None else [replaced(part) for part in spec]

    return {role: replaced(spec) for role, spec in chosen.items()}


def _value(text: str, field: pa.Field) -> Any:
    """Returns the value of a column that a text of the command line is."""
    try:
        return pa.scalar(text).cast(field.type).as_py()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            "--fill takes a value of the column's type", f"{field.name}={text} for {field.type}", "Correct the value"
        ) from error


def _of_images(files: OpenedFiles, trained: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's columns as images from files have them, whatever name its own column of images had."""
    features = trained.get("features")
    if files.format != "images" or not isinstance(features, Column) or features.image is None:
        return trained
    return {**trained, "features": replace(features, name="image")}


def _preferred(role: str, given: ColumnSpecs | None, trained: ColumnSpecs | None) -> ColumnSpecs | None:
    """Returns the columns of a role: the given ones, with the run's options if they are the run's."""
    if given is None or trained is None:
        return trained if given is None else given
    if _names(given) == _names(trained):
        return trained
    logger.warning(f"{_option(role)} {_names(given)}: the run was trained with {_names(trained)}")
    return given


def _option(role: str) -> str:
    return f"--{role.replace('_', '-')}"


def _has(files: OpenedFiles, spec: ColumnSpecs) -> bool:
    return set(_each_name(spec)) <= set(files.schema.names)


def _sized(
    files: OpenedFiles,
    features: ColumnSpecs,
    image: tuple[int, int, int] | None,
    input_size: tuple[int, int, int] | None,
) -> ColumnSpecs:
    """Returns features with the size of images."""
    if image and not isinstance(features, str | Column):
        raise ConfigError("--image-size is for a single feature", _names(features), "Name one by --features")
    if image and isinstance(features, Column):
        if features.image not in (None, image):
            size, trained_size = ("x".join(map(str, shape)) for shape in (image, features.image))
            logger.warning(f"--image-size {size}: the run was trained with {trained_size}")
        return replace(features, image=image)
    if image is None and files.format == "images" and features == "image":
        image = input_size
        if image is None:
            with stored.quiet(), stored.unwrapped(files.dataset.context):
                rows = files.dataset.select_columns(["image"]).take(1)
            if not rows:
                raise class_names.no_image("none that can be decoded")
            image = in_task(_shape_of, rows[0]["image"])
    return Column(features, image=image) if image else features


def _features(schema: pa.Schema, others: Sequence, labelled: bool) -> str | list[str]:
    taken = {name for other in others for name in _each_name(other)}
    remaining = [column for column in schema if column.name not in taken]
    numbers = [
        pa.types.is_integer(c.type) or pa.types.is_floating(c.type) or pa.types.is_boolean(c.type) for c in remaining
    ]
    if (labelled and not taken) or not remaining or (len(remaining) > 1 and not all(numbers)):
        shown = ", ".join(f"{column.name} {column.type}" for column in schema)
        raise ConfigError(
            "--features may be left out if the label is known, and all other columns are numbers, or there is one",
            f"the columns {shown}",
            "Name them by --features and --labels" if labelled else "Name them by --features",
        )
    names = [column.name for column in remaining]
    return names if len(names) > 1 else names[0]


def _each_name(spec: ColumnSpecs | None) -> list[str]:
    return [name for part in flat(parse(spec, "--features")) for name in part.names]


def _names(spec: ColumnSpecs | None) -> str:
    return ",".join(_each_name(spec)) or "(none)"


# ------------------------------------------------------------------------------------------ CSV


def _csv_schema(files: Files, types: Mapping[str, str], reference: OpenedFiles | None) -> pa.Schema:
    """Returns names and types of the columns, from the first rows of files.

    Raises:
        ConfigError: Files have other columns, or types that have nothing in common.
    """
    schemas = [retried(csv_schema, files.filesystem, path, _BLOCK_BYTES) for path in files.paths]
    first = schemas[0] if reference is None else reference.schema
    for path, schema in zip(files.paths, schemas, strict=True):
        if set(schema.names) != set(first.names):
            differing = sorted(set(schema.names) ^ set(first.names))
            raise ConfigError(
                "All CSV files must have the same columns",
                f"{', '.join(map(repr, differing))} in some of {files.paths[0]!r} and {path!r}",
                "Write them alike, or leave files out",
            )
    if reference is not None:
        return reference.schema
    unknown = set(types) - set(first.names)
    if unknown:
        raise ConfigError("--types must name columns", ", ".join(sorted(unknown)), f"Name some of {first.names}")
    chosen = {}
    for column in first.names:
        try:
            fields = [pa.schema([schema.field(column)]) for schema in schemas]
            common = pa.unify_schemas(fields, promote_options="permissive").field(0).type
            chosen[column] = pa.type_for_alias(types[column]) if column in types else common
        except (ValueError, pa.ArrowException) as error:
            received = f"{column!r}: {types.get(column) or error}"
            raise ConfigError(
                "A column of CSV files must have one type, one of Arrow's",
                received,
                f"Pass --types {column}=string, float64, int64, ...",
            ) from error
    return pa.schema(chosen.items())


def _read_csv(filesystem: fs.FileSystem, path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    options = csv.ConvertOptions(column_types=schema, include_columns=schema.names)
    with filesystem.open_input_stream(path) as file:
        try:
            reader = csv.open_csv(file, csv.ReadOptions(block_size=_BLOCK_BYTES), convert_options=options)
            for batch in reader:
                yield pa.Table.from_batches([batch])
        except pa.ArrowInvalid as error:
            raise csv_error(path, error) from error


# ------------------------------------------------------------------------------------------ images


def _paths(files: Files) -> pa.Table:
    """Returns the paths of images."""
    pictures = files.filter_names(lambda name: not name.endswith(CSV_ENDINGS))
    if not pictures.paths:
        raise class_names.no_image(repr(files.root))
    return pa.table({"path": pictures.paths})


def _labelled(files: Files, classes: Mapping[str, Sequence[str]]) -> tuple[pa.Table, dict[str, Sequence[str]]]:
    """Returns the rows of images without their bytes, and the classes that are numbered in them, by column.

    Columns are "path", and "label" by the folder of each image, or those of a CSV file of labels.

    Raises:
        ConfigError: An image has no label, or one that the training data has not.
    """
    rows, tables = _paths(files), files.filter_names(lambda name: name.endswith(CSV_ENDINGS))
    pictures = rows["path"].to_pylist()
    if len(tables.paths) > 1:
        shown = ", ".join(map(repr, tables.paths[:5]))
        raise ConfigError("A folder of images may have one CSV file, of their labels", shown, "Move the others")
    if tables.paths:
        rows = _of_csv(files, pictures, tables.paths[0])
    else:
        relative = [posixpath.relpath(path, files.root) for path in pictures]
        stray = next((path for path in relative if "/" not in path), None)
        if stray:
            raise ConfigError(
                "Images must be in a folder for each class, or a CSV file in their folder must have their labels",
                repr(posixpath.join(files.root, stray)),
                "Move them, or write a CSV file with the columns file and label",
            )
        rows = rows.append_column("label", pa.array([path.partition("/")[0] for path in relative]))
    numbered: dict[str, Sequence[str]] = {}
    for name in rows.column_names:
        if name == "path" or not pa.types.is_string(rows.schema.field(name).type):
            continue
        numbered[name] = classes.get(name) or sorted(rows[name].unique().to_pylist())
        numbers = {value: i for i, value in enumerate(numbered[name])}
        unknown = sorted(set(rows[name].to_pylist()) - numbers.keys())
        if unknown:
            raise ConfigError("Classes must be those of the training data", ", ".join(unknown), "Leave others out")
        column = pa.array([numbers[value] for value in rows[name].to_pylist()], pa.int64())
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows, numbered


def _of_csv(files: Files, pictures: Sequence[str], path: str) -> pa.Table:
    """Returns the rows of a CSV file whose first column names files, relative to its folder, in the files' order."""
    with files.filesystem.open_input_stream(path) as file:
        try:
            table = csv.read_csv(file)
        except pa.ArrowInvalid as error:
            raise csv_error(path, error) from error
    folder = posixpath.dirname(path)
    named = [posixpath.join(folder, str(name)) for name in table.column(0).to_pylist()]
    missing = sorted(set(named) - set(pictures)) or sorted(set(pictures) - set(named))
    if missing or len(set(named)) < len(named):
        raise ConfigError(
            "The first column of a CSV file of labels must name each image of its folder once",
            repr(missing[0]) if missing else "a file that is named twice",
            "Correct the CSV file",
        )
    order = np.argsort(np.array(named))
    return table.remove_column(0).add_column(0, "path", pa.array(named)).take(pa.array(order))


def _image_pieces(files: Files, rows: pa.Table, skip: bool) -> Iterator[FilePart]:
    sizes = dict(zip(files.paths, files.sizes, strict=True))
    ends = np.cumsum([sizes[path] for path in rows["path"].to_pylist()])
    for first, stop in cut(ends - 1):
        part = rows.slice(first, stop - first).combine_chunks()
        size = int(ends[stop - 1] - (ends[first - 1] if first else 0))
        yield FilePart(part["path"][0].as_py(), part, size, None if skip else len(part))


def _read_images(unreadable: str, filesystem: fs.FileSystem, rows: pa.Table, schema: pa.Schema) -> Iterator[pa.Table]:
    if "image" not in schema.names and unreadable == "refuse":
        yield rows.select(schema.names)
        return
    batches = _decoder()
    images, indices, bad = [], [], []
    for i, path in enumerate(rows["path"].to_pylist()):
        with filesystem.open_input_stream(path, compression=None) as file:
            data = file.read()
        error = batches.why_unreadable(data)
        if error is None:
            images.append(data)
            indices.append(i)
            continue
        if unreadable == "refuse":
            raise ConfigError(
                "Images must be PNG, JPEG, GIF or BMP files that can be decoded",
                f"{path!r} ({error})",
                "Remove the file, or leave such files out by --unreadable skip",
            )
        bad.append(path)
    if bad:
        logger.warning(f"{len(bad)} image(s) cannot be decoded and are left out: {', '.join(bad[:5])}")
    rows = rows.take(pa.array(indices, pa.int64()))
    yield rows.append_column("image", pa.array(images, pa.binary())).select(schema.names)


def _shape_of(data: bytes) -> tuple[int, int, int]:
    return _decoder().shape_of_image(data)


def _decoder():
    """Returns the module that decodes images; TensorFlow's lines are hidden in a task, as errors are raised."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet_native():  # what it writes before it reads that
        from raytf.data import batches
    return batches
