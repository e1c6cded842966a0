"""Fingerprints of a model, its optimizer and a dataset, as JSON that is the same in every process.

Counted names of Keras ("dense_1"), addresses, modules and lines of code are omitted. Two processes, and a `build_model`
that was moved, must produce the same.
"""

from __future__ import annotations

import dataclasses
import posixpath
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import ray

from raytf import timeouts
from raytf.compat import keras_objects, ray_data
from raytf.data.columns import flat
from raytf.data.stored import as_table
from raytf.identity.canonical import arguments_of, class_code, config_of, describe, dump, hash_value, shorten
from raytf.parallel import model_optimizers
from raytf.runtime.answers import collect_answers

_MOST_LAYERS = 2000
# Keys of a layer's config that do not affect its computation, or belong to the trainer.
_LEFT_OUT = frozenset(
    {"name", "seed", "module", "registered_name", "shared_object_id", "build_config", "compile_config"}
    | {"epochs", "batch_size", "num_workers"}
)
# Of a source's files, all names and sizes count, and the last bytes of some; Parquet has its statistics there.
_TAILS, _TAIL_BYTES = 16, 64 << 10
# Size up to which all rows in memory count, and size of the sample above it; size up to which the driver reads them.
_ROWS_BYTES, _HERE_BYTES = 256 << 20, 128 << 20
_DIGESTS_AT_ONCE = 64
_PIECE_BYTES = 1 << 20
_ODD = 0x9E3779B97F4A7C15


# ----------------------------------------------------------------------------------------------- a model, its training


def model_fingerprint(model) -> dict[str, Any]:
    """Returns the description of a compiled and built model, and of its training.

    Args:
        model: A `keras.Model` whose optimizer is built.

    Returns:
        {"keras", "model", "optimizers", "loss", "metrics"}; JSON.
    """
    import keras

    compiled = dict(getattr(getattr(model, "_compile_config", None), "config", None) or {})
    layers = [_layer(layer) for layer in keras_objects.layers_of(model, with_itself=False)]
    weights = [f"{v.path.rpartition('/')[2]} {_shape(v)}" for v in model.weights]
    training = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return {
        "keras": keras.__version__,
        "model": {**_layer(model), "layers": shorten(layers, _MOST_LAYERS), "weights": shorten(weights)},
        "optimizers": {
            name: _optimizer(optimizer) for name, optimizer in model_optimizers.optimizers_of(model).items()
        },
        **{name: describe(compiled.get(name)) for name in training},
    }


def _layer(layer) -> dict[str, Any]:
    """Returns {"class", "config"} of a layer, or {"arguments"} that Keras recorded; {"code"} of a user's class."""
    import keras

    from raytf.compat.keras import Functional, is_default

    description: dict[str, Any] = {"class": type(layer).__name__}
    if isinstance(layer, Functional):
        description["graph"] = _graph(layer)
    elif not isinstance(layer, keras.Sequential):
        config = config_of(layer)
        arguments = arguments_of(layer, config)
        if is_default(layer.get_config):
            arguments |= {k: v for k, v in config.items() if k not in ("dtype", "trainable")}
            config = {k: config[k] for k in ("dtype", "trainable") if k in config}
        description |= {"config": describe(config, _LEFT_OUT), "arguments": describe(arguments, _LEFT_OUT)}
    return description | class_code(type(layer))


