"""What is wrong with a command's options, said before Ray, TensorFlow or the user's module is imported. Driver side."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raytf import validation
from raytf.compat import legacy_keras
from raytf.data.columns import check_names, parse
from raytf.errors import ConfigError
from raytf.runtime.topology import per_replica_batch, pick_strategy
from raytf.tune.learning_rate import Scaling
from raytf.worker import checkpoint_every


def split_function(name: str) -> tuple[str, str]:
    """Module and function of "MODULE:FUNCTION"; the module can be found from the current folder, and is not imported.

    Raises:
        ConfigError: the name is written in another way, or there is no such module.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError("A model is named as MODULE:FUNCTION", repr(name), "For example mymodels:build_model")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # only the outermost package: looking for a module in it would import it
        found, reason = importlib.util.find_spec(module.partition(".")[0]), f"No module named {module!r}"
    except (ImportError, ValueError) as error:
        found, reason = None, str(error)
    if found is None:
        raise ConfigError(
            "MODULE must be a module that can be imported from the current folder",
            f"{module!r} ({reason})",
            "Run the command where the module lies, and name it without .py",
        )
    return module, function


def check_training(options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises ConfigError for what `raytf train`, `plan` and `sweep` can know to be wrong by their options alone.

    Args:
        options: of the command, by name.
        config: what the model function will be given.
    """
    legacy_keras.refuse(legacy_keras.asked(False))
    for name, least in (("num_workers", 1), ("gpus_per_worker", 0), ("max_failures", -1)):
        validation.check_whole("--" + name.replace("_", "-"), options[name], least)
    if not options["cpus_per_worker"] > 0:
        raise ConfigError("--cpus-per-worker must be more than 0", options["cpus_per_worker"], "Raise it")
    validation.check_config(config)
    validation.check_seed(options["seed"])
    validation.check_num_ps(options["strategy"], options["num_ps"])
    checkpoint_every.parse(options.get("checkpoint_every", "auto"))
    workers, devices = options["num_workers"], options["gpus_per_worker"]
    pick_strategy(options["strategy"], workers=workers, devices=devices, tpu=False)
    per_replica_batch(config["batch_size"], 1 if options["num_ps"] else workers * max(1, devices))
    for name, path in data_paths(options).items():
        names = _columns(name, path)
        for role in ("features", "labels", "sample_weights"):
            if names is not None:
                check_names(parse(columns(options[role]), role), names, role)


def check_sweep(options: Mapping[str, Any], domains: Sequence[str]) -> None:
    """Raises ConfigError for what `raytf sweep` can know to be wrong by its own options and domains alone."""
    for domain in domains:
        name, equals, value = domain.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                "A domain is written as NAME=DOMAIN", repr(domain), "For example 'learning_rate=loguniform(1e-4,1e-1)'"
            )
    if options["num_samples"] != -1:
        validation.check_whole("--num-samples", options["num_samples"], 1)
    validation.check_word("--mode", options["mode"], ("min", "max"))
    for name, known in (("scheduler", validation.SCHEDULERS), ("search", validation.SEARCHES)):
        if options[name] is not None:
            validation.check_word(f"--{name}", options[name], known)
    if options["max_concurrent_trials"] is not None:
        validation.check_whole("--max-concurrent-trials", options["max_concurrent_trials"], 1)
    rule, base = options["scale_learning_rate"], options["base_batch_size"]
    Scaling(rule=rule, base_batch_size=base, warmup_steps=options["warmup_steps"])
    if options["resume"] and "://" not in options["resume"] and not os.path.exists(options["resume"]):
        raise ConfigError("A sweep is resumed from a path that exists", repr(options["resume"]), "Check the path")


def data_paths(options: Mapping[str, Any]) -> dict[str, str]:
    """The paths of a command's datasets, by name."""
    paths = {"train": options["data"], "validation": options["validation"]}
    return {name: path for name, path in paths.items() if path}


def columns(text: str | None) -> str | list[str] | None:
    """What --features, --labels and --sample-weights name: a column, or several with commas between them."""
    return text.split(",") if text and "," in text else text


def _columns(name: str, path: str) -> list[str] | None:
    """Names of the columns of Parquet files of this machine; None where only Ray Data can tell.

    Raises:
        ConfigError: there are no such files.
    """
    if "://" in path:
        return None
    if not os.path.exists(path):
        raise ConfigError(f"The {name} data must be a folder or file that exists", repr(path), "Check the path")
    first = path if os.path.isfile(path) else next(_parquet_files(path), None)
    if first is None:
        raise ConfigError(f"The {name} data must hold Parquet files", repr(path), "Check the path")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(first).names
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"The {name} data must hold Parquet files", f"{first!r} ({str(error).splitlines()[0]})", "Check the path"
        ) from error
    # Ray Data makes a column of each folder that is called "name=value"
    folders = os.path.relpath(first, path).split(os.sep)[:-1] if os.path.isdir(path) else []
    return [*names, *(key for key, equals, _ in (folder.partition("=") for folder in folders) if equals)]


def _parquet_files(folder: str) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        folders.sort()
        yield from (os.path.join(where, file) for file in sorted(files) if ".parquet" in file.lower())
