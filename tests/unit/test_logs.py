"""Messages go through `logging`: shown by default, by level, and as the user has set it. No Ray."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings

import pytest

from raytf import events, logs
from raytf.events import Kind, RunEvent

LOST = RunEvent(kind=Kind.WORKER_LOST, ranks=(1,), why="it died")
CONTINUES = RunEvent(kind=Kind.WORKER_CONTINUED, ranks=(1,))


@pytest.fixture
def level():
    """Gives the logger of raytf back as it was."""
    top = logging.getLogger(logs.NAME)
    before = top.level
    yield top
    top.setLevel(before)


def test_messages_are_lines_on_stderr(capsys):
    events.emit(LOST)
    out, err = capsys.readouterr()
    assert err == "raytf: worker 1 was lost: it died\n" and not out


def test_a_level_leaves_what_is_lost(level, capsys):
    level.setLevel(logging.WARNING)
    events.emit(CONTINUES)
    events.emit(LOST)
    assert capsys.readouterr().err == "raytf: worker 1 was lost: it died\n"


def test_a_user_takes_them_with_a_handler_of_his_own(level):
    taken: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = taken.append
    level.addHandler(handler)
    try:
        events.emit(LOST)
    finally:
        level.removeHandler(handler)
    assert [(r.name, r.levelname, r.getMessage()) for r in taken] == [
        ("raytf.events", "WARNING", "worker 1 was lost: it died")
    ]


def test_what_was_set_before_the_import_stays_and_the_root_logger_shows_nothing_twice():
    script = (
        "import logging; logging.basicConfig(); logging.getLogger('raytf').setLevel('ERROR');"
        "from raytf import logs; log = logs.get_logger('raytf.one'); log.warning('no'); log.error('once')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stderr == "raytf: once\n"


def test_warnings_are_warnings_of_python_and_reach_a_users_handler(level, capsys):
    taken: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = taken.append
    level.addHandler(handler)
    try:
        with pytest.warns(UserWarning, match="the loss is NaN") as shown:
            logs.warn_user("the loss is NaN")
    finally:
        level.removeHandler(handler)
    assert shown[0].filename == __file__ and not capsys.readouterr().err
    assert [(r.name, r.levelname, r.getMessage()) for r in taken] == [("raytf.warnings", "WARNING", "the loss is NaN")]


def test_a_warning_has_the_line_of_the_users_code_however_deep_raytf_is():
    program = "def fit(deep):\n    return fit(deep - 1) if deep else logs.warn_user('a doubt')\n"
    inner = {"logs": logs, "__name__": "raytf.train.local"}
    exec(compile(program, "local.py", "exec"), inner)
    with pytest.warns(UserWarning, match="a doubt") as caught:
        inner["fit"](4)
    assert caught[0].filename == __file__


def test_a_warning_without_code_of_the_user_has_the_line_of_raytf():
    """A process that Ray starts runs its script first."""
    worker = {"logs": logs, "__name__": "raytf.worker.loop"}
    exec(compile("def loop():\n    logs.warn_user('a doubt')\n", "loop.py", "exec"), worker)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=worker["loop"])
        thread.start()
        thread.join()
    assert [(w.filename, w.lineno) for w in caught] == [("loop.py", 2)]
