"""What a model, its optimizer, a function and a dataset are, in JSON that is the same in every process.

Names that Keras counts up ("dense_1"), addresses, modules and lines of code are left out: two processes, and a
`build_model` that was moved, must give the same. What functions and objects of the user's mean is said in `meaning.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import posixpath
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow.fs
import ray

from raytf import timeouts
from raytf.compat import keras_objects, ray_data
from raytf.data.columns import flat
from raytf.data.stored import as_table
from raytf.identity import contents
from raytf.identity.meaning import (
    ValueDescriber,
    config_of,
    described,
    described_array,
    dumped,
    hashed,
    is_users_object,
    live_config,
    shortened,
)
from raytf.parallel import model_optimizers
from raytf.runtime.answers import collect

_MOST_LAYERS = 2000
# Keys of a layer's config that say nothing about what it computes, or are the trainer's own.
_LEFT_OUT = frozenset(
    {"name", "seed", "module", "registered_name", "shared_object_id", "build_config", "compile_config"}
    | {"epochs", "batch_size", "num_workers"}
)
# What stands for a value that is another each time a model is built.
_VARIES = "another each time"
# Of a source's files: all names and sizes count, and the last bytes of so many; Parquet has its statistics there.
_TAILS, _TAIL_BYTES = 16, 64 << 10
# Of blocks in memory all rows count up to so many bytes, and above a sample; up to so many they are read here.
_ALL_ROWS_BYTES, _HERE_BYTES = 1 << 30, 128 << 20
_DIGESTS_AT_ONCE = 64


# ----------------------------------------------------------------------------------------------- a model, its training


def of_model(model, again: Callable[[], Any] | None = None) -> dict[str, Any]:
    """What a compiled and built model is, and how it is trained.

    Args:
        model: a `keras.Model` whose optimizer is built.
        again: again() -> the model once more, not built: attributes, tensors and values of frozen weights count where
            they are the same then, so that what is drawn or measured does not. It is asked only where a model has such,
            or None: frozen weights count where they are one number, or learnt by `adapt`, and tensors do not.

    Returns:
        {"keras", "model", "optimizers", "loss", "metrics"}; JSON.
    """
    found = _told(model, again is not None)
    if again is None or not any(map(_in_doubt, _parts(found))):
        return found
    try:
        other = again()
        others = [_own_config(other, True), *(_layer(layer, True) for layer in _layers(other))]
    except Exception:  # one that can be built once in a process
        return _told(model, False)
    if [type(layer).__name__ for layer in _layers(other)] != [part["class"] for part in _parts(found)[1:]]:
        return _told(model, False)  # some layers come later
    for part, twin in zip(_parts(found), others, strict=True):
        for key in ("attributes", "values"):
            if key in part:
                part[key] = _agreed(part[key], twin.get(key, {}), keep=key == "attributes")
    return found


def _agreed(one: Any, other: Any, keep: bool) -> Any:
    """JSON in which two agree, with a mark where they do not; `keep` what the other does not have."""
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        kept = {k: v for k, v in one.items() if keep or k in other or isinstance(v, (int, float))}
        return {k: _agreed(v, other[k], keep) if k in other else v for k, v in kept.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_agreed(*pair, keep) for pair in zip(one, other, strict=True)]
    return _VARIES


def _parts(found: dict) -> list[dict]:
    """The model and its layers."""
    layers = found["model"]["layers"]
    return [found["model"], *(layers if isinstance(layers, list) else [])]


def _in_doubt(part: dict) -> bool:
    """Whether attributes or values may be others each time."""
    attributes = [value for value in part.get("attributes", {}).values() if value is not None]
    attributes = [value for value in attributes if not isinstance(value, dict) or set(value) != {"class"}]
    return not all(isinstance(value, int) for value in attributes) or any(
        not isinstance(value, (int, float)) for value in part.get("values", {}).values()
    )


def _told(model, sure: bool) -> dict[str, Any]:
    import keras

    compiled = dict(getattr(getattr(model, "_compile_config", None), "config", None) or {})
    return {
        "keras": keras.__version__,
        "model": {
            "class": type(model).__name__,
            "layers": shortened([_layer(layer, sure) for layer in _layers(model)], _MOST_LAYERS),
            "graph": _graph(model),
            "weights": shortened([f"{_last(v)} {_shape(v)}" for v in model.weights]),
            **_own_config(model, sure),
        },
        "optimizers": {name: _optimizer(optimizer) for name, optimizer in model_optimizers.of(model).items()},
        "loss": _nested(compiled.get("loss"), _loss),
        "loss_weights": described(compiled.get("loss_weights")),
        "metrics": _nested(compiled.get("metrics"), described),
        "weighted_metrics": _nested(compiled.get("weighted_metrics"), described),
    }


def _layers(model) -> list:
    return keras_objects.layers_of(model, with_itself=False)


def _layer(layer, sure: bool) -> dict[str, Any]:
    from raytf.compat.keras import Functional

    graph = {"graph": _graph(layer)} if isinstance(layer, Functional) else {}
    return {"class": type(layer).__name__, **_own_config(layer, sure), **graph}


def _own_config(layer, sure: bool) -> dict[str, Any]:
    """What a layer is beside its class and its weights' shapes.

    {"config"} that it gives, or {"arguments"} that Keras noted when it was made; {"attributes", "code", "reads"} of the
    user's class; {"values"} that no training changes.
    """
    import keras

    from raytf.compat.keras import Functional, is_default

    found: dict[str, Any] = {}
    reader = ValueDescriber(_LEFT_OUT, tensors=sure)
    if not isinstance(layer, (Functional, keras.Sequential)):
        config = live_config(layer, config_of(layer), reader, _LEFT_OUT)
        if is_default(layer.get_config):
            arguments = {k: v for k, v in config.items() if k not in ("dtype", "trainable")}
            config = {k: config[k] for k in ("dtype", "trainable") if k in config}
            found |= {"arguments": arguments} if arguments else {}
        found |= {"config": config} if config else {}
    known = {**found.get("config", {}), **found.get("arguments", {})}
    attributes = {k: v for k, v in reader.attributes(layer).items() if k not in known}
    values = _values(layer, sure)
    return {
        **found,
        **({"attributes": attributes} if attributes else {}),
        **({"values": values} if values else {}),
        **reader.code_of_class(type(layer)),
    }


def _values(layer, sure: bool) -> dict[str, Any]:
    """The numbers of a layer's own weights that training leaves as they are, and what it has learnt by `adapt`."""
    import keras

    found: dict[str, Any] = {}
    sure = sure or isinstance(layer, keras.layers.Normalization)
    trained, others = keras_objects.own_variables(layer)
    for variable in others + ([] if layer.trainable else trained):
        if "string" in str(variable.dtype):
            continue
        value = np.asarray(keras.ops.convert_to_numpy(variable))
        name = _last(variable)
        while name in found:
            name += "'"
        # one number alone may have been drawn
        if value.size and (value == value.flat[0]).all() and (value.size > 1 or value.flat[0] in (0, 1)):
            found[name] = described(value.flat[0])
        elif sure:
            found[name] = described_array(np.atleast_1d(value))
    learnt = getattr(layer, "vocabulary", None) is None and getattr(layer, "input_vocabulary", None) is None
    if learnt and isinstance(layer, (keras.layers.TextVectorization, *_lookups())):
        found["vocabulary"] = described([str(word) for word in layer.get_vocabulary()])
    return found


