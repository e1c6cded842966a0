"""Defines the command `raytf`. Each command imports heavy modules only when it needs them.

Over 500 lines: each command with its options and its help, which are read together.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Collection
from typing import Any

import click

from raytf import __version__, cli_runs, logs, validation
from raytf.cli_parts import (
    COUNT,
    DATA,
    FEATURES,
    FILES,
    NUMBER,
    POSITIVE,
    SAMPLE_WEIGHTS,
    Commands,
    checked,
    columns,
    given_options,
    option,
    options,
    path,
    status,
    wrong_options,
)
from raytf.runtime.topology import STRATEGIES

logger = logs.get_logger("raytf.cli")  # under `python -m` the name of the module is another


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", "-V", package_name="raytf")
def main():
    """Train Keras 3 and TensorFlow models on a Ray cluster.

    Run by hand, a command uses the cluster that RAY_ADDRESS names, or a local Ray that it starts. Under
    `ray job submit` it uses the cluster of the job.

    \b
    Example:
      raytf train mymodels:build_model --data data --features a,b --labels y --epochs 3

    The exit code is 0 for a completed training, 1 for an error, 2 for a wrong option or value. It is 130 after SIGINT
    (Ctrl-C) and 143 after SIGTERM.
    """


def _check_checkpoint_every(text: str) -> None:
    from raytf.worker import checkpoint_every

    checkpoint_every.parse_interval(text)


def _check_memory_every(text: str) -> None:
    from raytf.worker import checkpoint_every

    checkpoint_every.parse_steps(text)


def _ports(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, int]:
    with wrong_options():
        return parse_ports(text)


_TRAINING = options(
    option(
        "--data",
        "train",
        receiver="datasets",
        required=True,
        metavar="PATH",
        help=FILES,
    ),
    option("--validation", receiver="datasets", metavar="PATH", help="The same, to validate on."),
    FEATURES,
    option(
        "--labels",
        receiver="trainer",
        callback=columns,
        metavar="COLUMN",
        help="The column of labels.  [default, without --features: one named label(s), target(s), class or y]",
    ),
    DATA,
    SAMPLE_WEIGHTS,
    option("--num-workers", receiver="workers", default=1, type=COUNT, show_default=True, help="Number of workers."),
    option(
        "--gpus-per-worker", receiver="workers", default=0, type=NUMBER, show_default=True, help="GPUs of each worker."
    ),
    option(
        "--cpus-per-worker",
        receiver="workers",
        default=1.0,
        type=POSITIVE,
        show_default=True,
        help="CPUs of each worker; may be below 1.",
    ),
    option(
        "--batch-size",
        receiver="config",
        default=32,
        type=COUNT,
        show_default=True,
        help="Rows of the global batch, over all workers.",
    ),
    option("--epochs", receiver="config", default=1, type=COUNT, show_default=True, help="Passes over the data."),
    option("--learning-rate", receiver="config", type=POSITIVE, help="config['learning_rate'] of the model function."),
    click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another entry of config; may be repeated."
    ),
    option(
        "--strategy",
        receiver="trainer",
        default="auto",
        type=click.Choice(STRATEGIES),
        show_default=True,
        help="How replicas train together.",
    ),
    option(
        "--num-ps",
        receiver="trainer",
        default=0,
        type=NUMBER,
        show_default=True,
        help="Parameter servers, for --strategy parameter_server.",
    ),
    option(
        "--seed",
        receiver="trainer",
        default=0,
        type=click.IntRange(0, 2**63 - 1),
        show_default=True,
        metavar="INTEGER",
        help="Of weights, order of rows and masks.",
    ),
    option(
        "--nan",
        receiver="trainer",
        default="warn",
        type=click.Choice(validation.NAN_WORDS),
        show_default=True,
        help="What to do if the loss is NaN or infinite.",
    ),
    option(
        "--verify",
        receiver="trainer",
        default="warn",
        type=click.Choice(["warn", "error", "off"]),
        callback=lambda ctx, option, word: word != "off" and word,
        show_default=True,
        help="What to do if two workers do not train the model as one process does.",
    ),
    option(
        "--storage",
        "storage_path",
        receiver="run",
        callback=path,
        metavar="PATH",
        help="Folder or URI where runs are kept.  [default: Ray's, ~/ray_results]",
    ),
    option(
        "--max-failures",
        receiver="run",
        default=0,
        type=click.IntRange(min=-1),
        show_default=True,
        help="Failures (lost workers, restarts) that the run survives; -1 for no limit.",
    ),
    option(
        "--ports",
        receiver="tensorflow",
        default="20000-31999",
        callback=_ports,
        show_default=True,
        metavar="FIRST-LAST",
        help="Where workers listen.",
    ),
    option(
        "--network",
        receiver="tensorflow",
        help="Interface (eth1) or network (10.1.0.0/16) on which they listen.  [default: Ray's]",
    ),
)


_CHECKPOINT_EVERY = option(
    "--checkpoint-every",
    receiver="trainer",
    default="auto",
    callback=checked(_check_checkpoint_every),
    show_default=True,
    help='When to keep checkpoints within epochs: "100 steps", "10 min", or epoch for none.',
)


@main.command(short_help="Train a model on files.")
@click.argument("model", metavar="MODULE:FUNCTION")
@_TRAINING
@option(
    "--name",
    receiver="run",
    callback=checked(validation.check_run_name),
    help="Name of the run; one that exists resumes according to --resume.  [default: a new one]",
)
@option(
    "--resume",
    receiver="trainer",
    type=click.Choice(["auto", "true", "false"]),
    callback=lambda ctx, option, word: {"true": True, "false": False}.get(word, word),
    default="auto",
    show_default=True,
    help="Where the run exists: auto resumes the same run, true also a changed one, false starts from scratch.",
)
@_CHECKPOINT_EVERY
@option(
    "--memory-every",
    receiver="trainer",
    callback=checked(_check_memory_every),
    help='Hold a copy of the training in memory of two hosts, too, for when one is lost: "10 steps".',
)
@click.pass_context
def train(ctx, model, **_):
    """Train the model that FUNCTION(config) of MODULE builds, on Parquet, CSV or TFRecord files, or on images.

    MODULE is imported from the current folder. FUNCTION takes the config, a dict with batch_size, epochs,
    learning_rate and the entries of --set, and returns a compiled keras.Model.

    \b
    Example:
      raytf train mymodels:build_model --data data --features a,b --labels y \\
          --num-workers 2 --epochs 3 --learning-rate 0.01 --storage runs --name first
    """
    trainer = _trainer(ctx)
    from raytf.train.results import ended_in_nan, events_of

    with cli_runs.wrong_values():
        result = trainer.fit()
    if (events := events_of(result)) is not None:
        click.echo(f"events  tensorboard --logdir {events}")
    _end_ray()
    if trainer.nan == "stop" and ended_in_nan(result):
        raise SystemExit(1)


@main.command(short_help="Say what `train` would do, without training.")
@click.argument("model", metavar="MODULE:FUNCTION")
@_TRAINING
@click.pass_context
def plan(ctx, model, **_):
    """Show what `train` with these options would do: strategy, batches, steps, traffic and memory.

    It builds the model, and times a few steps on the data's first rows on one core. It shows three of these rows, and
    trains nothing.

    \b
    Example:
      raytf plan mymodels:build_model --data data --features a,b --labels y --num-workers 8
    """
    from raytf.train.plan import plan as make

    trainer = _trainer(ctx)
    from raytf.data import formats

    with cli_runs.wrong_values():
        lines = [*make(trainer).lines(), *(("row", row) for row in formats.preview(trainer.datasets["train"]))]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")


def _check_num_samples(number: int) -> None:
    if number != -1:
        validation.check_whole("--num-samples", number, 1)


@main.command(short_help="Train a model with many configs, and compare them.")
@click.argument("model", metavar="MODULE:FUNCTION")
@click.argument("domains", metavar="[NAME=DOMAIN]...", nargs=-1)
@_TRAINING
@_CHECKPOINT_EVERY
@click.option("--space", type=click.Path(exists=True, dir_okay=False), help="YAML file of names and domains.")
@option(
    "--num-samples",
    receiver="sweep",
    default=10,
    callback=checked(_check_num_samples),
    show_default=True,
    help="Trials, for each point of a grid; -1 for no limit.",
)
@option("--metric", receiver="sweep", default="loss", show_default=True, help="What trials are compared by.")
@option(
    "--mode",
    receiver="sweep",
    default="min",
    type=click.Choice(validation.MODES),
    show_default=True,
    help="Whether the metric is to be small or large.",
)
@option(
    "--scheduler", receiver="sweep", type=click.Choice(validation.SCHEDULERS), help="What ends or changes trials early."
)
@option(
    "--search", "search_alg", receiver="sweep", type=click.Choice(validation.SEARCHES), help="How configs are chosen."
)
@option(
    "--max-concurrent-trials",
    receiver="sweep",
    type=COUNT,
    help="At most; as many as the cluster holds unless given.",
)
@option(
    "--cold",
    "warm",
    receiver="sweep",
    is_flag=True,
    callback=lambda ctx, option, cold: not cold,
    help="Give every trial processes of its own.",
)
@option(
    "--scale-learning-rate",
    receiver="sweep",
    type=click.Choice(["linear", "sqrt"]),
    help="How the learning rate follows the batch size.",
)
@option("--base-batch-size", receiver="sweep", type=COUNT, help="The batch size for which learning rates are meant.")
@option(
    "--warmup-steps",
    receiver="sweep",
    default=0,
    type=NUMBER,
    show_default=True,
    help="In which the learning rate rises from 0.",
)
@option("--name", receiver="run", callback=checked(validation.check_run_name), help="Name of the sweep.")
@option("--resume", receiver="sweep", metavar="PATH", help="Resume the sweep of this folder, which was interrupted.")
@click.pass_context
def sweep(ctx, model, domains, space, **_):
    """Train the model of FUNCTION with many configs, and compare them.

    A DOMAIN is a call such as loguniform(1e-4,1e-1), choice([32,64]), grid_search([1,2]), uniform, randint, a list
    (a choice) or a constant.

    \b
    Example:
      raytf sweep mymodels:build_model 'learning_rate=loguniform(1e-4,1e-1)' \\
          'batch_size=[64,128]' --data data --features a,b --labels y --scheduler asha
    """
    from raytf.cli_options import check_sweep

    settings = given_options(ctx)["sweep"]
    with wrong_options():
        check_sweep(settings, domains, space)
        written = _unparsed_domains(space, domains)

    def largest():
        from raytf.tune import space

        known = space.key_bounds(space.parse_space(written).get("num_workers", 1), "num_workers")
        return max((n for n in known if isinstance(n, int)), default=1)

    trainer = _trainer(ctx, largest, None if settings["resume"] else written)
    from raytf.tune.space import parse_space
    from raytf.tune.sweep import sweep as run

    with cli_runs.wrong_values():
        run(trainer, parse_space(written) or None, **settings)
    _end_ray()


def _unparsed_domains(space: str | None, domains: Collection[str]) -> dict[str, Any]:
    """Returns the unparsed domains of a file and of arguments, by name."""
    written = {}
    if space:
        import yaml

        from raytf.errors import ConfigError

        try:
            with open(space) as file:
                written = yaml.safe_load(file)
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            received = f"{space!r} ({' '.join(str(error).split())})"
            raise ConfigError("A space is a file of YAML", received, "Correct the file") from error
        if not isinstance(written, dict):
            raise ConfigError("A space in YAML is a map of names to domains", repr(written), "Correct the file")
    for domain in domains:
        name, _, value = domain.partition("=")
        written[name] = value
    return written


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run any TensorFlow script on many workers, unmodified.",
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--tfjob",
    type=click.Path(exists=True, dir_okay=False),
    help="YAML of a Kubeflow TFJob: its replicas, commands and variables. SCRIPT replaces its script.",
)
@click.option("--num-workers", default=1, show_default=True, help="Processes that train.")
@click.option("--num-ps", default=0, show_default=True, help="Parameter servers; they bring a chief that coordinates.")
@click.option("--chief", is_flag=True, help="Give the first worker the role chief.")
@click.option("--evaluator", is_flag=True, help="One more process, with the role evaluator.")
@click.option("--cpus-per-worker", default=1.0, show_default=True, help="CPUs of each process; may be below 1.")
@click.option("--gpus-per-worker", default=0, show_default=True, help="GPUs of each worker; servers get none.")
@click.option("--max-restarts", default=0, show_default=True, help="How often failed processes are restarted.")
@click.option("--ports", default="20000-31999", show_default=True, metavar="FIRST-LAST", help="Where processes listen.")
@click.option("--network", help="Interface (eth1) or network (10.1.0.0/16) on which they listen.  [default: Ray's]")
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
    help="Report a hang after so many seconds; 0 never does. The process is ended after 3 times that, in input and "
    "callbacks after 30 times.",
)
@click.option(
    "--pin-cpus/--no-pin-cpus",
    default=False,
    show_default=True,
    help="Keep each process to cores of its own, where a host has enough for all.",
)
@click.option("--address", help="Of the Ray cluster.  [default: RAY_ADDRESS, the job's, or a Ray on this machine]")
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="A variable of the processes; without a value ours.")
@click.option("--legacy-keras", is_flag=True, help="Keras 2 instead of Keras 3; needs tf_keras.")
@click.option("--module", "-m", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option("--quiet", "-q", is_flag=True, help="Show what the chief prints only.")
@click.pass_context
def run(ctx, script, arguments, tfjob, address, env, ports, **options):
    """Run any TensorFlow SCRIPT on many workers, unmodified: with TF_CONFIG set, a process for each task.

    Options of raytf come before SCRIPT, those of the script after it.

    \b
    Example:
      raytf run --num-workers 4 train.py --epochs 3
      raytf run --tfjob job.yaml

    The exit code is the one of the process that failed first. Processes run in the current folder if their node can
    access it, else in a copy.
    """
    from raytf.launch.spec import LaunchSpec

    _refuse_unknown_option(ctx, script)
    _warn_of_misplaced_options(arguments)
    if script is None and tfjob is None:
        raise click.MissingParameter(ctx=ctx, param_hint="'SCRIPT'", param_type="argument")
    with wrong_options():
        options |= {"script": script, "arguments": arguments, "environment": parse_variables(env)}
        if tfjob is not None:
            options |= _arguments_of_tfjob(ctx, tfjob, script, arguments, options["environment"])
        spec = LaunchSpec(ports=parse_ports(ports), **options)
    from raytf.launch import launcher
    from raytf.runtime.connection import resolve_address

    with wrong_options():
        resolve_address(address)
    launcher.connect_cluster(spec, address)  # a cluster that does not answer is no wrong option
    with wrong_options():
        code = launcher.launch_script(spec)
    raise SystemExit(code)


def _arguments_of_tfjob(ctx: click.Context, tfjob: str, script: str | None, arguments, variables) -> dict[str, Any]:
    """Returns arguments of `LaunchSpec` from a TFJob, and prints what it does not honour."""
    from raytf.errors import ConfigError
    from raytf.launch import tfjob as reader

    explicit_options = {
        name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    for name in ("num_workers", "num_ps", "chief", "evaluator", "module"):
        if name in explicit_options:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("With --tfjob, the YAML sets what runs where", option, f"Leave {option} out")
    read_arguments, not_honoured = reader.read_tfjob(tfjob, script, arguments, variables)
    for sentence in not_honoured:
        logger.warning(sentence)
    if "max_restarts" in explicit_options:
        del read_arguments["max_restarts"]
    overrides = {name: ctx.params[name] for name in ("cpus_per_worker", "gpus_per_worker") if name in explicit_options}
    return reader.with_resources(read_arguments, **overrides)


def _refuse_unknown_option(ctx: click.Context, script: str | None) -> None:
    """Raises NoSuchOption if the script is an option that `raytf run` does not know, as the script's own follow it."""
    if script is None or not script.startswith("-") or os.path.exists(script):
        return
    name = script.partition("=")[0]
    known = [option for parameter in run.params for option in (*parameter.opts, *parameter.secondary_opts)]
    raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known), ctx=ctx)


