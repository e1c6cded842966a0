"""What a model, its optimizer, a function and a dataset are, in JSON that is the same in every process.

Names that Keras counts up ("dense_1"), addresses, modules and lines of code are left out: two processes, and a
`build_model` that was moved, must give the same. Functions are described by a hash of their bytecode, which comments
and formatting do not change; a class of the user's by those of its methods.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import inspect
import json
import marshal
import math
import posixpath
import sys
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import ray

from raytf import optimizers
from raytf.blocks import as_table
from raytf.columns import flat

# Longer lists and texts are kept as a hash: a vocabulary, a table of constants.
_LONGEST_LIST, _LONGEST_TEXT = 256, 256
_MOST_LAYERS = 2000
# Keys of a layer's config that say nothing about what it computes, or are the trainer's own.
_LEFT_OUT = frozenset(
    {"name", "seed", "module", "registered_name", "shared_object_id", "build_config", "compile_config"}
    | {"epochs", "batch_size", "num_workers", "learning_rate"}
)
# Of a source's files: all names and sizes count, and the last bytes of so many; Parquet has its statistics there.
_TAILS, _TAIL_BYTES = 16, 64 << 10
_SAMPLE_ROWS = 1000


# ------------------------------------------------------------------------------------------------------ plain values


def described(value: Any, left_out: frozenset[str] = frozenset()) -> Any:
    """A value as JSON: numbers and texts as they are, functions and objects by what tells them apart.

    Args:
        value: anything, also as Keras serializes it.
        left_out: keys of dicts that do not count.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{len(value)} characters, {_hash(value)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes, {_hash(value)}"
    if isinstance(value, Mapping):
        return _described_dict(value, left_out)
    if isinstance(value, (list, tuple)):
        return shortened([described(part, left_out) for part in value])
    if isinstance(value, (set, frozenset)):
        return shortened(sorted((described(part, left_out) for part in value), key=_dumped))
    if isinstance(value, np.generic):
        return described(value.item(), left_out)
    if isinstance(value, np.ndarray):
        return _described_array(value)
    if isinstance(value, functools.partial):
        inner = described(value.func, left_out)
        return {"partial": inner, "args": described(value.args, left_out), **described(value.keywords, left_out)}
    if inspect.isclass(value):
        return {"class": value.__name__, **_code_of_class(value)}
    if callable(value) and hasattr(value, "__name__"):
        return described_function(value)
    return _described_object(value, left_out)


def _number(value: float) -> Any:
    """Float32 and float64 of one number are the same."""
    return float(f"{value:.6g}") if math.isfinite(value) else repr(value)


def _described_dict(value: Mapping, left_out: frozenset[str]) -> Any:
    kind, config = value.get("class_name"), value.get("config")
    if kind is None or "config" not in value:
        return {str(k): described(v, left_out) for k, v in value.items() if k not in left_out}
    # as Keras serializes an object
    if kind == "__lambda__":
        return {"function": "<lambda>", "code": _code_of_dump(config)}
    if kind == "__keras_tensor__":
        return {"tensor": described([config.get("shape"), config.get("dtype")])}
    if isinstance(config, str):  # a function by its name
        return {"function": config}
    if "DTypePolicy" in kind:
        return described(config.get("name") or config)
    if isinstance(config, Mapping) and "layers" in config:
        return {"class": kind}  # its layers are described each by itself
    inner = described(config, left_out)
    return {"class": kind, **(inner if isinstance(inner, dict) else {"config": inner})}


def _described_array(value: np.ndarray) -> Any:
    if value.size <= 16 and value.dtype.kind in "biuf":
        return described(value.tolist())
    raw = value.astype(str).tobytes() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    return f"{value.dtype}{list(value.shape)}, {_hash(raw)}"


def _described_object(value: Any, left_out: frozenset[str]) -> Any:
    found: dict[str, Any] = {"class": type(value).__name__}
    if hasattr(value, "numpy") and hasattr(value, "dtype"):  # a tensor or a variable
        try:
            return _described_array(np.asarray(value))
        except Exception:  # a symbolic one has no values
            return {"tensor": str(getattr(value, "shape", ""))}
    if hasattr(value, "get_config"):
        try:
            found |= described(dict(value.get_config()), left_out | {"name"})
        except Exception:  # what has no config is known by its class and its code
            found |= {k: described(v) for k, v in vars(value).items() if isinstance(v, (bool, int, float, str))}
    return {**found, **_code_of_class(type(value))}


def shortened(values: list, longest: int = _LONGEST_LIST) -> Any:
    """A list, or its length and hash where it is long."""
    return values if len(values) <= longest else f"{len(values)} values, {_hash(_dumped(values))}"


def _dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _hash(value: str | bytes) -> str:
    return hashlib.blake2b(value.encode() if isinstance(value, str) else value, digest_size=8).hexdigest()


# --------------------------------------------------------------------------------------------------------- functions


def described_function(function: Callable) -> dict[str, Any]:
    """A function by its name and, unless it is a library's, by its code and the plain values that it has caught."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    function = getattr(function, "__func__", function)
    found: dict[str, Any] = {"function": getattr(function, "__name__", type(function).__name__)}
    if isinstance(function, types.FunctionType) and not _is_installed(function.__module__):
        found["code"] = _code(function)
    return found


def _is_installed(module: str | None) -> bool:
    """Whether a module is a library's, not the user's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "builtins" or (file is not None and ("site-packages" in file or "dist-packages" in file))


def _code(function: types.FunctionType, depth: int = 0) -> str:
    parts = [_code_parts(function.__code__), described(function.__defaults__), described(function.__kwdefaults__)]
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        # a dict is mostly the whole config, of which a part counts that is not known
        if isinstance(value, (bool, int, float, str)):
            parts.append(described(value))
        elif isinstance(value, types.FunctionType) and depth < 3 and not _is_installed(value.__module__):
            parts.append(_code(value, depth + 1))
    return _versioned(parts)


def _versioned(parts: Any) -> str:
    """A hash that says of which Python it is, as bytecode differs between these."""
    return f"{sys.version_info.major}.{sys.version_info.minor} {_hash(_dumped(parts))}"


def _code_parts(code: types.CodeType) -> list:
    """What a code object does, without file, lines and docstring."""
    constants = list(code.co_consts)
    if code.co_name != "<lambda>" and constants and isinstance(constants[0], str):
        constants = constants[1:]
    return [
        code.co_code.hex(),
        [_constant(value) for value in constants],
        list(code.co_names),
        list(code.co_varnames),
        [code.co_argcount, code.co_kwonlyargcount, code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)],
    ]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code_parts(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(part) for part in value]
        return parts if isinstance(value, tuple) else sorted(parts, key=_dumped)
    if value is Ellipsis or isinstance(value, complex):
        return repr(value)
    # names within a qualified name change when a function is moved
    return value.rpartition("<locals>.")[2] if isinstance(value, str) else described(value)


