"""Commands of `raytf` for existing runs, their models and reports; and shell completion."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from raytf import validation
from raytf.cli_parts import (
    COUNT,
    DATA,
    FILES,
    NUMBER,
    POSITIVE,
    WhichCheckpoint,
    columns,
    given_options,
    option,
    options,
    path,
    wrong_options,
)

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
_FEATURES = option(
    "--features",
    receiver="trainer",
    callback=columns,
    metavar="COLUMN[,COLUMN...]",
    help="A column; several are stacked into a float vector.  [default: all but the labels]",
)
_BATCH = click.option("--batch-size", default=256, type=COUNT, show_default=True, help="Rows of a global batch.")
_WORKERS = click.option("--num-workers", default=1, type=COUNT, show_default=True, help="Number of workers.")
_CPUS = click.option("--cpus-per-worker", default=1.0, type=POSITIVE, show_default=True, help="May be below 1.")
_GPUS = click.option("--gpus-per-worker", default=0, type=NUMBER, show_default=True, help="GPUs of each worker.")


def _running(command):
    """Adds the options of what runs a model that was kept."""
    return options(_CHECKPOINT, _METRIC, _MODE, _BATCH, _WORKERS, _CPUS, _GPUS, _MODEL, DATA)(command)


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
    with wrong_options():
        from raytf.train import run_list

        listed = run_list.listed(folder, metric, mode)
    if not listed:
        click.echo(f"no runs in {folder}: name the folder given as --storage, or in RunConfig(storage_path=)", err=True)
        return
    if metric is not None and all(run.best is None for run in listed):
        click.echo(f"no run in {folder} has the metric {metric!r}", err=True)
    names = ("name", "state", "epochs", "best", "when")
    if not sys.stdout.isatty():
        for cells in (names, *(run.cells() for run in listed)):
            click.echo("\t".join(cells))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for run in listed:
        table.add_row(*run.cells())
    Console(highlight=False).print(table)


@click.command(short_help="Predict with the model of a run.")
@_RUN
@_DATA
@_FEATURES
@click.option(
    "-o",
    "--output",
    required=True,
    callback=path,  # workers of Ray run in another folder
    metavar="PATH",
    help="Folder or URI for Parquet files of predictions.",
)
@_running
@click.pass_context
def predict(ctx, run, data, output, batch_size, **_):
    """Predict with the model of a run's folder, or of a checkpoint's, on the rows of files: a row for each.

    Images need no folder for each class; their predictions are in the order of their paths.

    \b
    Example:
      raytf predict runs/first --data new --features a,b -o predictions --which best
    """
    with _model_of(ctx, run, data, labelled=False) as (model, source, roles, workers):
        import raytf
        from raytf.data.stored import quiet

        features = roles["features"]
        predictions = raytf.predict(model, source, batch_size, features=features, scaling_config=workers)
        with quiet():
            predictions.write_parquet(output)
    click.echo(output)


@click.command(short_help="Evaluate the model of a run.")
@_RUN
@_DATA
@_FEATURES
@option("--labels", receiver="trainer", callback=columns, metavar="COLUMN", help="The column of labels.")
@option(
    "--sample-weights", receiver="trainer", callback=columns, metavar="COLUMN", help="A column of weights for each row."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@_running
@click.pass_context
def evaluate(ctx, run, data, sample_weights, as_json, batch_size, **_):
    """Evaluate the model of a run's folder, or of a checkpoint's, on files: its loss and metrics, of all rows.

    \b
    Example:
      raytf evaluate runs/first --data test --features a,b --labels y --which best
    """
    with _model_of(ctx, run, data) as (model, source, roles, workers):
        import raytf

        if sample_weights is not None:
            roles["sample_weight"] = sample_weights
        metrics = raytf.evaluate(
            model, source, batch_size=batch_size, return_dict=True, scaling_config=workers, **roles
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
    with wrong_options():
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
    with wrong_options():
        from raytf.worker import export as exporting

        exporting.check(run, output, format, **options)
        build_model = _build_model(model)
    with wrong_options(but=_damaged_error()):
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


def datasets_of(values, paths: dict[str, str], labelled: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the datasets of paths, and the features and labels that are given or can be known.

    Args:
        values: Values of the options, see `given_options`.
        paths: Paths by name of the dataset; others have the types and classes of the first.
        labelled: Whether the rows have labels.
    """
    from raytf.data import formats

    opened_files: dict[str, Any] = {}
    for name, location in paths.items():
        reference = next(iter(opened_files.values()), None)
        opened_files[name] = formats.read(name, location, **values["data"], reference=reference, labelled=labelled)
    roles = formats.roles(next(iter(opened_files.values())), values["trainer"], values["columns"]["image"])
    return {name: data.dataset for name, data in opened_files.items()}, roles


@contextlib.contextmanager
def _model_of(ctx: click.Context, run: str, data: str, labelled: bool = True):
    """Yields the model of a run, the dataset, its features and labels, and the workers' `ScalingConfig`.

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
    with wrong_options():
        from raytf.cli_options import check_files
        from raytf.worker.checkpoint_selector import CheckpointSelector
        from raytf.worker.export import check_source

        build_model = _build_model(ctx.params["model"])
        check_source(run, CheckpointSelector(**choice))
        check_files("given", data, values)

    import logging
    import os

    from ray.train import ScalingConfig

    import raytf
    from raytf.runtime.connection import connect

    with wrong_options(but=_damaged_error()):
        model = raytf.load_model(run, build_model=build_model, **choice)
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}}
    connect([resources] * workers, logging_level=logging.ERROR, runtime_env=environment)
    with wrong_options():
        datasets, roles = datasets_of(values, {"given": data}, labelled)
    yield (
        model,
        datasets["given"],
        roles,
        ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
    )


def _damaged_error() -> type[Exception]:
    """Returns the error of a damaged checkpoint, which is no wrong option."""
    from raytf.storage.checkpoint_files import DamagedCheckpointError

    return DamagedCheckpointError


def _build_model(name: str | None):
    """Returns the function of "MODULE:FUNCTION", or None for None."""
    if name is None:
        return None
    from raytf.cli_options import load_function, split_function

    return load_function(*split_function(name))


COMMANDS = (report, export, runs, predict, evaluate, completion)
