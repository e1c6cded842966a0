"""What commands of `raytf` are made of: options that know where their values go, types, and errors as click has them.

Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import click

from raytf.errors import ConfigError, RaytfError, StoppedError


class _Positive(click.FloatRange):
    """A finite number above 0."""

    def convert(self, value, param, ctx):
        found = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value!r} is not a finite number.", param, ctx)


COUNT = click.IntRange(min=1)
NUMBER = click.IntRange(min=0)
POSITIVE = _Positive(min=0, min_open=True)


class Commands(click.Group):
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


@contextlib.contextmanager
def wrong_options(but: type[Exception] | tuple = ()) -> Iterator[None]:
    """Within it a ConfigError is a wrong option or value: shown with the command's usage, with the exit code 2.

    Args:
        but: kinds of it that are none.
    """
    try:
        yield
    except ConfigError as error:
        if isinstance(error, but):
            raise
        raise click.UsageError(str(error), click.get_current_context()) from error


class Option(click.Option):
    """An option that says where its value goes: all that is known of it stands in one place.

    Args:
        to: what takes it, as an argument of the option's name: the "config" of the model function (unless it is not
            given), the "datasets" by name, the "trainer", its "workers", its "run", or the "sweep".
    """

    def __init__(self, *args, to: str, **settings):
        super().__init__(*args, **settings)
        self.to = to


def option(*names, to: str, **settings):
    """Returns the decorator of an `Option`."""
    return click.option(*names, cls=Option, to=to, **settings)


def options(*decorators):
    """Returns one decorator of several."""

    def decorate(command):
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def given(ctx: click.Context) -> dict[str, dict[str, Any]]:
    """Returns values of a command's options by what takes them, and by name."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for one in ctx.command.params:
        if isinstance(one, Option):
            found[one.to][one.name] = ctx.params[one.name]
    return found


def checked(function: Callable[[Any], Any]) -> Callable:
    """Returns a callback of an option that passes its value on after a check.

    Args:
        function: of the value, raises ConfigError if it is wrong; not called for None.
    """

    def callback(ctx, param, value):
        if value is not None:
            try:
                function(value)
            except ConfigError as error:
                raise click.BadParameter(str(error), ctx, param) from error
        return value

    return callback


class Which(click.ParamType):
    """The last checkpoint of a run, its best, or that of a step."""

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
    """Returns a column, or several with commas between them."""
    return text.split(",") if text and "," in text else text


def path(ctx, param, text: str | None) -> str | None:
    """Returns a path from the root, or a URI as it is."""
    import os

    return os.path.abspath(os.path.expanduser(text)) if text and "://" not in text else text
