"""Each message that a run can print is on the troubleshooting page, by its text."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

import raytf
from raytf import events
from raytf.events import Kind

FOLDER = pathlib.Path(raytf.__file__).parent
PAGE = FOLDER.parent / "docs" / "troubleshooting.md"
# Shorter parts are the glue between values.
LEAST_LETTERS = 10
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# Functions of raytf that pass their last positional argument on as a message.
HELPERS = {"_log", "emit_stop_requested", "print_line", "warn_user"}
# Errors whose text becomes a part of a message, or is the last line of a run. Those without a literal pass one on.
CLAUSES = {
    "Cause",
    "ConnectionResetError",
    "PeerLostError",
    "Proof",
    "RaytfError",
    "RecoveryFailedError",
    "StartError",
    "TaskExit",
    "TimeoutError",
    "_LostError",
    "_refuse",
    "disarm",
    "NotWrittenError",
    "BufferFullError",
    "ServerLostError",
    "StoppedError",
    "TrainingError",
    "WorkerFrozenError",
    "WorkerGroupLostError",
    "_restart_all",
    "_fail_run",
}
# Functions that wait for answers: a timeout names what they waited for, a text among their arguments.
WAITS = {"collect_answers", "in_completion_order", "_all_wait", "_answers", "_ask"}
# Files whose `print` writes the answer to a command, or passes on what others write.
ANSWERS = {
    "cli_runs.py": "the output of commands",
    "console/lines.py": "passes lines on",
    "console/output.py": "passes output on",
    "logs.py": "passes messages on",
}
RESULT = (("train/results.py", "lines"), ("train/results.py", "summary"))
_PHASES = (
    ("console/phases.py", "READING"),
    ("console/phases.py", "TRYING"),
    ("console/phases.py", "WORKERS"),
    ("console/phases.py", "FIRST_STEP"),
    ("console/phases.py", "ENDING"),
    ("console/phases.py", "COMPARING"),
    ("console/phases.py", "starting_phase"),
    ("fitting/call.py", "_DOES"),
    ("train/results.py", "has_ended"),
)
_DESCRIBED = (("data/ingest.py", "describe"), ("data/pipeline.py", "_remarks"), ("data/pipeline.py", "inspect"))
_DAMAGED = (("storage/checkpoint_files.py", "describe_choice"), ("storage/checkpoint_files.py", "damaged_error"))
_PROOF = (("train/verify_comparison.py", "VerificationResult.text"), ("train/verify.py", "NOT_IN_TIME"))
_TABLE = "values: see `trial 3/20` and `best` on the page"
_LINES = "the lines of `_TEXTS`, see `event_texts`"
_HELPER = "a helper whose calls are read"
# Messages that are not written where they are logged: (file, argument) to the definitions that have them, or a reason.
ELSEWHERE: dict[tuple[str, str], str | tuple[tuple[str, str], ...]] = {
    ("cli_parts.py", "str(message)"): "a warning of raytf, read where it is made",
    ("cli.py", "sentence"): (("launch/tfjob.py", "_UnreadFields.sentences"),),
    ("events.py", "str(event)"): _LINES,
    ("fitting/call.py", "f'run     {self._checkpoints.user_path}'"): RESULT,
    ("fitting/call.py", "line"): RESULT,
    ("fitting/calls.py", "ingest.describe(name, source, 'none')"): _DESCRIBED,
    ("launch/launcher.py", "exits[first].error"): "the output of a task",
    ("launch/launcher.py", "f'{name} {value}'"): "the output of a task",
    ("launch/launcher.py", "text()"): (("launch/launcher.py", "_open"), ("launch/launcher.py", "_answers")),
    ("console/phases.py", "f'{phase} ...'"): _PHASES,
    ("console/progress.py", "line"): (("console/progress.py", "describe"),),
    ("parallel/compiled_update.py", "f'{type(error).__name__}: {error}'"): "an error of TensorFlow",
    ("parallel/compiled_update.py", "why"): "the reason in a line of level DEBUG",
    ("parameter_server/coordinator.py", "why"): (("parameter_server/coordinator.py", "_restored_from"),),
    ("storage/checkpoint_files.py", "describe_choice(refused, posixpath.basename(candidate.path))"): _DAMAGED,
    ("storage/run_folder.py", "f'{self.name}: {checkpoint_files.describe_choice(damaged, chosen.name)}'"): _DAMAGED,
    ("storage/snapshots.py", "text"): _HELPER,
    ("train/evaluator.py", "sentence(why)"): (("train/evaluator.py", "sentence"),),
    ("train/tensorflow_trainer.py", "f'report  {shown}'"): "metrics of the user's loop",
    ("train/keras_trainer.py", "config_keys.unread_warning(outcome.unread)"): (
        ("identity/config_keys.py", "unread_warning"),
    ),
    ("train/keras_trainer.py", "f'run     {location}'"): RESULT,
    ("train/keras_trainer.py", "f'{folder.name}: {_describe_resume(last, order)}'"): (
        ("train/keras_trainer.py", "_describe_resume"),
    ),
    ("train/keras_trainer.py", "outcome.warning"): (("compat/versions.py", "untested_warning"),),
    (
        "train/keras_trainer.py",
        "ingest.describe(name, dataset, task.sampling.shuffle if name == 'train' else 'none')",
    ): _DESCRIBED,
    ("train/keras_trainer.py", "line"): RESULT,
    ("train/results.py", "table"): "the metrics of the last epoch",
    ("train/tensorflow_trainer.py", "f'run     {location}'"): RESULT,
    ("train/tensorflow_trainer.py", "line"): RESULT,
    ("train/verify.py", "result.text()"): _PROOF,
    ("train/verify.py", "text"): _PROOF,
    (
        "tune/table.py",
        "f'trial {count}  {_config(trial)}  {outcome}  after {epochs} report(s), {self._spent[-1]:.1f} s'",
    ): _TABLE,
    ("tune/table.py", "self._title()"): _TABLE,
    ("tune/table.py", "f'best {self._metric} {_format_value(best.metrics[self._metric])}: {config}'"): _TABLE,
    ("train/arguments.py", "doubt"): (("validation.py", "mode_warning"),),
    ("train/run_list.py", "doubt"): (("validation.py", "mode_warning"),),
    ("tune/sweep.py", "doubt"): (("validation.py", "mode_warning"),),
    ("tune/sweep.py", "f'sweep   {resume or run_folder.folder_in_users_form(settled)}'"): RESULT,
    ("worker/checkpoint_selector.py", "doubt"): (("validation.py", "mode_warning"),),
}
# Definitions whose texts are clauses of messages.
PARTS = (
    ("runtime/answers.py", "NoAnswerError.__str__"),
    ("runtime/hangs.py", "HangDetector._find_divergent"),
    ("runtime/hangs.py", "HangDetector._silent"),
    ("runtime/hangs.py", "_describe_collective"),
    ("runtime/hangs.py", "describe_activity"),
    ("runtime/stragglers.py", "Straggler.__str__"),
    ("storage/run_lock.py", "RunLock._refused"),
    ("storage/run_lock.py", "RunLock._lose"),
    ("train/evaluator.py", "_why"),
    ("collectives/recovery_client.py", "RecoveryClient.disarm"),
    ("runtime/roles.py", "TaskExit.reason"),
    ("train/recovery_coordinator.py", "RecoveryCoordinator.restart_point"),
    ("train/verify_comparison.py", "compare_runs"),
    ("train/verify_comparison.py", "_gaps"),
    ("train/verify_comparison.py", "_gap_of"),
    ("train/verify_comparison.py", "_of_state"),
    ("train/verify_comparison.py", "_of_weights"),
    ("train/verify_comparison.py", "_why_weights"),
    ("train/verify_comparison.py", "_of_log"),
    ("worker/replacement.py", "_unrecoverable"),
    ("train/recovery_coordinator.py", "RESTARTING"),
    ("train/recovery_coordinator.py", "REPLACING"),
    ("train/recovery_coordinator.py", "RAISE_LIMIT"),
    ("train/group.py", "EventGroup._emit"),
    ("train/group.py", "EventGroup._describe_end"),
    ("train/worker_group.py", "WorkerGroup._describe_end"),
    ("worker/epoch_checks.py", "EpochChecks._advice"),
    ("worker/epoch_checks.py", "EpochChecks._consequence"),
    ("train/decisions.py", "NO_FAILURES_LEFT"),
    ("train/decisions.py", "STOPPING"),
    ("worker/stop.py", "StoppedForRestartError"),
    ("worker/stop.py", "_MOVES"),
)


@dataclasses.dataclass(frozen=True)
class Message:
    """Literal parts of a message: (place, text) of each, or none where it is passed on."""

    place: str
    file: str
    argument: str
    texts: tuple[str, ...]


class _Reader:
    """Reads the messages of a module."""

    def __init__(self, file: str):
        self.file = file
        self.tree = ast.parse((FOLDER / file).read_text())
        self.functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        self._scopes: dict[ast.AST, ast.AST] = {}
        for function in self.functions:  # the innermost one is the last
            self._scopes |= dict.fromkeys(ast.walk(function), function)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, getattr(node.func, "attr", getattr(node.func, "id", ""))

    def texts(self, node: ast.AST, known: frozenset[str] = frozenset()) -> Iterator[str]:
        """Yields the literal parts of a message, through branches, sums, f-strings and variables of the function."""
        match node:
            case ast.Constant(value=str(text)):
                yield from re.split(r"%[\d.]*[sdf]", text.replace("%%", "%"))
            case ast.JoinedStr(values=parts) | ast.BoolOp(values=parts):
                for part in parts:
                    yield from self.texts(part, known)
            case ast.FormattedValue(value=value) | ast.NamedExpr(value=value):
                yield from self.texts(value, known)
            case ast.IfExp(body=one, orelse=other) | ast.BinOp(op=ast.Add(), left=one, right=other):
                yield from self.texts(one, known)
                yield from self.texts(other, known)
            case ast.Name(id=name) if name not in known:
                for value in self._assigned(name, self._scopes.get(node)):
                    yield from self.texts(value, known | {name})

    def _assigned(self, name: str, scope: ast.AST | None) -> Iterator[ast.expr]:
        """Yields the values of a variable of a function, or of a constant of the module."""
        for block in (scope, self.tree):
            found = [] if block is None else list(_values(block, name, whole=block is not self.tree))
            yield from found
            if found:
                return

    def definition(self, name: str) -> ast.AST:
        """Returns a function, a class, a method "Class.name", or the value of a constant."""
        scope, _, inner = name.rpartition(".")
        for node in ast.walk(self.definition(scope) if scope else self.tree):
            if getattr(node, "name", None) == inner:
                return node
        (value,) = _values(self.tree, name, whole=False)
        return value

    def messages(self) -> Iterator[Message]:
        for node, called in self.calls():
            argument = self._argument(node, called)
            if argument is not None:
                texts = tuple(filter(_counts, self.texts(argument)))
                yield Message(f"raytf/{self.file}:{node.lineno}", self.file, ast.unparse(argument), texts)

    def _argument(self, node: ast.Call, called: str) -> ast.expr | None:
        """Returns the argument with the message; None for a call without one."""
        if not node.args:
            return None
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if called in HELPERS:
            return node.args[-1]
        if owner.endswith("logger") and called in LEVELS:
            return node.args[0]
        if owner.endswith("logger") and called == "log":
            return node.args[1]
        to_stderr = any(word.arg == "err" and ast.unparse(word.value) != "False" for word in node.keywords)
        if (called == "print" and self.file not in ANSWERS) or (called == "echo" and to_stderr):
            return node.args[0]
        return None


def _values(block: ast.AST, name: str, whole: bool) -> Iterator[ast.expr]:
    for node in ast.walk(block) if whole else ast.iter_child_nodes(block):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_assignment = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr)
        if is_assignment and node.value and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            yield node.value


def _counts(text: str) -> bool:
    return len(_stripped(text)) >= LEAST_LETTERS and not text.isidentifier()  # as a key is


def _stripped(text: str) -> str:
    return _plain(text).strip(" .:;,()'")


def _plain(text: str) -> str:
    """Without marks of Markdown, with single spaces."""
    return re.sub(r"\s+", " ", text.replace("`", ""))


@functools.cache
def readers() -> dict[str, _Reader]:
    files = [path.relative_to(FOLDER).as_posix() for path in sorted(FOLDER.rglob("*.py"))]
    return {file: _Reader(file) for file in files}


@functools.cache
def messages() -> tuple[Message, ...]:
    return tuple(message for reader in readers().values() for message in reader.messages())


def event_texts() -> Iterator[tuple[str, str]]:
    """Yields (place, text) of each literal part of the line of each kind of event that is logged."""
    reader = readers()["events.py"]
    (table,) = _values(reader.tree, "_TEXTS", whole=False)
    lines = {ast.unparse(key): line for key, line in zip(table.keys, table.values, strict=True)}
    assert lines.keys() == {f"Kind.{kind.name}" for kind in Kind}
    for kind in set(Kind) - events._SILENT:
        line = lines[f"Kind.{kind.name}"]
        node = reader.definition(line.id) if isinstance(line, ast.Name) else line
        yield from _all_texts(node, f"raytf/events.py, {kind}")
    for reader in readers().values():
        for node, called in reader.calls():
            for word in node.keywords if called == "RunEvent" else ():
                if word.arg in ("why", "more"):
                    yield from ((f"raytf/{reader.file}:{node.lineno}", text) for text in reader.texts(word.value))


def clauses() -> Iterator[tuple[str, str]]:
    """Yields (place, text) of each literal part of an error that a message contains."""
    for reader in readers().values():
        for node, called in reader.calls():
            given = [*node.args, *(word.value for word in node.keywords)] if called in CLAUSES else []
            for argument in node.args if called in WAITS else given:
                yield from ((f"raytf/{reader.file}:{node.lineno}", text) for text in reader.texts(argument))


def texts_elsewhere() -> Iterator[tuple[str, str]]:
    for places in ELSEWHERE.values():
        yield from _texts_of(places if isinstance(places, tuple) else ())


def _texts_of(places) -> Iterator[tuple[str, str]]:
    for file, name in places:
        yield from _all_texts(readers()[file].definition(name), f"raytf/{file}, {name}")


def _all_texts(definition: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    documented = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(definition)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    tested = {id(inner) for node in ast.walk(definition) if _tests(node) for inner in ast.walk(node)}
    for node in ast.walk(definition):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in tested and node.value not in documented:
            yield place, node.value


def _tests(node: ast.AST) -> bool:
    """Returns whether the strings of a node are compared with texts."""
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."))


@pytest.mark.parametrize("answered", ANSWERS)
def test_files_that_print_answers_exist(answered):
    assert (FOLDER / answered).is_file()


def test_messages_are_logged_and_other_lines_go_through_the_console():
    """Only the output of a task of `raytf run` is written to stderr in another way."""
    calls = [(file, ast.unparse(node), called) for file, reader in readers().items() for node, called in reader.calls()]
    prints = {file for file, call, _ in calls if call.startswith("print(")}
    assert prints == {"console/lines.py", "console/output.py", "logs.py"}
    assert {file for file, call, _ in calls if call.startswith("warnings.warn")} == {"logs.py"}
    assert {file for file, call, called in calls if called == "echo" and "err=" in call} == {"launch/launcher.py"}


def test_each_message_is_a_literal_or_is_known_to_be_elsewhere():
    passed_on = {(message.file, message.argument): message.place for message in messages() if not message.texts}
    unknown = [f"{place}: {key}" for key, place in passed_on.items() if key not in ELSEWHERE]
    assert not unknown, "write the text where it is logged, or name its place in ELSEWHERE:\n" + "\n".join(unknown)
    assert not ELSEWHERE.keys() - passed_on.keys(), "no longer needed"


def test_each_message_is_on_the_troubleshooting_page():
    page = _plain(PAGE.read_text())
    found = [(message.place, text) for message in messages() for text in message.texts]
    found += [*texts_elsewhere(), *event_texts(), *clauses(), *_texts_of(PARTS)]
    assert len(found) > 200
    missing = {f"{place}: {_stripped(text)}" for place, text in found if _counts(text) and _stripped(text) not in page}
    assert not missing, "add to docs/troubleshooting.md, with what it means and what to do:\n" + "\n".join(
        sorted(missing)
    )
