"""Checks of a command's options, before it imports Ray, TensorFlow or the user's module. Driver side."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raytf import validation
from raytf.compat import legacy_keras
from raytf.data import records
from raytf.data.columns import check_names, of_dataset, parse
from raytf.data.files import CSV_ENDINGS, Files, csv_schema, find
from raytf.errors import ConfigError, one_line, user_line
from raytf.identity.required_keys import required_keys
from raytf.runtime.topology import per_replica_batch, pick_strategy
from raytf.tune.learning_rate import Scaling


def split_function(name: str) -> tuple[str, str]:
    """Splits "MODULE:FUNCTION", and checks that the module exists without an import of it.

    Raises:
        ConfigError: The name has another form, or there is no such module.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError("A model is named as MODULE:FUNCTION", repr(name), "For example mymodels:build_model")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # only the outermost package, as `find_spec` of a submodule imports the package
        spec, reason = importlib.util.find_spec(module.partition(".")[0]), f"No module named {module!r}"
    except (ImportError, ValueError) as error:
        spec, reason = None, str(error)
    if spec is None:
        raise ConfigError(
            "MODULE must be a module that can be imported from the current folder",
            f"{module!r} ({reason})",
            "Run the command in the module's folder, and name it without .py",
        )
    return module, function


def load_function(module: str, function: str):
    """Returns a function of a module, which it imports from the current folder.

    Raises:
        ConfigError: There is no such module or function, or the module imports another one that is missing.
    """
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module and not module.startswith(f"{missing}."):
            raise ConfigError(
                "What MODULE imports must be installed, or in the current folder",
                f"{module!r}, for which there is {one_line(error)}{user_line(error)}",
                f"Install the package of {missing!r}, here and on the nodes of the cluster",
            ) from error
        raise ConfigError(
            "MODULE must be a module that can be imported from the current folder",
            f"{module!r} ({error})",
            "Run the command in the module's folder, and name it without .py",
        ) from error
    if not callable(getattr(loaded, function, None)):
        raise ConfigError(
            "FUNCTION must be a function of MODULE", f"{module}:{function}", "Check the name of the function"
        )
    return getattr(loaded, function)


def check_training(
    given: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any],
    paths: Mapping[str, str],
) -> None:
    """Raises ConfigError for options of `raytf train`, `plan` and `sweep` that are wrong by themselves.

    Args:
        given: Values of the options, by receiver and by name.
        config: The config of the model function.
        paths: Paths of the data, by name of the dataset.
    """
    legacy_keras.refuse_keras_2(legacy_keras.requesting_option(False))
    workers, trainer = given["workers"], given["trainer"]
    validation.check_config(config)
    validation.check_num_ps(trainer["strategy"], trainer["num_ps"])
    count, devices = workers["num_workers"], workers["gpus_per_worker"]
    pick_strategy(trainer["strategy"], workers=count, devices=devices, tpu=False)
    per_replica_batch(config["batch_size"], 1 if trainer["num_ps"] else count * max(1, devices))
    roles = {role: trainer[role] for role in ("features", "labels", "sample_weights")}
    for name, path in paths.items():
        check_files(name, path, given["data"]["format"], roles)


def check_files(name: str, path: str, format: str, roles: Mapping[str, Any], labelled: bool = True) -> str | None:
    """Returns the format of a local path's files; None for a URI, which is read when Ray is started.

    Args:
        name: Name of the dataset, for messages.
        path: Path, or a URI.
        format: One of `validation.FORMATS`, or "auto" for that of the files.
        roles: Columns by role, None for those that are not given.
        labelled: Whether images have labels.

    Raises:
        ConfigError: There are no files of one format, or they have no columns for the roles.
    """
    if "://" in path:
        return None
    kind, files = find(name, path, format)
    if kind == "parquet" and not os.path.exists(path):  # Ray Data, which reads it, knows no pattern and no "~"
        raise ConfigError(f"The {name} data must be a folder or file that exists", repr(path), "Check the path")
    check_columns(name, roles, _columns_of_files(name, kind, files, labelled))
    return kind


def _columns_of_files(name: str, kind: str, files: Files, labelled: bool) -> list[str] | None:
    """Returns the columns of local files; None if only a read of all files shows them."""
    if kind == "parquet":
        return _parquet_columns(name, files)
    if kind == "csv":
        return csv_schema(files.filesystem, files.paths[0]).names
    if kind == "tfrecord":
        return records.first_names(files)
    tables = files.filter_names(lambda file: file.endswith(CSV_ENDINGS)).paths if labelled else ()
    if len(tables) > 1:  # which is refused as they are read
        return None
    if tables:
        return ["image", "path", *csv_schema(files.filesystem, tables[0]).names[1:]]
    return ["image", "path", *(["label"] if labelled else [])]


def check_config_keys(build_model: Callable, known: Collection[str], params: Sequence[Any]) -> None:
    """Raises ConfigError if the model function always reads a key that no option sets.

    Args:
        build_model: The model function, which is not called.
        known: Keys of its config.
        params: Options of the command.
    """
    for key, location in required_keys(build_model).items():
        if key in known:
            continue
        option = next((p.opts[0] for p in params if getattr(p, "receiver", None) == "config" and p.name == key), None)
        name = getattr(build_model, "__name__", "the model function")
        raise ConfigError(
            "The model function finds in its config what the options give",
            f"no {option or repr(key)}, and {name} needs config[{key!r}] ({location})",
            f"Give {option} VALUE" if option else f"Give --set {key}=VALUE",
        )


def check_sweep(options: Mapping[str, Any], domains: Sequence[str], space: str | None) -> None:
    """Raises ConfigError for options and domains of `raytf sweep` that are wrong by themselves."""
    if not domains and not space and not options["resume"]:
        raise ConfigError(
            "A sweep compares values of the config", "no domain", "For example 'learning_rate=loguniform(1e-4,1e-1)'"
        )
    for domain in domains:
        name, equals, value = domain.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                "A domain is written as NAME=DOMAIN", repr(domain), "For example 'learning_rate=loguniform(1e-4,1e-1)'"
            )
    rule, base = options["scale_learning_rate"], options["base_batch_size"]
    Scaling(rule=rule, base_batch_size=base, warmup_steps=options["warmup_steps"])
    if options["resume"] and "://" not in options["resume"] and not os.path.exists(options["resume"]):
        raise ConfigError("A sweep is resumed from a path that exists", repr(options["resume"]), "Check the path")


def check_columns(name: str, roles: Mapping[str, Any], names: Collection[str] | None) -> None:
    """Raises ConfigError for columns of roles that are not among the names of the dataset's; None checks nothing."""
    with of_dataset(name):
        for role, columns in roles.items():
            if names is not None:
                check_names(parse(columns, role), list(names), role)


_NO_PARQUET = (
    "Check the path; write other files as Parquet first, such as pandas.read_csv(...).to_parquet(...), "
    "or read them with ray.data in a raytf.KerasTrainer"
)


def _parquet_columns(name: str, files: Files) -> list[str]:
    """Returns the columns of local Parquet files; raises ConfigError if the first file is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = files.paths[0]
    try:
        names = pq.read_schema(first).names
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"The {name} data must hold Parquet files", f"{first!r} ({str(error).splitlines()[0]})", _NO_PARQUET
        ) from error
    # Ray Data adds a column for each folder named "name=value"
    folders = os.path.relpath(first, files.root).split(os.sep)[:-1]
    return [*names, *(key for key, equals, _ in (folder.partition("=") for folder in folders) if equals)]
