"""The command `raytf`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import click

from raytf import validation
from raytf.errors import RaytfError, StoppedError


class _Commands(click.Group):
    """Shows raytf's own errors as one sentence and exits with 1, or as a signal has it."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except StoppedError:
            raise  # it has been said, and has an exit code of its own
        except KeyboardInterrupt:  # to click it is an error as others
            click.echo("raytf: SIGINT: ended", err=True)
            ctx.exit(128 + signal.SIGINT)
        except RaytfError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raytf")
def main():
    """Train Keras 3 and TensorFlow models on a Ray cluster.

    Run by hand, a command uses the cluster that RAY_ADDRESS names, or a local Ray that it starts. Under
    `ray job submit` it uses the cluster of the job.
    """


class _Option(click.Option):
    """An option that says where its value goes: all that is known of it stands in one place.

    Args:
        to: what takes it, as an argument of the option's name: the "config" of the model function (unless it is not
            given), the "datasets" by name, the "trainer", its "workers", its "run", or the "sweep".
        least: the smallest integer that it may be.
        words: what it may be, if it is given.
    """

    def __init__(self, *args, to: str, least: int | None = None, words: Sequence[str] = (), **settings):
        super().__init__(*args, **settings)
        self.to, self.least, self.words = to, least, words


def _option(*names, to: str, **settings):
    return click.option(*names, cls=_Option, to=to, **settings)


