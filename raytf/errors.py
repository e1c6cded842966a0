"""The errors of raytf: each says the rule, what was received and the fix, in one sentence or two.

They hold plain strings only, so that they pickle and cross from a worker to the driver unchanged.
"""

from __future__ import annotations

import re
import signal

_BOLD = re.compile(r"\x1b\[\d*m")


def first_line(error: object) -> str:
    """The first line of an error's text that is not blank, or ""."""
    return next((line for line in plain(error).splitlines() if line.strip()), "")


def plain(error: object) -> str:
    """An error's text without what makes it bold in a terminal, as Keras has it."""
    return _BOLD.sub("", str(error))


def in_a_line(error: BaseException) -> str:
    """Type and first line of an error; of TensorFlow's what they say of the cause, and in which operation it was.

    Of a Python function that a graph of TensorFlow called, the function's own.
    """
    if type(error).__module__.partition(".")[0] == "tensorflow":
        text = str(error)
        own, said = _of_python(text), of_tensorflow(text)
        if own:
            return said if _WHOLE in text else own
        if said:
            return f"{type(error).__name__}: {said}"
    return _of_autograph(str(error)) or f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def of_tensorflow(text: str) -> str:
    """What a text of TensorFlow's says of the cause, with the operation and where that was made; "" where it does not.

    The text of a graph has it in its last lines, below where the operation was made. What raytf has put before such a
    text stays.
    """
    before, found, after = text.partition(_WHOLE)
    if found:
        return before.strip()
    _, graph, after = text.partition("Detected at node ")
    if not graph:
        eager = re.search(r"\{\{function_node \S+\}\} (.*?) ?\[Op:(\w+)\]", text, re.DOTALL)
        layer = re.match(r"Exception encountered when calling (\S+)\.call\(\)", text)
        of_layer = f" of {layer[1]}" if layer else ""
        return f"{_shortened(eager[1])} (operation {eager[2]}{of_layer})" if eager else ""
    node = after.split(maxsplit=1)[0].rstrip(".")
    frames = re.findall(r'^  File "([^"]+)", line (\d+)', after, re.MULTILINE)
    lines = re.split(r"\n\s*\[\[", after, maxsplit=1)[0].splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    said = re.sub(r"^\(\d+\) [A-Z_]+: ", "", said)
    user = frames and "site-packages" not in frames[-1][0]
    place = f", {frames[-1][0].rpartition('/')[2]}, line {frames[-1][1]}" if user else ""
    parts = node.removeprefix("gradient_tape/").split("/")
    shown = "/".join(part for i, part in enumerate(parts) if parts[i - 1 : i] != [part])
    return f"{_shortened(said)} (operation {shown}{place})"


# Between what raytf says of an error of TensorFlow's and its whole text.
_WHOLE = "\n\nThe whole text of TensorFlow: "


def _shortened(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def with_cause(text: str, where: str) -> str:
    """A text of TensorFlow's that begins with its cause and `where` that was; as it is where it says no cause."""
    if _WHOLE in text:
        return text
    said = _of_python(text) or of_tensorflow(text)
    return f"{said}, {where}{_WHOLE}{text}" if said else text


def _of_autograph(text: str) -> str:
    """Type and first line of the error that AutoGraph tells below the user's lines ("in user code:"); "" without."""
    if not text.lstrip().startswith("in user code:"):
        return ""
    _, _, after = text.rpartition('\n    File "')
    return next((line.strip() for line in after.splitlines()[1:] if re.match(r" {4}\S", line)), "")


def _of_python(text: str) -> str:
    """Type and first line of the Python error in a text of TensorFlow's, which ends with its traceback; "" without."""
    _, found, after = text.rpartition("Traceback (most recent call last):\n")
    line = next((line for line in after.splitlines() if line[:1].strip()), "") if found else ""
    kind, colon, message = line.partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{message}".rstrip(": ")


class RaytfError(Exception):
    """Base class of all errors that raytf raises on purpose."""


class ConfigError(RaytfError, ValueError):
    """Raised when an argument is wrong, before any worker starts.

    Args:
        rule: What must hold, as a clause without a full stop.
        received: The value that broke the rule, as it should be shown.
        fix: What to do, as a clause without a full stop.
    """

    def __init__(self, rule: str, received: object, fix: str):
        super().__init__(rule, received, fix)
        self.rule, self.received, self.fix = rule, received, fix

    def __str__(self) -> str:
        return f"{self.rule}; received: {self.received}. {self.fix}{'' if self.fix.endswith('?') else '.'}"

    def __reduce__(self):
        return type(self), (self.rule, str(self.received), self.fix)


class UnsupportedVersionError(RaytfError, ImportError):
    """The installed Keras or TensorFlow is not one that raytf's multi-worker support is tested with."""


class ResourceError(ConfigError):
    """The cluster can never hold what was asked of it."""


class PeerLostError(RaytfError, ConnectionError):
    """A worker that sums gradients with others has lost one of them: a consequence, never the first cause.

    Args:
        rank: world rank of the worker that noticed it.
        why: what it saw or heard first, as a clause without a full stop.
        lost: world rank of the worker that is lost, which need be no neighbour; None where that is not known.
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
    """

    def __init__(self, rank: int | None, cause: str, details: str = ""):
        super().__init__(rank, cause, details)
        self.rank, self.cause, self.details = rank, cause, details

    def __str__(self) -> str:
        who = "the run" if self.rank is None else f"worker {self.rank}"
        details = f"\n\nTraceback of {who}:\n{self.details}" if self.details else ""
        return f"{who} failed: {self.cause}{details}"

    def __reduce__(self):
        return type(self), (self.rank, self.cause, self.details)


class StreamError(RaytfError, RuntimeError):
    """A dataset that is streamed can be read no more."""


class StoppedError(RaytfError, SystemExit):
    """Raised when a signal has stopped a run; its message says from which step the run resumes.

    It is a `SystemExit`: a script that does not catch it ends with `code`.

    Args:
        number: Number of the signal, 2 (SIGINT) or 15 (SIGTERM).
        where: State of the run, as a clause without a full stop.
        step: Steps that are made in all and in a checkpoint, or None if this start has made none.

    Attributes:
        code: Exit code: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, number: int, where: str, step: int | None = None):
        super().__init__(number, where, step)
        self.number, self.where, self.step, self.code = int(number), where, step, 128 + number

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}: {self.where}"

    def __reduce__(self):
        return type(self), (self.number, self.where, self.step)


class StoppedCallError(StoppedError, KeyboardInterrupt):
    """A call such as `raytf.fit` was ended by SIGINT, as Ctrl-C in a notebook: what waits for that hears of it."""
