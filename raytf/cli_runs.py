"""Commands of `raytf` for existing runs, their models and reports; and shell completion."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from raytf import logs, validation
from raytf.cli_parts import (
    COUNT,
    DATA,
    FEATURES,
    FILES,
    NUMBER,
    POSITIVE,
    SAMPLE_WEIGHTS,
    WhichCheckpoint,
    columns,
    given_options,
    option,
    options,
    path,
    status,
    wrong_options,
)

if TYPE_CHECKING:
    from ray.train import ScalingConfig
logger = logs.get_logger(__name__)

_RUN = click.argument("run", metavar="RUN")
_CHECKPOINT = click.option(
    "--which",
    default="last",
    type=WhichCheckpoint(),
    metavar=WhichCheckpoint.name,  # click would show it in capitals
    show_default=True,
    help="Which of its checkpoints.",
)
_METRIC = click.option(
    "--metric", help="Metric that decides which is the best.  [default: val_loss, or loss without validation]"
)
_MODE = click.option(
    "--mode",
    default="min",
    type=click.Choice(validation.MODES),
    show_default=True,
    help="Whether the best has the least or the greatest metric.",
)
_MODEL = click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="Function that builds the model, where Keras cannot build it from its file.",
)
_DATA = click.option("--data", required=True, metavar="PATH", help=FILES)
_BATCH = click.option("--batch-size", default=256, type=COUNT, show_default=True, help="Rows of a global batch.")
_WORKERS = click.option("--num-workers", default=1, type=COUNT, show_default=True, help="Number of workers.")
_CPUS = click.option("--cpus-per-worker", default=1.0, type=POSITIVE, show_default=True, help="May be below 1.")
_GPUS = click.option("--gpus-per-worker", default=0, type=NUMBER, show_default=True, help="GPUs of each worker.")
# what runs a model that was kept
_running = options(_CHECKPOINT, _METRIC, _MODE, _BATCH, _WORKERS, _CPUS, _GPUS, _MODEL, DATA)


@click.command(short_help="List the runs of a folder.")
@click.argument("folder", metavar="DIR")
@_METRIC
@_MODE
def runs(folder, metric, mode):
    """List the runs and sweeps of a folder: name, state, epochs, best epoch, and time of the last checkpoint.

    In a terminal it prints a table, in a pipe a line for each run, with tabs. DIR is the path or URI of --storage.

    \b
    Example:
      raytf runs runs
      raytf runs ~/ray_results --metric val_accuracy --mode max
    """
    with wrong_options(), status("reading the runs", only_in_terminals=True):
        from raytf.train import run_list

        listed = run_list.listed(folder, metric, mode)
        lacks_metric = metric is not None and all(run.best is None for run in listed)
        has_other = lacks_metric and any(run.best for run in run_list.listed(folder))
    if not listed:
        logger.warning(f"no runs in {folder}: name the folder given as --storage, or in RunConfig(storage_path=)")
        return
    _print_runs([run.cells() for run in listed])
    if lacks_metric:
        sentence = f"no run in {folder} has the metric {metric!r}"
        if has_other:
            raise click.UsageError(sentence)
        logger.warning(sentence)


def _print_runs(rows) -> None:
    """Prints a table in a terminal, and a line for each run elsewhere."""
    names = ("name", "state", "epochs", "best", "when")
    if not sys.stdout.isatty():
        for cells in (names, *rows):
            click.echo("\t".join(cells))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for cells in rows:
        table.add_row(*cells)
    Console(highlight=False).print(table)


@click.command(short_help="Predict with the model of a run.")
@_RUN
@_DATA
@FEATURES
@click.option(
    "-o",
    "--output",
    required=True,
    callback=path,  # workers of Ray run in another folder
    metavar="PATH",
    help="New folder or URI for Parquet files of predictions.",
)
@_running
@click.pass_context
def predict(ctx, run, data, output, batch_size, **_):
    """Predict with the model of a run's or a checkpoint's folder on the rows of files: a row for each.

    Features are by default those of the run's training. Images need no folder for each class. Their predictions are in
    the order of their paths. Each has the image's path, and the name of its class if the run knows the classes.

    \b
    Example:
      raytf predict runs/first --data new -o predictions --which best
    """
    with wrong_options():
        _check_output(output)
    with _opened(ctx, run, data, labelled=False) as opened:
        import raytf
        from raytf.data.stored import quiet

        features = opened.roles["features"]
        with contextlib.redirect_stdout(sys.stderr):
            predictions = raytf.predict(
                opened.model, opened.files.dataset, batch_size, features=features, scaling_config=opened.workers
            )
        with quiet(), status("writing the predictions"):
            if opened.files.format == "images":
                from raytf.data.class_names import with_names

                threshold = 0.5 if _has_probability(opened.model) else None
                predictions = with_names(predictions, opened.files.dataset, opened.classes, threshold)
            predictions.write_parquet(output)
    click.echo(output)


@click.command(short_help="Evaluate the model of a run.")
@_RUN
@_DATA
@FEATURES
@option("--labels", receiver="trainer", callback=columns, metavar="COLUMN", help="The column of labels.")
@SAMPLE_WEIGHTS
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@_running
@click.pass_context
def evaluate(ctx, run, data, as_json, batch_size, **_):
    """Evaluate the model of a run's folder, or of a checkpoint's, on files: its loss and metrics, of all rows.

    Features, labels, sample weights and the numbers of classes are by default those of the run's training.

    \b
    Example:
      raytf evaluate runs/first --data test --which best
    """
    with _opened(ctx, run, data) as opened:
        import raytf

        roles = dict(opened.roles)
        weights = roles.pop("sample_weights")
        with contextlib.redirect_stdout(sys.stderr):
            metrics = raytf.evaluate(
                opened.model,
                opened.files.dataset,
                batch_size=batch_size,
                sample_weight=weights,
                return_dict=True,
                scaling_config=opened.workers,
                **roles,
            )
    if as_json:
        import json

        click.echo(json.dumps({name: float(value) for name, value in metrics.items()}))
        return
    width = max(map(len, metrics))
    for name, value in metrics.items():
        click.echo(f"{name:<{width}}  {float(value):.6g}")


@click.command(short_help="Write a page about a run or a sweep.")
@click.argument("folder", metavar="RUN_OR_SWEEP")
@click.option("-o", "--output", default="report.html", show_default=True, help="The page to write.")
def report(folder, output):
    """Write a page about the folder of a run or of a sweep; it needs no network.

    Of a run: learning curves, rate, throughput, waits for input and communication, restarts, checkpoints, memory. Of a
    sweep: trials, learning curves, batch size against learning rate.

    \b
    Example:
      raytf report runs/first -o first.html
    """
    with wrong_options(), status("reading the run", only_in_terminals=True):
        from raytf.tune.report import write_report

        write_report(folder, output)
    click.echo(output)


@click.command(short_help="Write the model of a run in another format.")
@_RUN
@click.option("-o", "--output", required=True, metavar="PATH", help="The folder or file to write; it must not exist.")
@click.option(
    "--format",
    default="saved_model",
    type=click.Choice(["saved_model", "keras", "onnx"]),
    show_default=True,
    help="Format of the output.",
)
@_CHECKPOINT
@_METRIC
@_MODE
@click.option(
    "--average", default=1, type=COUNT, show_default=True, help="The mean of the weights of so many last checkpoints."
)
@_MODEL
def export(run, output, format, model, **options):
    """Write the model of a run's folder, or of a checkpoint's, a path or a URI, for use without raytf.

    The output is read back, and must compute the same as the model, to 1e-6 on generated rows.

    \b
    Example:
      raytf export runs/first -o served --format saved_model --which best
    """
    with status("looking at the run") as shown:
        with wrong_options():
            from raytf.worker import export as exporting

            exporting.check(run, output, format, **options)
            build_model = _build_model(model, shown)
        shown.begin("writing and checking the model")
        with wrong_values():
            written = exporting.export(run, output, format, build_model=build_model, **options)
    click.echo(written)


@click.command(short_help="Print what completes `raytf` in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx, shell):
    """Print what completes the commands, options and choices of `raytf` in a shell.

    \b
    Example:
      eval "$(raytf completion bash)"           # in ~/.bashrc
      eval "$(raytf completion zsh)"            # in ~/.zshrc
      raytf completion fish | source            # in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)(ctx.find_root().command, {}, "raytf", "_RAYTF_COMPLETE")
    click.echo(script.source())