def _options(*options):
    """One decorator of several."""

    def decorate(command):
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _given(ctx: click.Context) -> dict[str, dict[str, Any]]:
    """Values of a command's options by what takes them, and by name."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for option in ctx.command.params:
        if isinstance(option, _Option):
            found[option.to][option.name] = ctx.params[option.name]
    return found


def _columns(ctx, option, text: str | None) -> str | list[str] | None:
    """A column, or several with commas between them."""
    return text.split(",") if text and "," in text else text


def _path(ctx, option, text: str | None) -> str | None:
    """A path from the root, or a URI as it is."""
    import os

    return os.path.abspath(text) if text and "://" not in text else text


_TRAINING = _options(
    _option("--data", "train", to="datasets", required=True, help="Folder or URI of Parquet files to train on."),
    _option("--validation", to="datasets", help="Folder or URI of Parquet files to validate on."),
    _option(
        "--features",
        to="trainer",
        callback=_columns,
        required=True,
        help="A column; several, with commas, are stacked into a float vector.",
    ),
    _option("--labels", to="trainer", callback=_columns, help="The column of labels."),
    _option("--sample-weights", to="trainer", callback=_columns, help="A column of weights for each row."),
    _option("--num-workers", to="workers", default=1, least=1, show_default=True, help="Number of workers."),
    _option("--gpus-per-worker", to="workers", default=0, least=0, show_default=True, help="GPUs of each worker."),
    _option(
        "--cpus-per-worker",
        to="workers",
        default=1.0,
        show_default=True,
        help="CPUs of each worker; may be below 1.",
    ),
    _option(
        "--batch-size", to="config", default=32, show_default=True, help="Rows of the global batch, over all workers."
    ),
    _option("--epochs", to="config", default=1, show_default=True),
    _option("--learning-rate", to="config", type=float, help="config['learning_rate'] for the model function."),
    click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another entry of config; may be repeated."
    ),
    _option("--strategy", to="trainer", default="auto", show_default=True, help="How replicas train together."),
    _option(
        "--num-ps",
        to="trainer",
        default=0,
        show_default=True,
        help="Parameter servers, for --strategy parameter_server.",
    ),
    _option("--seed", to="trainer", default=0, show_default=True, help="Of weights, order of rows and masks."),
    _option(
        "--storage",
        "storage_path",
        to="run",
        callback=_path,
        help="Where results are kept.  [default: Ray's, ~/ray_results]",
    ),
    _option("--max-failures", to="run", default=0, least=-1, show_default=True, help="Restarts after a worker died."),
)


_CHECKPOINT_EVERY = _option(
    "--checkpoint-every",
    to="trainer",
    default="auto",
    show_default=True,
    help='When to keep checkpoints within epochs: "100 steps", "10 min", or epoch for none.',
)


@main.command()
@click.argument("model", metavar="MODULE:FUNCTION")
@_TRAINING
@_option("--name", to="run", help="Name of the run; one that exists goes on as --resume says.  [default: a new one]")
@_option(
    "--resume",
    to="trainer",
    type=click.Choice(["auto", "true", "false"]),
    callback=lambda ctx, option, word: {"true": True, "false": False}.get(word, word),
    default="auto",
    show_default=True,
    help="Where the run exists: auto goes on if it is the same run, true with what has changed, false starts anew.",
)
@_CHECKPOINT_EVERY
@_option(
    "--memory-every",
    to="trainer",
    help='Hold a copy of the training in memory of two hosts, too, for when one is lost: "10 steps".',
)
@click.pass_context
def train(ctx, model, **_):
    """Train the model that FUNCTION(config) of MODULE builds, on Parquet files.

    MODULE is imported from the current folder. FUNCTION takes the config, a dict with batch_size, epochs,
    learning_rate and what --set gives, and returns a compiled keras.Model.
    """
    trainer = _trainer(ctx)
    from raytf.train.results import show_result

    show_result(trainer.fit())


@main.command()
@click.argument("model", metavar="MODULE:FUNCTION")
@_TRAINING
@click.pass_context
def plan(ctx, model, **_):
    """Say what `train` with these options would do: strategy, batches, steps, traffic and memory.

    The model is built, and a few steps on the data's first rows are timed on one core; nothing is trained.
    """
    from raytf.train.plan import plan as make

    lines = make(_trainer(ctx)).lines()
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")


@main.command()
@click.argument("model", metavar="MODULE:FUNCTION")
@click.argument("domains", metavar="[NAME=DOMAIN]...", nargs=-1)
@_TRAINING
@_CHECKPOINT_EVERY
@click.option("--space", type=click.Path(exists=True, dir_okay=False), help="YAML file of names and domains.")
@_option("--num-samples", to="sweep", default=10, show_default=True, help="Trials, for each point of a grid.")
@_option("--metric", to="sweep", default="loss", show_default=True, help="What trials are compared by.")
@_option("--mode", to="sweep", default="min", words=validation.MODES, show_default=True, help="min or max.")
@_option("--scheduler", to="sweep", words=validation.SCHEDULERS, help="fifo, asha, hyperband, median or pbt.")
@_option("--search", "search_alg", to="sweep", words=validation.SEARCHES, help="random or optuna.")
@_option(
    "--max-concurrent-trials",
    to="sweep",
    type=int,
    least=1,
    help="At most; as many as the cluster holds unless given.",
)
@_option(
    "--cold",
    "warm",
    to="sweep",
    is_flag=True,
    callback=lambda ctx, option, cold: not cold,
    help="Give every trial processes of its own.",
)
@_option("--scale-learning-rate", to="sweep", help="linear or sqrt, with the batch size.")
@_option("--base-batch-size", to="sweep", type=int, help="The batch size for which learning rates are meant.")
@_option("--warmup-steps", to="sweep", default=0, show_default=True, help="In which the learning rate rises from 0.")
@_option("--name", to="run", help="Name of the sweep.")
@_option("--resume", to="sweep", metavar="PATH", help="Go on with the sweep of this folder, which was interrupted.")
@click.pass_context
def sweep(ctx, model, domains, space, **_):
    """Train the model of FUNCTION with many configs, and compare them.

    A DOMAIN is a call such as loguniform(1e-4,1e-1), choice([32,64]), grid_search([1,2]), uniform, randint, a list
    (a choice) or a constant:

    raytf sweep mymodels:build_model 'learning_rate=loguniform(1e-4,1e-1)' 'batch_size=[64,128]' --data DIR ...
    """
    from raytf.cli_options import check_sweep

    options = _given(ctx)["sweep"]
    check_sweep(ctx.command.params, options, domains, space)
    written = {}
    if space:
        import yaml

        with open(space) as file:
            written = yaml.safe_load(file)
        if not isinstance(written, dict):
            from raytf.errors import ConfigError

            raise ConfigError("A space in YAML is a map of names to domains", repr(written), "Correct the file")
    for domain in domains:
        name, _, value = domain.partition("=")
        written[name] = value

    def largest():
        from raytf.tune import space

        known = space.bounds(space.parse(written).get("num_workers", 1), "num_workers")
        return max((n for n in known if isinstance(n, int)), default=1)

    trainer = _trainer(ctx, largest, written)
    from raytf.tune.space import parse
    from raytf.tune.sweep import sweep as run

    run(trainer, parse(written) or None, **options)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--num-workers", default=1, show_default=True, help="Processes that train.")
@click.option("--num-ps", default=0, show_default=True, help="Parameter servers; they bring a chief that coordinates.")
@click.option("--chief", is_flag=True, help="Give the first worker the role chief.")
@click.option("--evaluator", is_flag=True, help="One more process, with the role evaluator.")
@click.option("--cpus-per-worker", default=1.0, show_default=True, help="CPUs of each process; may be below 1.")
@click.option("--gpus-per-worker", default=0, show_default=True, help="GPUs of each worker; servers get none.")
@click.option("--max-restarts", default=0, show_default=True, help="How often failed processes are started anew.")
@click.option("--ports", default="20000-31999", show_default=True, metavar="FIRST-LAST", help="Where processes listen.")
@click.option(
    "--frozen-after",
    default=10.0,
    show_default=True,
    help="Give up a process that is stopped (SIGSTOP, a debugger) for so many seconds; 0 never does.",
)
@click.option(
    "--hang-timeout",
    default=10.0,
    show_default=True,
    help="Say who waits for whom after so many seconds, and end it three or thirty times as late; 0 never does.",
)
@click.option(
    "--pin-cpus/--no-pin-cpus",
    default=False,
    show_default=True,
    help="Keep each process to cores of its own, where a host has enough for all.",
)
@click.option("--address", help="Of the Ray cluster.  [default: RAY_ADDRESS, the job's, or a Ray on this machine]")
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="A variable of the processes; without a value ours.")
@click.option("--legacy-keras", is_flag=True, help="Keras 2 in the place of Keras 3; needs tf_keras.")
@click.option("--module", "-m", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option("--quiet", "-q", is_flag=True, help="Show what the chief prints only.")
def run(script, arguments, address, env, ports, **options):
    """Run any TensorFlow SCRIPT on many workers, unmodified: with TF_CONFIG set, a process for each task.

    Options of raytf stand before SCRIPT, those of the script behind it:

    raytf run --num-workers 4 train.py --epochs 3

    The exit code is that of the process that failed first. Processes run in the current folder where their node sees
    it, else in a copy.
    """
    from raytf.launch.spec import LaunchSpec

    _tell_of_options_behind(arguments)
    made = LaunchSpec(
        script=script, arguments=arguments, environment=parse_variables(env), ports=parse_ports(ports), **options
    )
    from raytf.launch.launcher import run as run_script

    raise SystemExit(run_script(made, address))


def _tell_of_options_behind(arguments) -> None:
    """Says which options of `raytf run` the script gets, as it may have some of the same names."""
    named = {name for option in run.params for name in (*option.opts, *option.secondary_opts)}
    ours = {name for name in named if name.startswith("--")}
    if behind := sorted(ours & {word.partition("=")[0] for word in arguments}):
        text = f"raytf: {', '.join(behind)} behind the script: given to it. Options of raytf stand before the script"
        click.echo(text, err=True)


@main.command()
@click.option("--address", help="Of the Ray cluster; local starts one here.  [default: RAY_ADDRESS, or this machine's]")
@click.option("--storage", callback=_path, metavar="PATH_OR_URI", help="Storage that all nodes are to share.")
@click.option("--ports", default="20000-31999", show_default=True, metavar="FIRST-LAST", help="Where nodes listen.")
@click.option("--no-training", "training", flag_value=False, default=True, help="Make no steps of Keras.")
@click.option("--seconds", default=55.0, show_default=True, help="Deadline for all of it.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(address, ports, as_json, **options):
    """Examine a running Ray cluster: versions, network, clocks, limits, disks, storage, and two steps of Keras.

    Each finding is a line that ends with its fix. The exit code is 0 for a healthy cluster, 1 with findings, and 2 for
    wrong options or where no cluster answers.
    """
    from raytf.errors import ConfigError

    own = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints there at any moment, as of nodes that it has given up
        try:
            limits = parse_ports(ports)
            from raytf.doctor import examination

            report = examination.run(address, ports=limits, **options)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        if as_json:
            import dataclasses
            import json

            click.echo(json.dumps(dataclasses.asdict(report), indent=2), file=own)
        else:
            examination.show(report, lambda line: click.echo(line, file=own))
        raise SystemExit(1 if report.findings else 0)


@main.command()
@click.argument("path", metavar="SWEEP")
@click.option("-o", "--output", default="report.html", show_default=True, help="The page to write.")
def report(path, output):
    """Write a page about the sweep of a folder: trials, learning curves, batch size against learning rate.

    The page needs no network.
    """
    from raytf.tune.report import write

    write(path, output)
    click.echo(output)


@main.command()
@click.argument("path", metavar="RUN")
@click.option("-o", "--output", required=True, help="The folder or file to write; it must not exist.")
@click.option("--format", default="saved_model", show_default=True, help="saved_model, keras or onnx.")
@click.option("--which", default="last", show_default=True, help="Of its checkpoints last, best, or that of a step.")
@click.option("--metric", help="By which one is the best.  [default: val_loss, or loss without validation]")
@click.option("--mode", default="min", show_default=True, help="min or max of the metric.")
@click.option("--average", default=1, show_default=True, help="The mean of the weights of so many last checkpoints.")
@click.option("--model", metavar="MODULE:FUNCTION", help="What builds the model, where Keras cannot from its file.")
def export(path, output, format, which, model, **options):
    """Write the model of a run's folder, or of a checkpoint's, a path or a URI, for those who have no raytf.

    What was written is read again, and must compute what the model does, to 1e-6 on generated rows.
    """
    from raytf.worker import export as exporting

    options["which"] = int(which) if which.isdecimal() else which
    exporting.check(path, output, format, **options)
    build_model = None
    if model is not None:
        from raytf.cli_options import split_function

        build_model = load_function(*split_function(model))
    click.echo(exporting.export(path, output, format, build_model=build_model, **options))


def _trainer(ctx: click.Context, largest=lambda: 1, space: Collection[str] = ()):
    """Returns a KerasTrainer from the options of a command; starts or finds Ray.

    Args:
        ctx: of the command.
        largest: gives a number of workers for which a Ray that is started must have room.
        space: keys of the config beside those of the options.
    """
    from raytf import cli_options

    module, function = cli_options.split_function(ctx.params["model"])
    given = _given(ctx)
    config = {name: value for name, value in given["config"].items() if value is not None}
    config |= parse_settings(ctx.params["settings"])
    paths = {name: path for name, path in given["datasets"].items() if path}
    cli_options.check_training(ctx.command.params, given, config, paths)
    build_model = load_function(module, function)
    cli_options.check_config_keys(build_model, {*config, *space}, ctx.command.params)

    import logging
    import os

    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from raytf.runtime.connection import connect
    from raytf.train.keras_trainer import KerasTrainer

    # the workers import the model function from where the command runs
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}}
    servers = given["trainer"]["num_ps"]
    workers, cpus, gpus = (given["workers"][name] for name in ("num_workers", "cpus_per_worker", "gpus_per_worker"))
    processes = max(largest(), workers + (servers + 1 if servers else 0))
    connect([{"CPU": cpus}] * processes, logging_level=logging.ERROR, runtime_env=environment)
    failures = FailureConfig(max_failures=given["run"].pop("max_failures"))
    return KerasTrainer(
        build_model,
        config=config,
        datasets={name: read_parquet(path) for name, path in paths.items()},
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": cpus} | ({"GPU": gpus} if gpus else {}),
        ),
        run_config=RunConfig(**given["run"], failure_config=failures),
        **given["trainer"],
    )


def load_function(module: str, function: str):
    """A function of a module that is imported from the current folder.

    Raises:
        ConfigError: no such module or function.
    """
    import importlib

    from raytf.errors import ConfigError

    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "MODULE must be a module that can be imported from the current folder",
            f"{module!r} ({error})",
            "Run the command where the module lies, and name it without .py",
        ) from error
    if not callable(getattr(found, function, None)):
        raise ConfigError("FUNCTION must be a function of MODULE", f"{module}:{function}", "Check its name")
    return getattr(found, function)


def parse_settings(settings) -> dict:
    """{"units": 64} from ["units=64"]; values are JSON where they can be, else text."""
    import json

    from raytf.errors import ConfigError

    config = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError("--set takes NAME=VALUE", repr(setting), "For example --set units=64")
        try:
            config[name] = json.loads(value)
        except json.JSONDecodeError:
            config[name] = value
    return config


def parse_variables(given) -> dict[str, str]:
    """{"A": "1"} from ["A=1"]; a name alone takes its value from this process.

    Raises:
        ConfigError: a name alone that is not set.
    """
    import os

    from raytf.errors import ConfigError

    found = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigError(
                "--env takes NAME=VALUE, or the NAME of a variable that is set", repr(entry), "Set it, or give a value"
            )
        found[name] = value if equals else os.environ[name]
    return found


def parse_ports(given: str) -> tuple[int, int]:
    """(20000, 31999) from "20000-31999"; whether that is a range is for `settings.check_ports`.

    Raises:
        ConfigError: no two numbers.
    """
    from raytf.errors import ConfigError

    first, _, last = given.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise ConfigError("--ports takes FIRST-LAST", repr(given), "For example 20000-31999")
    return int(first), int(last)


def read_parquet(path: str):
    """A `ray.data.Dataset` of Parquet files."""
    import os

    import ray.data

    # Ray's workers run in another folder
    return ray.data.read_parquet(path if "://" in path else os.path.abspath(path))


if __name__ == "__main__":
    main()
