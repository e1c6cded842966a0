"""Errors of raytf. Each contains the rule, the received value and the fix, in one sentence or two.

They hold plain strings only, so that they pickle and pass from a worker to the driver unchanged.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import traceback
from collections.abc import Sequence
from typing import Any

_BOLD = re.compile(r"\x1b\[\d*m")


def first_line(error: object) -> str:
    """Returns the first line of an error's text that is not blank, or ""."""
    return next((line for line in without_escapes(error).splitlines() if line.strip()), "")


def without_escapes(error: object) -> str:
    """Returns an error's text without the escape sequences with which Keras makes it bold."""
    return _BOLD.sub("", str(error))


def one_line(error: BaseException) -> str:
    """Returns the type and the first line of an error.

    For an error of TensorFlow, the line is the cause and its operation. For one raised in a Python function that a
    graph called, it is the function's own error. For an actor that died, it is how its process ended. For an error of
    a task of Ray, it is that of the error that the task raised.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and any(kind.__name__ == "RayTaskError" for kind in type(error).__mro__):
        return one_line(cause)
    known = tensorflow_line(error) or _autograph_cause(str(error)) or _actor_cause(error)
    return known or f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def tensorflow_line(error: BaseException) -> str:
    """Returns the line of `one_line` for an error of TensorFlow whose text contains the cause, or ""."""
    if type(error).__module__.partition(".")[0] != "tensorflow":
        return ""
    text = str(error)
    python_error, cause = _python_cause(text), tensorflow_cause(text)
    if python_error:
        return cause if _WHOLE in text else python_error
    return cause and f"{type(error).__name__}: {cause}"


def tensorflow_cause(text: str) -> str:
    """Returns the cause in a text of TensorFlow, with its operation and the user's line that made it, or "".

    The text of a graph contains the cause in its last lines, below the line that made the operation. A cause that
    raytf has put before the text is returned as it is.
    """
    prefix, has_prefix, remaining = text.partition(_WHOLE)
    if has_prefix:
        return prefix.strip()
    _, graph, remaining = text.partition("Detected at node ")
    if not graph:
        eager = re.search(r"\{\{function_node \S+\}\} (.*?) ?\[Op:(\w+)\]", text, re.DOTALL)
        layer = re.match(r"Exception encountered when calling (\S+)\.call\(\)", text)
        of_layer = f" of {layer[1]}" if layer else ""
        return f"{_shortened(eager[1])} (operation {eager[2]}{of_layer})" if eager else ""
    node = remaining.split(maxsplit=1)[0].rstrip(".")
    frames = re.findall(r'^  File "([^"]+)", line (\d+)', remaining, re.MULTILINE)
    lines = re.split(r"\n\s*\[\[|\n\S.* GRPC error information", remaining, maxsplit=1)[0].splitlines()
    cause = next((line.strip() for line in reversed(lines) if line.strip()), "")
    cause = re.sub(r"^\(\d+\) [A-Z_]+: ", "", cause)
    user = frames and "site-packages" not in frames[-1][0]
    location = f", {frames[-1][0].rpartition('/')[2]}, line {frames[-1][1]}" if user else ""
    parts = node.removeprefix("gradient_tape/").split("/")
    shown = "/".join(part for i, part in enumerate(parts) if parts[i - 1 : i] != [part])
    return f"{_shortened(cause)} (operation {shown}{location})"


# Separates raytf's summary of a TensorFlow error from the whole text of it.
_WHOLE = "\n\nThe whole text of TensorFlow: "


def _shortened(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def with_cause(text: str, location: str) -> str:
    """Returns a text of TensorFlow that begins with its cause and `location`; unchanged if it contains no cause."""
    if _WHOLE in text:
        return text
    cause = _python_cause(text) or tensorflow_cause(text)
    return f"{cause}, {location}{_WHOLE}{text}" if cause else text


def _actor_cause(error: BaseException) -> str:
    """Returns the process of a dead actor, and how it ended, from Ray's text; or ""."""
    process = re.search(r"\bpid: (\d+)\n.*\bip: (\S+)\n\s*The actor is dead because (.*)", str(error), re.DOTALL)
    if process is None:
        return ""
    pid, ip, reason = process.groups()
    reason = re.sub(r".*Worker exit detail: ", "", " ".join(reason.split()))
    if "connection error code 2" in reason:  # what Ray writes of each process that ends without a message
        reason = "it was killed (SIGKILL, or the kernel as memory ran out), or crashed"
    return f"{type(error).__name__}: process {pid} on {ip}: {_shortened(reason)}".rstrip(".")