def _lookups() -> tuple:
    import keras

    return keras.layers.StringLookup, keras.layers.IntegerLookup


def _graph(model) -> str | None:
    """A hash of how the operations of a functional model hang together; None for models that are not."""
    import keras

    operations = getattr(model, "operations", None)
    nodes = keras_objects.graph_nodes(model)
    if not operations or nodes is None:
        return None
    from raytf.compat.keras import Functional, make_node_key

    places = {id(operation): i for i, operation in enumerate(operations)}

    def argument(value):
        if isinstance(value, keras.KerasTensor):
            operation, _, index = keras_objects.history_of(value)
            return ["tensor", places.get(id(operation)), index]
        if isinstance(value, Mapping):
            return {str(k): argument(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [argument(part) for part in value]
        return described(value, _LEFT_OUT)

    parts = []
    for operation in operations:
        own = [
            [argument(node.arguments.args), argument(node.arguments.kwargs)]
            for i, node in enumerate(keras_objects.nodes_of(operation))
            if make_node_key(operation, i) in nodes
        ]
        is_layer = isinstance(operation, (keras.Layer, Functional))
        parts.append([type(operation).__name__, own, None if is_layer else _config_of(operation)])
    ends = [[argument(t) for t in tensors] for tensors in (model.inputs, model.outputs)]
    return hashed(dumped([parts, ends]))


def _config_of(operation) -> Any:
    held = {k: described(v) for k, v in sorted(vars(operation).items()) if callable(v) and is_users_object(v)}
    return [described(config_of(operation), _LEFT_OUT), held]


def _optimizer(optimizer) -> dict[str, Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    reader = ValueDescriber(tensors=False)
    config = config_of(optimizer)
    if "learning_rate" not in config and inner is None:
        config = config | {"learning_rate": keras_objects.rate_of(optimizer)}
    left_out = _LEFT_OUT | {"inner_optimizer", "jit_compile"}
    found = {
        "class": type(optimizer).__name__,
        "config": live_config(optimizer, config, reader, left_out),
        "slots": shortened([_shape(v) for v in optimizer.variables]),
        **reader.code_of_class(type(optimizer)),
    }
    attributes = {k: v for k, v in reader.attributes(optimizer).items() if k not in {*found["config"], *left_out}}
    found |= {"attributes": attributes} if attributes else {}
    return found | ({"inner": _optimizer(inner)} if inner is not None else {})


def _loss(value: Any) -> Any:
    """A loss by its function, whether it was given by name, as a function or as an object."""
    import keras

    from raytf.compat.keras import LossFunctionWrapper

    try:
        value = keras.losses.get(value)
    except ValueError:
        return described(value)
    reduction, given = "sum_over_batch_size", {}
    if isinstance(value, LossFunctionWrapper) and not is_users_object(value):
        reduction, given, value = value.reduction, keras_objects.loss_arguments(value), value.fn
    if not callable(value) or isinstance(value, keras.losses.Loss):
        return described(value, frozenset({"name"}))
    usual = inspect.signature(value).parameters
    kwargs = {k: v for k, v in given.items() if k not in usual or usual[k].default != v}
    found = described(value)
    return found | {k: described(v) for k, v in kwargs.items()} | {"reduction": reduction}


def _nested(value: Any, describe: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _nested(v, describe) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nested(part, describe) for part in value]
    return None if value is None else describe(value)


def _last(variable) -> str:
    return variable.path.rpartition("/")[2]


def _shape(variable) -> str:
    return f"{tuple(variable.shape)} {variable.dtype}{'' if getattr(variable, 'trainable', True) else ' fixed'}"


# --------------------------------------------------------------------------------------------------------- the data


def types_of(block, *specs) -> dict[str, str]:
    """The types of the columns that are used as they are, by name; those of a vector become float32, whatever they are.

    Args:
        block: of the data, an Arrow table or a pandas frame.
        specs: features, labels and sample weights, parsed.
    """
    schema = as_table(block).schema
    names = sorted({name for spec in specs for part in flat(spec) if not part.stacked for name in part.names})
    return {name: str(schema.field(name).type).replace("large_", "") for name in names}


def of_dataset(dataset, rows: int) -> dict[str, Any]:
    """What a `ray.data.Dataset` holds, as far as that is cheap to know: its rows, sources and operations.

    Args:
        dataset: that was read.
        rows: of it, in all.

    Returns:
        {"rows", "sources", "operations"}; JSON. Files are told apart by names below what was read, sizes and, of some,
        their last bytes, not by times: a copy is the same. Data in memory is told apart by all of its rows, and above 1
        GiB by a sample of them, evenly spaced over all blocks.
    """
    operators = list(ray_data.last_operator(dataset).post_order_iter())
    steps = [op for op in operators if op.input_dependencies]
    return {
        "rows": rows,
        "sources": [_source(op) for op in operators if not op.input_dependencies],
        "operations": [_operation(op) for op in steps if type(op).__name__ not in ("ReadFiles", "Project")],
    }


def of_pipeline(source) -> dict[str, Any]:
    """What is known of a `raytf.TFData`: its function with the values that it reads, not the files; as `of_dataset`."""
    names = ("make_dataset", "shards_itself", "rows", "steps_per_epoch", "class_weight")
    told = {name: described(getattr(source, name)) for name in names}
    return {"rows": 0, "sources": [], "operations": [told]}


def _operation(operator) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(operator).__name__}
    for name in ("fn", "fn_args", "fn_kwargs", "fn_constructor_args", "fn_constructor_kwargs", "limit", "key", "seed"):
        value = getattr(operator, name, None)
        if value is not None and not isinstance(value, types.MethodType):
            found[name] = described(value)
    return found


def _source(operator) -> dict[str, Any]:
    datasource = getattr(operator, "datasource", None)
    if getattr(operator, "paths", None):
        filesystem = operator.filesystem or pyarrow.fs.LocalFileSystem()
        files = _listed(filesystem, operator.paths)
        return {"files": len(files), "bytes": sum(size for _, _, size in files), "content": _content(filesystem, files)}
    listed = ray_data.listed_files(datasource)
    if listed is not None:
        names, sizes, filesystem = listed
        root = posixpath.commonpath([posixpath.dirname(name) for name in names])
        files = sorted((posixpath.relpath(n, root or "."), n, s) for n, s in zip(names, sizes, strict=True))
        content = _content(filesystem, files)
        return {"files": len(files), "bytes": sum(sizes), "content": content}
    if datasource is not None:
        return {"class": datasource.get_name()}
    return _in_memory(operator)


def _in_memory(operator) -> dict[str, Any]:
    """A digest of the rows of blocks, computed where they lie; it does not depend on how the rows are divided."""
    blocks = [entry for bundle in operator.output_data() or [] for entry in bundle.blocks if entry.metadata.num_rows]
    if not blocks:
        return {"class": type(operator).__name__}
    rows = [block.metadata.num_rows for block in blocks]
    size = sum(block.metadata.size_bytes or 0 for block in blocks)
    stride = contents.stride(sum(rows)) if size > _ALL_ROWS_BYTES else 1
    starts = np.cumsum([0, *rows[:-1]]).tolist()
    work = list(zip([block.ref for block in blocks], starts, strict=True))
    if size <= _HERE_BYTES:
        found = [_digest(ray.get(ref, timeout=timeouts.get().digest), start, stride) for ref, start in work]
    else:
        # no CPU is asked for: workers may hold them all
        remote = ray.remote(num_cpus=0, max_retries=2)(_digest)
        found = []
        for i in range(0, len(work), _DIGESTS_AT_ONCE):
            part = work[i : i + _DIGESTS_AT_ONCE]
            refs = [remote.remote(ref, start, stride) for ref, start in part]
            names = [f"block {i + j}" for j in range(len(refs))]
            found += collect(refs, timeouts.get().digest, "digests of the data in memory", names=names)
    return {"content": hashed(dumped(contents.joined(found)))}


def _digest(block, start: int, stride: int) -> dict:
    return contents.digest(as_table(block), start, stride)


def _listed(filesystem, paths) -> list[tuple[str, str, int]]:
    """(name below what was read, path, size) of each file, in order."""
    found = []
    for info in filesystem.get_file_info(list(paths)):
        if info.type == pyarrow.fs.FileType.Directory:
            inside = filesystem.get_file_info(pyarrow.fs.FileSelector(info.path, recursive=True))
            files = [one for one in inside if one.type == pyarrow.fs.FileType.File]
            found += [(posixpath.relpath(one.path, info.path), one.path, one.size or 0) for one in files]
        else:
            found.append((info.base_name, info.path, info.size or 0))
    return sorted(found)


def _content(filesystem, files: list[tuple[str, str, int]]) -> str:
    """A hash of names and sizes of all files, and of the ends of some that are spread over them."""

    def tail(path: str, size: int) -> bytes:
        with filesystem.open_input_file(path) as file:
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)

    chosen = sorted({i * (len(files) - 1) // max(1, _TAILS - 1) for i in range(_TAILS)}) if files else []
    with ThreadPoolExecutor(_TAILS) as pool:
        tails = list(pool.map(lambda i: hashed(tail(*files[i][1:])), chosen))
    return hashed(dumped([[[name, size] for name, _, size in files], tails]))


def of_columns(spec) -> Any:
    """The columns of `features`, `labels` or `sample_weights`, parsed."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        return {name: of_columns(part) for name, part in spec.items()}
    usual = {field.name: field.default for field in dataclasses.fields(spec.parts[0])}
    parts = []
    for part in spec.parts:
        changed = {k: v for k, v in dataclasses.asdict(part).items() if k == "name" or v != usual[k]}
        parts.append(part.name if set(changed) == {"name"} else described(changed))
    return {"stacked": parts} if spec.stacked else parts[0]