def wrong_values():
    """Returns the context in which a ConfigError from model or data is reported as a wrong option."""
    from raytf.errors import ResourceError
    from raytf.storage.checkpoint_files import DamagedCheckpointError

    return wrong_options(but=(DamagedCheckpointError, ResourceError))


def datasets_of(values, paths: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the datasets of paths, and the roles of columns that are given or can be known, of a training.

    Args:
        values: Values of the options, see `given_options`.
        paths: Paths by name of the dataset; others have the types and classes of the first.
    """
    from raytf.data import formats

    opened_files: dict[str, Any] = {}
    for name, location in paths.items():
        reference = next(iter(opened_files.values()), None)
        opened_files[name] = formats.read(name, location, **values["data"], reference=reference)
    roles = formats.roles(next(iter(opened_files.values())), values["trainer"], **values["columns"])
    return {name: data.dataset for name, data in opened_files.items()}, roles


def connected(workers: ScalingConfig, processes: int) -> ScalingConfig:
    """Connects to Ray, and returns the workers' ScalingConfig there.

    Args:
        workers: `ScalingConfig` of the workers.
        processes: Number of processes, for which a local Ray must have resources.

    Raises:
        click.UsageError: The cluster can never hold the workers. A cluster that changes later, or does not answer, is
            no wrong option.
    """
    import logging
    import os

    from raytf.runtime import resources
    from raytf.runtime.connection import connect

    bundles = [{"CPU": resources.resources_per_worker(workers)["CPU"]}] * processes
    # workers import the model function from the current folder of the command
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}}
    connect(bundles, logging_level=logging.ERROR, runtime_env=environment)
    with wrong_options():
        workers = resources.describe_sharing(workers, bundles)
        resources.check_cluster(workers)
    return workers


def scaling(count: int, cpus: float, gpus: int) -> ScalingConfig:
    """Returns the ScalingConfig of workers."""
    from ray.train import ScalingConfig

    amounts = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return ScalingConfig(num_workers=count, use_gpu=gpus > 0, resources_per_worker=amounts)


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A run's model, and data for it.

    Args:
        model: The model.
        files: The `formats.OpenedFiles`.
        roles: Columns by role, see `formats.roles`.
        classes: Names of the classes of the run's labels by number, or None if they are unknown.
        workers: `ScalingConfig` of the workers.
    """

    model: Any
    files: Any
    roles: dict[str, Any]
    classes: list[str] | None
    workers: ScalingConfig


@contextlib.contextmanager
def _opened(ctx: click.Context, run: str, data: str, labelled: bool = True):
    """Yields the `_Opened` of a command; reports a ConfigError in the context as a wrong option.

    It connects to Ray.

    Args:
        ctx: Context of the command.
        run: Path or URI of a run's or a checkpoint's folder.
        data: Path or URI of the data.
        labelled: Whether the data has labels.
    """
    workers, cpus, gpus = (ctx.params[name] for name in ("num_workers", "cpus_per_worker", "gpus_per_worker"))
    choice = {name: ctx.params[name] for name in ("which", "metric", "mode")}
    values = given_options(ctx)
    values["trainer"] = {"labels": None, "sample_weights": None} | values["trainer"]
    roles = ("features", "labels", "sample_weights") if labelled else ("features",)
    with status("looking at the run") as shown:
        with wrong_values():
            from raytf.cli_options import check_files
            from raytf.worker.checkpoint_selector import CheckpointSelector
            from raytf.worker.export import check_source

            check_source(run, CheckpointSelector(**choice))
            given, format = values["trainer"], values["data"]["format"]
            kind = check_files("given", data, format, {role: given[role] for role in roles}, labelled)
            build_model = _build_model(ctx.params["model"], shown)
            shown.begin("loading the model")
            import raytf
            from raytf.console.phases import READING, starting_phase
            from raytf.worker.model_loading import columns_of

            model = raytf.load_model(run, build_model=build_model, **choice)
            trained = columns_of(model) or {}
            if kind != "images":  # whose columns have names of their own
                defaults = {role: trained.get(role) for role in roles[:2] if given[role] is None}
                check_files("given", data, format, defaults, labelled)
        shown.begin(starting_phase())
        scaling_config = connected(scaling(workers, cpus, gpus), workers)
        shown.begin(READING)
        with wrong_values():
            files, known = _files_of(model, data, values, {role: trained.get(role) for role in roles}, trained)
    with wrong_values():
        yield _Opened(model, files, known, _classes_of_labels(trained), scaling_config)


def _files_of(model, data: str, values, trained_roles: dict[str, Any], trained: dict[str, Any]):
    """Returns the `formats.OpenedFiles` of data for a run's model, and the roles of its columns."""
    from raytf.data import formats

    labelled, classes = "labels" in trained_roles, trained.get("classes") or {}
    files = formats.read(name="data", path=data, **values["data"], labelled=labelled, classes=classes)
    roles, columns = values["trainer"], values["columns"]
    return files, formats.roles(
        files, roles, trained=trained_roles, labelled=labelled, input_size=_input_size(model), **columns
    )


def _classes_of_labels(trained: dict[str, Any]) -> list[str] | None:
    """Returns the names of the classes of a run's labels by number, or None if they are unknown."""
    labels = trained.get("labels")
    name = labels if isinstance(labels, str) else getattr(labels, "name", None)
    return (trained.get("classes") or {}).get(name)


def _input_size(model) -> tuple[int, int, int] | None:
    """Returns height, width and channels of a model's images, or None if it has another input, or takes any size."""
    shapes = [tuple(layer_input.shape[1:]) for layer_input in getattr(model, "inputs", None) or []]
    if len(shapes) != 1 or len(shapes[0]) != 3 or None in shapes[0] or shapes[0][2] not in (1, 3, 4):
        return None
    return shapes[0]


def _has_probability(model) -> bool:
    """Returns whether a model's output is a probability: its last layer has the activation sigmoid."""
    layers = getattr(model, "layers", None) or [None]
    activation = getattr(layers[-1], "activation", None)
    return getattr(activation, "__name__", "") == "sigmoid"


def _check_output(output: str) -> None:
    """Raises ConfigError if predictions cannot be written to a path or URI."""
    import os

    from pyarrow.fs import FileSelector

    from raytf.data.files import located
    from raytf.errors import ConfigError, one_line

    try:
        filesystem, folder = located(output)
        is_file = filesystem.get_file_info(folder).is_file
        entries = [] if is_file else filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    except OSError as error:
        raise ConfigError(
            "Predictions are written into a folder that can be reached",
            f"{output!r} ({one_line(error)})",
            "Correct -o, or what gives access to it",
        ) from error
    if is_file:
        raise ConfigError("Predictions are written into a folder", f"the file {output!r}", "Choose another path")
    if entries:  # Ray Data adds files to a folder that has some: two predictions would be read as one
        raise ConfigError(
            "Predictions are written into a new or empty folder",
            f"{output!r}, in which is {entries[0].base_name!r}",
            "Choose another path, or remove the folder",
        )
    if "://" in output:
        return
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError("Predictions are written where this process may write", repr(output), "Choose another path")


def _build_model(name: str | None, shown):
    """Returns the function of "MODULE:FUNCTION", or None for None.

    Args:
        name: Value of the option.
        shown: The `Phases` of the command.
    """
    if name is None:
        return None
    from raytf.cli_options import load_function, split_function
    from raytf.console.phases import importing_phase

    module, function = split_function(name)
    shown.begin(importing_phase(module))
    return load_function(module, function)


COMMANDS = (report, export, runs, predict, evaluate, completion)