def definition_line(value: Any) -> str:
    """Returns "FILE, line N" of the definition of a function or class."""
    code = getattr(inspect.unwrap(value), "__code__", None)
    if code is None:
        try:
            return f"{os.path.basename(inspect.getsourcefile(value) or '?')}, line {inspect.getsourcelines(value)[1]}"
        except (OSError, TypeError):  # a class of a script, or of a notebook, has come from another process
            methods = filter(inspect.isfunction, getattr(value, "__dict__", {}).values())
            code = min((m.__code__ for m in methods), key=lambda code: code.co_firstlineno, default=None)
    return "line unknown" if code is None else f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}"


def user_line(error: BaseException) -> str:
    """Returns " (FILE, line N)" of the last line of user code that an error passed, or else of any code."""
    frames = _frames_in(without_escapes(error))
    if not frames:
        passed = traceback.extract_tb(error.__traceback__)
        frames = [(f.filename, str(f.lineno), f.name) for f in passed if "__autograph_generated" not in f.filename]
    return _shown_line(frames)


def _shown_line(frames: Sequence[tuple[str, str, str]]) -> str:
    """Returns " (FILE, line N)" of the last frame that is in no package; a converted function has its name alone."""
    if not frames:
        return ""
    path, line, name = (_user_frames(frames) or frames)[-1]
    return f" (in {name})" if "__autograph_generated" in path else f" ({os.path.basename(path)}, line {line})"