def _code_of_dump(config: Any) -> str:
    """The code of a function that Keras has serialized in this process."""
    dumped = config.get("value", config) if isinstance(config, Mapping) else config
    text = dumped.get("code") if isinstance(dumped, Mapping) else dumped[0]
    return _versioned([_code_parts(marshal.loads(codecs.decode(text.encode(), "base64"))), None, None])


def _code_of_class(kind: type) -> dict[str, str]:
    """{"code": hash} of the methods of a class and its bases, as far as they are the user's."""
    parts = []
    for base in kind.__mro__:
        if _is_installed(base.__module__):
            continue
        for name, member in sorted(vars(base).items()):
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            member = inspect.unwrap(getattr(member, "python_function", member)) if callable(member) else member
            if isinstance(member, types.FunctionType):
                parts.append([name, _code(member)])
    return {"code": _versioned(parts)} if parts else {}


# ----------------------------------------------------------------------------------------------- a model, its training


def of_model(model) -> dict[str, Any]:
    """What a compiled and built model is, and how it is trained.

    Args:
        model: a `keras.Model` whose optimizer is built.

    Returns:
        {"keras", "model", "optimizers", "loss", "metrics"}; JSON.
    """
    import keras

    compiled = dict(getattr(getattr(model, "_compile_config", None), "config", None) or {})
    return {
        "keras": keras.__version__,
        "model": {
            "class": type(model).__name__,
            "layers": shortened([_layer(layer) for layer in _layers(model)], _MOST_LAYERS),
            "graph": _graph(model),
            "weights": shortened([f"{_last(v)} {_shape(v)}" for v in model.weights]),
            **_own_config(model),
        },
        "optimizers": {name: _optimizer(optimizer) for name, optimizer in optimizers.of(model).items()},
        "loss": _nested(compiled.get("loss"), _loss),
        "loss_weights": described(compiled.get("loss_weights")),
        "metrics": _nested(compiled.get("metrics"), described),
        "weighted_metrics": _nested(compiled.get("weighted_metrics"), described),
    }


def _layers(model) -> list:
    return list(model._flatten_layers(include_self=False, recursive=True))


def _layer(layer) -> dict[str, Any]:
    return {"class": type(layer).__name__, **_own_config(layer)}


