"""Files as a Ray Dataset, of any format that a function reads, in an order that depends on nothing else.

Ray's own readers divide files as the cluster is large. Needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from raytf.compat import ray_data
from raytf.data.files import Files
from raytf.errors import ConfigError
from raytf.runtime.answers import collect_answers


@dataclass(frozen=True)
class FilePart:
    """A part of a dataset that one task reads.

    Args:
        path: The file, or the first of several.
        content: What the reading function needs to know of it.
        size: Bytes.
        rows: Number of rows, or None if it is not known.
    """

    path: str
    content: Any
    size: int
    rows: int | None


class FileSource(Datasource):
    """Ray Data's view of files.

    Args:
        name: Name of the format.
        files: All files.
        pieces: Parts of the dataset, in the order of rows.
        schema: Schema of the rows.
        read: read(filesystem, content, schema) -> iterator of tables, of the wanted columns alone.
        classes: Values that the numbers of a column represent, by column.
    """

    def __init__(
        self,
        name: str,
        files: Files,
        pieces: Sequence[FilePart],
        schema: pa.Schema,
        read: Callable,
        classes: Mapping[str, Sequence[str]] | None = None,
    ):
        super().__init__()
        self._name, self._files, self._pieces, self._schema, self._read = name, files, pieces, schema, read
        self.classes = dict(classes or {})
        self._projection_map = None
        # `compat.ray_data.listed_files` reads these, as of Ray's own sources of files
        self._filesystem = files.filesystem

    def _paths(self) -> tuple[str, ...]:
        return self._files.paths

    def _file_sizes(self) -> tuple[int, ...]:
        return self._files.sizes

    def get_name(self) -> str:
        return self._name

    def estimate_inmemory_data_size(self) -> int:
        return sum(piece.size for piece in self._pieces)

    def supports_projection_pushdown(self) -> bool:
        return True

    def get_read_tasks(self, parallelism, per_task_row_limit=None, data_context=None) -> list[ReadTask]:
        """Returns a task for each piece, whatever `parallelism` is, so that the order of rows is the same anywhere."""
        wanted = self.get_projection_map()
        names = [name for name in self._schema.names if wanted is None or name in wanted] or self._schema.names[:1]
        schema = pa.schema([self._schema.field(name) for name in names])
        return [
            ReadTask(
                functools.partial(self._read, self._filesystem, piece.content, schema),
                BlockMetadata(num_rows=piece.rows, size_bytes=piece.size, input_files=[piece.path], exec_stats=None),
                schema,
                per_task_row_limit,
            )
            for piece in self._pieces
        ]


def classes_of(dataset) -> dict[str, list[str]]:
    """Returns the values that the numbers of columns represent, by column, of a dataset that `formats.read` has made.

    Args:
        dataset: Any `ray.data.Dataset`; others have none.
    """
    operators = ray_data.last_operator(dataset).post_order_iter()
    sources = (getattr(operator, "datasource", None) for operator in operators)
    known = (source.classes for source in sources if isinstance(source, FileSource))
    return {column: list(values) for classes in known for column, values in classes.items()}


@ray.remote(num_cpus=0)
def _called(function: Callable, arguments: Sequence):
    return function(*arguments)


def in_tasks(function: Callable, arguments: Sequence[Sequence]) -> list:
    """Returns the results of function(*arguments) in Ray tasks, which request no CPU; raises their ConfigError."""
    with refused_in_task():
        refs = [_called.remote(function, task_arguments) for task_arguments in arguments]
        # no deadline: reading follows bytes, and a task that is lost ends the wait
        return collect_answers(refs, None, "tasks that read files", names=[f"task {i}" for i in range(len(refs))])


def in_task(function: Callable, *arguments):
    """Returns the result of function(*arguments) in a Ray task, such as one that imports TensorFlow."""
    return in_tasks(function, [arguments])[0]


@contextlib.contextmanager
def refused_in_task():
    """Raises a task's ConfigError unwrapped."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