def _warn_of_misplaced_options(arguments) -> None:
    """Warns of options of `raytf run` after the script, which the script receives."""
    names = {name for option in run.params for name in (*option.opts, *option.secondary_opts)}
    long_names = {name for name in names if name.startswith("--")}
    if misplaced := sorted(long_names & {word.partition("=")[0] for word in arguments}):
        logger.warning(
            f"{', '.join(misplaced)} after the script: the script receives them. Put options of raytf before the script"
        )


@main.command(short_help="Examine a running Ray cluster.")
@click.option("--address", help="Of the Ray cluster; local starts one here.  [default: RAY_ADDRESS, or this machine's]")
@click.option("--storage", callback=path, metavar="PATH_OR_URI", help="Storage that all nodes are to share.")
@click.option("--ports", default="20000-31999", show_default=True, metavar="FIRST-LAST", help="Where nodes listen.")
@click.option("--network", help="Interface (eth1) or network (10.1.0.0/16) to examine.  [default: Ray's]")
@click.option("--no-training", "training", flag_value=False, default=True, help="Make no steps of Keras.")
@click.option("--seconds", default=55.0, show_default=True, help="Deadline for all of it.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(address, ports, as_json, **options):
    """Examine a running Ray cluster: versions, network, clocks, limits, disks, storage, and two steps of Keras.

    Each finding is a line that ends with its fix. The exit code is 0 for a healthy cluster, and 1 with findings. It is
    2 for wrong options, or if no cluster answers.

    \b
    Example:
      raytf doctor --address 10.0.0.1:6379 --storage /shared/runs
    """
    from raytf.errors import ConfigError

    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints to stdout at any time, as when it gives up a node
        try:
            limits = parse_ports(ports)
            with status("looking for the cluster") as shown:
                from raytf.doctor import examination

                report = examination.run_examination(address, ports=limits, shown=shown, **options)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        if as_json:
            import dataclasses
            import json

            click.echo(json.dumps(dataclasses.asdict(report), indent=2), file=stdout)
        else:
            for line in examination.report_lines(report):
                click.echo(line, file=stdout)
        raise SystemExit(1 if report.findings else 0)


for _command in cli_runs.COMMANDS:
    main.add_command(_command)


def _end_ray() -> None:
    """Disconnects from the cluster, or shuts down the Ray that this command has started, in a few seconds."""
    import ray

    from raytf.console import phases

    with phases.show_phases(phase="ending Ray", only_in_terminals=True):
        ray.shutdown()


def _trainer(ctx: click.Context, largest=lambda: 1, space: Collection[str] | None = ()):
    """Returns a KerasTrainer from the options of a command, and starts or connects to Ray.

    Args:
        ctx: Context of the command.
        largest: Returns the largest number of workers, for which a local Ray must have resources.
        space: Additional keys of the config, or None if they are not known.
    """
    from raytf import cli_options
    from raytf.console import phases
    from raytf.runtime.settings import TensorflowConfig

    values = given_options(ctx)
    with wrong_options():
        module, function = cli_options.split_function(ctx.params["model"])
        config = {name: value for name, value in values["config"].items() if value is not None}
        config |= parse_settings(ctx.params["settings"])
        paths = {name: path for name, path in values["datasets"].items() if path}
        cli_options.check_training(values, config, paths)
    importing = phases.importing_phase(module)
    with phases.show_phases(phase=importing, only_in_terminals=ctx.command is plan) as shown:
        with wrong_options():
            build_model = cli_options.load_function(module, function)
            if space is not None:
                cli_options.check_config_keys(build_model, {*config, *space}, ctx.command.params)
            most_workers = largest()
            tensorflow_config = TensorflowConfig(**values["tensorflow"])
        shown.begin(phases.starting_phase())

        from ray.train import FailureConfig, RunConfig

        from raytf.storage import run_folder
        from raytf.train import results
        from raytf.train.keras_trainer import KerasTrainer

        failures = FailureConfig(max_failures=values["run"].pop("max_failures"))
        run_config = RunConfig(**values["run"], failure_config=failures)
        if values["run"].get("name") and values["trainer"].get("resume", False) is not False:
            with cli_runs.wrong_values():
                has_ended = results.has_ended(run_folder.with_absolute_path(run_config), config["epochs"])
            shown.begin(phases.starting_phase(has_ended))
        scaling_config = _scaling(values, most_workers)
        shown.begin(phases.READING)
        with cli_runs.wrong_values():
            datasets, roles = cli_runs.datasets_of(values, paths)
            return KerasTrainer(
                build_model,
                config=config,
                datasets=datasets,
                scaling_config=scaling_config,
                run_config=run_config,
                tensorflow_config=tensorflow_config,
                **(values["trainer"] | roles),
            )


def _scaling(values, largest: int):
    """Returns the ScalingConfig of the workers after a connection to Ray.

    Args:
        values: Values of the options, by receiver and by name.
        largest: Number of workers that the cluster must be able to hold.
    """
    import dataclasses

    servers = values["trainer"]["num_ps"]
    workers, cpus, gpus = (values["workers"][name] for name in ("num_workers", "cpus_per_worker", "gpus_per_worker"))
    requested = cli_runs.scaling(max(largest, workers), cpus, gpus)
    scaling_config = cli_runs.connected(requested, max(largest, workers + (servers + 1 if servers else 0)))
    return dataclasses.replace(scaling_config, num_workers=workers)


def parse_settings(settings) -> dict:
    """Returns {"units": 64} from ["units=64"]. Values are parsed as JSON if possible, and are text otherwise."""
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
    """Returns {"A": "1"} from ["A=1"]. A name without a value gets its value from this process.

    Raises:
        ConfigError: A name without a value is not set.
    """
    from raytf.errors import ConfigError

    variables = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigError(
                "--env takes NAME=VALUE, or the NAME of a variable that is set", repr(entry), "Set it, or give a value"
            )
        variables[name] = value if equals else os.environ[name]
    return variables


def parse_ports(given: str) -> tuple[int, int]:
    """Returns (20000, 31999) from "20000-31999"; `settings.check_ports` checks where the range is.

    Raises:
        ConfigError: The text is not two numbers, the smaller one first.
    """
    from raytf.errors import ConfigError

    first, _, last = given.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError("--ports takes FIRST-LAST, the smaller one first", repr(given), "For example 20000-31999")
    return int(first), int(last)


if __name__ == "__main__":
    main()