def _own_config(layer) -> dict[str, Any]:
    """{"config"} that a layer gives, or {"arguments"} that Keras noted when it was made; and {"code"} of the user's."""
    import keras
    from keras.src.models.functional import Functional
    from keras.src.utils.python_utils import is_default

    found: dict[str, Any] = {}
    if not isinstance(layer, (Functional, keras.Sequential)):
        with_code = _code_of_class(type(layer))
        try:
            config = described(dict(layer.get_config()), _LEFT_OUT)
        except Exception:  # what has no config is known by its weights, its layers and its code
            function = getattr(layer, "function", None)
            config = {"function": described(function)} if callable(function) else {}
        if is_default(layer.get_config):
            arguments = {k: v for k, v in config.items() if not isinstance(v, dict) or "config" not in k}
            arguments = {k: v for k, v in arguments.items() if k not in ("dtype", "trainable")}
            config = {k: config[k] for k in ("dtype", "trainable") if k in config}
            found |= {"arguments": arguments} if arguments else {}
        found |= {"config": config} if config else {}
        found |= with_code
    return found


def _graph(model) -> str | None:
    """A hash of how the operations of a functional model hang together; None for models that are not."""
    import keras

    operations = getattr(model, "operations", None)
    nodes = getattr(model, "_nodes", None)
    if not operations or nodes is None:
        return None
    from keras.src.models.functional import Functional
    from keras.src.ops.function import make_node_key

    places = {id(operation): i for i, operation in enumerate(operations)}

    def argument(value):
        if isinstance(value, keras.KerasTensor):
            operation, _, index = value._keras_history
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
            for i, node in enumerate(operation._inbound_nodes)
            if make_node_key(operation, i) in nodes
        ]
        is_layer = isinstance(operation, (keras.Layer, Functional))
        parts.append([type(operation).__name__, own, None if is_layer else described(_config_of(operation), _LEFT_OUT)])
    ends = [[argument(t) for t in tensors] for tensors in (model.inputs, model.outputs)]
    return _hash(_dumped([parts, ends]))


def _config_of(operation) -> Any:
    try:
        return dict(operation.get_config())
    except Exception:  # known by its class and arguments
        return None


def _optimizer(optimizer) -> dict[str, Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    try:
        config = dict(optimizer.get_config())
    except Exception:  # a schedule without a config
        rate = getattr(optimizer, "_learning_rate", None)
        config = {"learning_rate": rate}
    config.pop("inner_optimizer", None)
    found = {
        "class": type(optimizer).__name__,
        "config": {k: described(v, frozenset({"name", *_LEFT_OUT} - {"learning_rate"})) for k, v in config.items()},
        "slots": shortened([_shape(v) for v in optimizer.variables]),
        **_code_of_class(type(optimizer)),
    }
    for name in ("name", "jit_compile"):
        found["config"].pop(name, None)
    return found | ({"inner": _optimizer(inner)} if inner is not None else {})


def _loss(value: Any) -> Any:
    """A loss by its function, whether it was given by name, as a function or as an object."""
    import keras
    from keras.src.losses.losses import LossFunctionWrapper

    try:
        value = keras.losses.get(value)
    except ValueError:
        return described(value)
    reduction, given = "sum_over_batch_size", {}
    if isinstance(value, LossFunctionWrapper):
        reduction, given, value = value.reduction, value._fn_kwargs, value.fn
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
        their last bytes, not by times: a copy is the same. Data in memory is told apart by its first and last rows.
    """
    operators = list(dataset._logical_plan.dag.post_order_iter())
    steps = [op for op in operators if op.input_dependencies]
    return {
        "rows": rows,
        "sources": [_source(op) for op in operators if not op.input_dependencies],
        "operations": [_operation(op) for op in steps if type(op).__name__ not in ("ReadFiles", "Project")],
    }


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
    if hasattr(datasource, "_paths") and hasattr(datasource, "_file_sizes"):
        names, sizes = list(datasource._paths()), [int(size or 0) for size in datasource._file_sizes()]
        root = posixpath.commonpath([posixpath.dirname(name) for name in names])
        files = sorted((posixpath.relpath(n, root or "."), n, s) for n, s in zip(names, sizes, strict=True))
        content = _content(datasource._filesystem, files)
        return {"files": len(files), "bytes": sum(sizes), "content": content}
    if datasource is not None:
        return {"class": datasource.get_name()}
    bundles = operator.output_data() or []
    refs = [entry.ref for bundle in bundles for entry in bundle.blocks if entry.metadata.num_rows]
    if not refs:
        return {"class": type(operator).__name__}
    ends = [as_table(ray.get(ref)) for ref in ([refs[0], refs[-1]] if len(refs) > 1 else refs)]
    slices = [ends[0].slice(0, _SAMPLE_ROWS), ends[-1].slice(max(0, ends[-1].num_rows - _SAMPLE_ROWS))]
    return {"content": _hash(b"".join(map(_table_bytes, slices)))}


def _table_bytes(table: pa.Table) -> bytes:
    """The rows of a table, whatever its chunks."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
        for batch in table.replace_schema_metadata(None).combine_chunks().to_batches():
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


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
        tails = list(pool.map(lambda i: _hash(tail(*files[i][1:])), chosen))
    return _hash(_dumped([[[name, size] for name, _, size in files], tails]))


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
