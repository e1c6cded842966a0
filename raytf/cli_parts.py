"""Building blocks of the `raytf` commands: options with a receiver, types, and errors in click's form.

It imports no heavy module.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import click

from raytf import logs, validation
from raytf.console import phases
from raytf.errors import ConfigError, RaytfError, StoppedError

logger = logs.get_logger(__name__)


class _Positive(click.FloatRange):
    """A finite number above 0."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number.", param, ctx)


COUNT = click.IntRange(min=1)
NUMBER = click.IntRange(min=0)
POSITIVE = _Positive(min=0, min_open=True)


class Commands(click.Group):
    """Group that shows raytf's own errors in one line and exits with 1, or with the code of a signal."""

    def invoke(self, ctx):
        try:
            with _warnings_as_lines():
                return super().invoke(ctx)
        except StoppedError:
            raise  # it is logged already, and has its own exit code
        except KeyboardInterrupt:  # click would exit with 1
            logger.info("SIGINT: ended")
            ctx.exit(128 + signal.SIGINT)
        except RaytfError as error:
            raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Logs raytf's warnings until the context ends: a line of raytf's own code would mean nothing to the user."""
    package, show = os.path.dirname(__file__), warnings.showwarning

    def showwarning(message, category, filename, lineno, file=None, line=None):
        if file is None and os.path.dirname(filename).startswith(package):
            logger.warning(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning
    try:
        yield
    finally:
        warnings.showwarning = show


@contextlib.contextmanager
def wrong_options(but: type[Exception] | tuple = ()) -> Iterator[None]:
    """Reports a ConfigError in the context as a wrong option, with the command's usage and the exit code 2.

    Args:
        but: Subclasses of ConfigError that are raised unchanged.
    """
    try:
        yield
    except ConfigError as error:
        if isinstance(error, but):
            raise
        raise click.UsageError(str(error), click.get_current_context()) from error


@contextlib.contextmanager
def status(phase: str, only_in_terminals: bool = False) -> Iterator[Any]:
    """Shows the phase of a command on stderr until the context ends, as stdout has the result. Yields its `Phases`."""
    with (
        contextlib.redirect_stdout(sys.stderr),
        phases.show_phases(phase=phase, only_in_terminals=only_in_terminals) as shown,
    ):
        yield shown


class Option(click.Option):
    """Option that includes the receiver of its value.

    Args:
        receiver: Receiver of the value, as an argument of the option's name. One of "config", "datasets", "data",
            "columns", "trainer", "tensorflow", "workers", "run" and "sweep". "config" is that of the model function,
            and gets the value only if the option is given. "datasets" is by name. "data" is of `formats.read`,
            "columns" of `formats.roles`, and "tensorflow" of `TensorflowConfig`.
    """

    def __init__(self, *args, receiver: str, **settings):
        super().__init__(*args, **settings)
        self.receiver = receiver


def option(*names, receiver: str, **settings):
    """Returns the decorator of an `Option`."""
    return click.option(*names, cls=Option, receiver=receiver, **settings)


def options(*decorators):
    """Returns one decorator that applies several."""

    def decorate(command):
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def given_options(ctx: click.Context) -> dict[str, dict[str, Any]]:
    """Returns the values of a command's options, by receiver and by name."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for param in ctx.command.params:
        if isinstance(param, Option):
            values[param.receiver][param.name] = ctx.params[param.name]
    return values


def checked(function: Callable[[Any], Any]) -> Callable:
    """Returns an option's callback that checks the value and returns it.

    Args:
        function: Raises ConfigError if the value is wrong. It is not called for None.
    """

    def callback(ctx, param, value):
        if value is not None:
            try:
                function(value)
            except ConfigError as error:
                raise click.BadParameter(str(error), ctx, param) from error
        return value

    return callback


class WhichCheckpoint(click.ParamType):
    """Type of an option that selects the last checkpoint of a run, the best, or the one of a step."""

    name = "last|best|STEP"

    def convert(self, value, param, ctx):
        if isinstance(value, int) or value in ("last", "best"):
            return value
        if not value.isdecimal():
            self.fail(f"{value!r} is not one of 'last', 'best' and the steps of a checkpoint.", param, ctx)
        return int(value)

    def shell_complete(self, ctx, param, incomplete):
        return [click.shell_completion.CompletionItem(word) for word in ("last", "best") if word.startswith(incomplete)]


def columns(ctx, param, text: str | None) -> str | list[str] | None:
    """Returns one column, or a list of those between commas."""
    return text.split(",") if text and "," in text else text


def pairs(ctx, param, text: str | None) -> dict[str, str]:
    """Returns {"a": "int64"} from "a=int64", with more after commas."""
    given = [pair.partition("=") for pair in text.split(",")] if text else []
    if not all(name and value for name, _, value in given):
        raise click.BadParameter(f"{text!r} is not {param.metavar}.", ctx, param)
    return {name: value for name, _, value in given}


def image_size(ctx, param, text: str | None) -> tuple[int, int, int] | None:
    """Returns (height, width, channels) from "224x224" or "28x28x1"; there are 3 channels unless given."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is not HEIGHTxWIDTH[xCHANNELS].", ctx, param)
    height, width, channels = (*map(int, parts), 3)[:3]
    return height, width, channels


def path(ctx, param, text: str | None) -> str | None:
    """Returns the absolute path, or a URI unchanged."""
    return os.path.abspath(os.path.expanduser(text)) if text and "://" not in text else text


FILES = "Folder or URI of Parquet, CSV or TFRecord files, or images in a folder for each class."
FEATURES = option(
    "--features",
    receiver="trainer",
    callback=columns,
    metavar="COLUMN[,COLUMN...]",
    help="A column; several are stacked into a float vector.  [default: all but the labels]",
)
SAMPLE_WEIGHTS = option(
    "--sample-weights", receiver="trainer", callback=columns, metavar="COLUMN", help="A column of weights for each row."
)
# how files become rows
DATA = options(
    option(
        "--format",
        receiver="data",
        default="auto",
        type=click.Choice(["auto", *validation.FORMATS]),
        show_default=True,
        help="Format of the files; auto goes by their names.",
    ),
    option(
        "--types",
        receiver="data",
        callback=pairs,
        metavar="COLUMN=TYPE[,...]",
        help="Arrow types of CSV columns, as age=float32.  [default: by the first rows]",
    ),
    option(
        "--fill",
        receiver="columns",
        callback=pairs,
        metavar="COLUMN=VALUE[,...]",
        help="Replace missing values of a column, as age=0.",
    ),
    option(
        "--unreadable",
        receiver="data",
        default="refuse",
        type=click.Choice(validation.UNREADABLE),
        show_default=True,
        help="What to do with images that cannot be decoded.",
    ),
    option(
        "--image-size",
        "image",
        receiver="columns",
        callback=image_size,
        metavar="HEIGHTxWIDTH[xCHANNELS]",
        help="Decode the one feature as an image of this size.  [default, for images: that of the first]",
    ),
)