def _user_frames(frames: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    libraries = (os.path.dirname(__file__), os.path.dirname(os.__file__))
    return [f for f in frames if "/site-packages/" not in f[0] and not f[0].startswith(libraries)]


def passed_user_code(text: str) -> bool:
    """Returns whether a traceback has a line of the user's code."""
    return bool(_user_frames(_frames_in(text)))


def _frames_in(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r'^ +File "([^"]+)", line (\d+), in (\w+)', text, re.MULTILINE)


def _autograph_cause(text: str) -> str:
    """Returns type, first line and place of the error that AutoGraph reports below "in user code:", or ""."""
    if not text.lstrip().startswith("in user code:"):
        return ""
    _, _, frame = text.rpartition('\n    File "')
    line = next((line.strip() for line in frame.splitlines()[1:] if re.match(r" {4}\S", line)), "")
    return line and f"{line}{_shown_line(_frames_in(text))}"


def _python_cause(text: str) -> str:
    """Returns type, first line and place of the Python error whose traceback ends a text of TensorFlow, or ""."""
    _, has_traceback, frames = text.rpartition("Traceback (most recent call last):\n")
    line = next((line for line in frames.splitlines() if line[:1].strip()), "") if has_traceback else ""
    kind, colon, message = line.partition(":")
    line = f"{kind.rpartition('.')[2]}{colon}{message}".rstrip(": ")
    return line and f"{line}{_shown_line(_frames_in(frames))}"


class RaytfError(Exception):
    """Base class of the errors that raytf raises; `StoppedError`, after a signal, is none.

    Example:
        >>> import raytf
        >>> try:
        ...     raytf.TensorflowConfig(sync_every=0)
        ... except raytf.RaytfError as error:
        ...     print(error)
    """


class ConfigError(RaytfError, ValueError):
    """Raised when an argument is wrong, before any worker starts if that can be seen there.

    Args:
        rule: What must hold, as a clause without a full stop.
        received: The value that broke the rule, as it should be shown.
        fix: What to do, as a clause without a full stop.

    Example:
        >>> import raytf
        >>> try:
        ...     raytf.TensorflowConfig(sync_every=0)
        ... except raytf.ConfigError as error:
        ...     received = error.received
        >>> received
        '0'
    """

    def __init__(self, rule: str, received: object, fix: str):
        super().__init__(f"{rule}; received: {received}. {fix}{'' if fix.endswith('?') else '.'}")
        self.rule, self.received, self.fix = rule, received, fix

    def __reduce__(self):
        return type(self), (self.rule, str(self.received), self.fix)


class UnsupportedVersionError(RaytfError, ImportError):
    """Raised when raytf's multi-worker support is not tested with the installed Keras or TensorFlow."""


class ResourceError(ConfigError):
    """Raised when the cluster can never provide the requested resources."""


class PeerLostError(RaytfError, ConnectionError):
    """Raised when a worker has lost another one in an all-reduce: a consequence, never the first cause.

    Args:
        rank: World rank of the worker that noticed it.
        why: What it noticed or received first, as a clause without a full stop.
        lost: World rank of the lost worker, which need not be a neighbour, or None if it is not known.
    """

    def __init__(self, rank: int, why: str, lost: int | None = None):
        super().__init__(rank, why)
        self.rank, self.why, self.lost = rank, why, lost

    def __str__(self) -> str:
        return f"worker {self.rank} lost a neighbour in the ring of workers: {self.why}"

    def __reduce__(self):
        return type(self), (self.rank, self.why, self.lost)


class TrainingError(RaytfError, RuntimeError):
    """Raised when a worker failed. The message is the first cause, with the rank of its worker.

    Args:
        rank: World rank of the worker that failed first, or None if no single worker did.
        cause: Type and message of the first cause, in one line.
        details: Traceback of that worker, or "" if there is none.

    Example:
        >>> import raytf
        >>> error = raytf.TrainingError(1, "ValueError: no rows")
        >>> str(error)
        'worker 1 failed: ValueError: no rows'
    """

    def __init__(self, rank: int | None, cause: str, details: str = ""):
        super().__init__(rank, cause, details)
        self.rank, self.cause, self.details = rank, cause, details

    def __str__(self) -> str:
        subject = "the run" if self.rank is None else f"worker {self.rank}"
        details = f"\n\nTraceback of {subject}:\n{self.details}" if self.details else ""
        return f"{subject} failed: {self.cause}{details}"

    def __reduce__(self):
        return type(self), (self.rank, self.cause, self.details)


class StreamError(RaytfError, RuntimeError):
    """Raised when a streamed dataset can no longer be read."""


class StoppedError(SystemExit):
    """Raised when a signal has stopped a run; its message names the step from which the run resumes.

    It is a `SystemExit`: a script that does not catch it ends with `code`. `except Exception` does not catch it, so
    that a loop over models ends as well.

    Args:
        number: Number of the signal, 2 (SIGINT) or 15 (SIGTERM).
        status: State of the run, as a clause without a full stop.
        step: Steps that are made in all and in a checkpoint, or None if this start has made none.

    Attributes:
        code: Exit code: 130 after SIGINT, 143 after SIGTERM.

    Example:
        >>> import signal, raytf
        >>> error = raytf.StoppedError(signal.SIGTERM, "the run has stopped after step 7", 7)
        >>> error.code
        143
    """

    def __init__(self, number: int, status: str, step: int | None = None):
        super().__init__(number, status, step)
        self.number, self.status, self.step, self.code = int(number), status, step, 128 + number

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}: {self.status}"

    def __reduce__(self):
        return type(self), (self.number, self.status, self.step)


class StoppedCallError(StoppedError, KeyboardInterrupt):
    """Raised when SIGINT ends a call such as `raytf.fit`; a notebook catches it as a KeyboardInterrupt."""