def _graph(model) -> str | None:
    """Returns a hash of the connections between operations of a functional model."""
    import keras

    operations = getattr(model, "operations", None)
    nodes = keras_objects.graph_nodes(model)
    if not operations or nodes is None:
        return None
    from raytf.compat.keras import Functional, make_node_key

    positions = {id(operation): i for i, operation in enumerate(operations)}

    def argument(value):
        if isinstance(value, keras.KerasTensor):
            operation, _, index = keras_objects.history_of(value)
            return ["tensor", positions.get(id(operation)), index]
        if isinstance(value, Mapping):
            return {str(k): argument(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [argument(part) for part in value]
        return describe(value, _LEFT_OUT)

    parts = []
    for operation in operations:
        node_arguments = [
            [argument(node.arguments.args), argument(node.arguments.kwargs)]
            for i, node in enumerate(keras_objects.nodes_of(operation))
            if make_node_key(operation, i) in nodes
        ]
        is_layer = isinstance(operation, (keras.Layer, Functional))
        config = None if is_layer else describe(config_of(operation), _LEFT_OUT)
        parts.append([type(operation).__name__, node_arguments, config])
    ends = [[argument(t) for t in tensors] for tensors in (model.inputs, model.outputs)]
    return hash_value(dump([parts, ends]))


def _optimizer(optimizer) -> dict[str, Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    config = config_of(optimizer)
    if "learning_rate" not in config and inner is None:
        config = config | {"learning_rate": keras_objects.rate_of(optimizer)}
    description = {
        "class": type(optimizer).__name__,
        "config": describe(config, _LEFT_OUT | {"inner_optimizer", "jit_compile"}),
        "slots": shorten([_shape(v) for v in optimizer.variables]),
        **class_code(type(optimizer)),
    }
    return description | ({"inner": _optimizer(inner)} if inner is not None else {})


def _shape(variable) -> str:
    return f"{tuple(variable.shape)} {variable.dtype}{'' if getattr(variable, 'trainable', True) else ' fixed'}"


# --------------------------------------------------------------------------------------------------------- the data


def types_of(block, *specs) -> dict[str, str]:
    """Returns the types of columns that are used unchanged, by name; columns of a vector always become float32.

    Args:
        block: A block of the data: an Arrow table or a pandas frame.
        specs: Features, labels and sample weights, parsed.
    """
    schema = as_table(block).schema
    names = sorted({name for spec in specs for part in flat(spec) if not part.stacked for name in part.names})
    return {name: str(schema.field(name).type).replace("large_", "") for name in names}


def dataset_fingerprint(dataset, rows: int) -> dict[str, Any]:
    """Returns the parts of a `ray.data.Dataset` that are cheap to read: its rows, sources and operations.

    Args:
        dataset: The dataset, already read.
        rows: Its total number of rows.

    Returns:
        {"rows", "sources", "operations"}; JSON. Files count by relative names, sizes and, for some, their last bytes.
            Times do not count: a copy is the same. Data in memory counts by one hash of its rows.
    """
    operators = list(ray_data.last_operator(dataset).post_order_iter())
    steps = [op for op in operators if op.input_dependencies]
    return {
        "rows": rows,
        "sources": [_source(op) for op in operators if not op.input_dependencies],
        "operations": [_operation(op) for op in steps if type(op).__name__ not in ("ReadFiles", "Project")],
    }


def pipeline_fingerprint(source) -> dict[str, Any]:
    """Returns the same for a `raytf.TFData`: its function with the values that it reads, without files."""
    names = ("make_dataset", "shards_itself", "rows", "steps_per_epoch", "class_weight")
    description = {name: describe(getattr(source, name)) for name in names}
    return {"rows": 0, "sources": [], "operations": [description]}


def _operation(operator) -> dict[str, Any]:
    description: dict[str, Any] = {"class": type(operator).__name__}
    for name in ("fn", "fn_args", "fn_kwargs", "fn_constructor_args", "fn_constructor_kwargs", "limit", "key", "seed"):
        value = getattr(operator, name, None)
        if value is not None and not isinstance(value, types.MethodType):
            description[name] = describe(value)
    return description


def _source(operator) -> dict[str, Any]:
    datasource = getattr(operator, "datasource", None)
    if getattr(operator, "paths", None):
        filesystem = operator.filesystem or pyarrow.fs.LocalFileSystem()
        return _files(filesystem, _listed(filesystem, operator.paths))
    listed = ray_data.listed_files(datasource)
    if listed is not None:
        names, sizes, filesystem = listed
        root = posixpath.commonpath([posixpath.dirname(name) for name in names]) or "."
        return _files(filesystem, [(posixpath.relpath(n, root), n, s) for n, s in zip(names, sizes, strict=True)])
    if datasource is not None:
        return {"class": datasource.get_name()}
    return _in_memory(operator)


def _listed(filesystem, paths) -> list[tuple[str, str, int]]:
    """Returns (relative name, path, size) of each file."""
    files_below = []
    for info in filesystem.get_file_info(list(paths)):
        if info.type == pyarrow.fs.FileType.Directory:
            inside = filesystem.get_file_info(pyarrow.fs.FileSelector(info.path, recursive=True))
            files = [entry for entry in inside if entry.type == pyarrow.fs.FileType.File]
            files_below += [(posixpath.relpath(entry.path, info.path), entry.path, entry.size or 0) for entry in files]
        else:
            files_below.append((info.base_name, info.path, info.size or 0))
    return files_below


def _files(filesystem, files: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Returns the number and the bytes of files, and a hash of their names, sizes and the ends of some."""
    files = sorted(files)

    def tail(path: str, size: int) -> bytes:
        with filesystem.open_input_file(path) as file:
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)

    chosen = sorted({i * (len(files) - 1) // max(1, _TAILS - 1) for i in range(_TAILS)}) if files else []
    with ThreadPoolExecutor(_TAILS) as pool:
        tails = list(pool.map(lambda i: hash_value(tail(*files[i][1:])), chosen))
    content = hash_value(dump([[[name, size] for name, _, size in files], tails]))
    return {"files": len(files), "bytes": sum(size for *_, size in files), "content": content}


def _in_memory(operator) -> dict[str, Any]:
    """Returns a hash of the rows of blocks, computed on their nodes. It does not depend on the division into blocks."""
    blocks = [entry for bundle in operator.output_data() or [] for entry in bundle.blocks if entry.metadata.num_rows]
    if not blocks:
        return {"class": type(operator).__name__}
    rows = [block.metadata.num_rows for block in blocks]
    size = sum(block.metadata.size_bytes or 0 for block in blocks)
    stride, starts = stride_of(size), np.cumsum([0, *rows[:-1]]).tolist()
    work = [(block.ref, start, stride) for block, start in zip(blocks, starts, strict=True)]
    if size <= _HERE_BYTES:
        digests = [
            _digest(ray.get(ref, timeout=timeouts.get().digest), *start_and_stride) for ref, *start_and_stride in work
        ]
    else:
        # requests no CPU: workers may hold them all
        remote = ray.remote(num_cpus=0, max_retries=2)(_digest)
        digests = []
        for i in range(0, len(work), _DIGESTS_AT_ONCE):
            refs = [remote.remote(*arguments) for arguments in work[i : i + _DIGESTS_AT_ONCE]]
            names = [f"block {i + j}" for j in range(len(refs))]
            digests += collect_answers(refs, timeouts.get().digest, "digests of the data in memory", names=names)
    return {"content": content_of(digests)}


def _digest(block, start: int, stride: int) -> dict[str, int]:
    return digest(as_table(block), start, stride)


def stride_of(size: int) -> int:
    """Returns n so that every n-th row of `size` bytes counts in their hash."""
    return -(-size // _ROWS_BYTES) or 1


def content_of(digests: list[dict[str, int]]) -> str:
    """Returns a hash of all rows, from the digests of their blocks."""
    columns = sorted({name for digest_of_block in digests for name in digest_of_block})
    return hash_value(
        dump([[name, sum(digest_of_block.get(name, 0) for digest_of_block in digests) % 2**64] for name in columns])
    )


def table_fingerprint(table: pa.Table) -> str:
    """Returns a hash of the rows of a table."""
    return content_of([digest(table, 0, stride_of(table.nbytes))])


def digest(table: pa.Table, start: int, stride: int) -> dict[str, int]:
    """Returns a number for each column, by name and type; they add up over blocks, modulo 2**64.

    Args:
        table: A block.
        start: Number of rows before it.
        stride: Every `stride`-th row of all rows counts.
    """
    row_indices = np.arange(-start % stride, table.num_rows, stride)
    table = table if stride == 1 else table.take(pa.array(row_indices))
    sums = {f"{field.name} {str(field.type).replace('large_', '')}": 0 for field in table.schema}
    first, size = 0, max(1, _PIECE_BYTES * len(row_indices) // max(1, table.nbytes))
    for batch in table.to_batches(size):
        numbers = (row_indices[first : first + len(batch)] + start + 1).astype(np.uint64)
        for name, column in zip(sums, batch.columns, strict=True):
            sums[name] += _sum(column, numbers)
        first += len(batch)
    return {name: total % 2**64 for name, total in sums.items()}


def _sum(array: pa.Array, numbers: np.ndarray) -> int:
    """Returns the sum of hashes of values, each times an odd number from its position; nulls add nothing."""
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if array.null_count:
        numbers, array = numbers[array.is_valid().to_numpy(zero_copy_only=False)], array.drop_null()
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
    elif pa.types.is_struct(kind):
        parts = zip(kind, array.flatten(), strict=True)
        return sum(_sum(part, numbers) * (2 * i + 1) for i, (_, part) in enumerate(parts))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.list_value_length(array).to_numpy().astype(np.uint64)
        firsts = np.cumsum(lengths) - lengths
        items = np.repeat(numbers * np.uint64(1_000_003) - firsts, lengths.astype(np.int64))
        return _sum(pc.list_flatten(array), items + np.arange(len(items), dtype=np.uint64))
    elif pa.types.is_null(kind):
        return 0
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "O":
        values = pandas.util.hash_array(values, categorize=False)
    bits = values.view(f"u{values.dtype.itemsize}") * np.uint64(_ODD)
    bits ^= bits >> np.uint64(32)  # a float's upper bits count as much as its lower ones
    bits *= numbers * np.uint64(2) + np.uint64(1)
    return int(bits.sum(dtype=np.uint64))


def columns_fingerprint(spec) -> Any:
    """Returns the columns of `features`, `labels` or `sample_weights`, parsed."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        return {name: columns_fingerprint(part) for name, part in spec.items()}
    usual = {field.name: field.default for field in dataclasses.fields(spec.parts[0])}
    parts = []
    for part in spec.parts:
        changed = {k: v for k, v in dataclasses.asdict(part).items() if k == "name" or v != usual[k]}
        parts.append(part.name if set(changed) == {"name"} else describe(changed))
    return {"stacked": parts} if spec.stacked else parts[0]
