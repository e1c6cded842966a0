"""What is kept back of start-up lines and of repeated warnings, and what never is."""

import logging
import os
import subprocess
import sys
import warnings

import pytest
from ray.exceptions import RpcError

from raytf import logs
from raytf.compat import ray_core
from raytf.console import native_lines, shared_warnings
from raytf.console.progress import Entries

NOISE = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795383183.282925   11552 port.cc:153] oneDNN custom operations are on. You may see ...",
    "I0000 00:00:1795383183.285109   11552 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU ...",
    "I0000 00:00:1795383191.171080       9 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use ...",
    "To enable the following instructions: AVX2 AVX512F, in other operations, rebuild TensorFlow with ...",
    "E0000 00:00:1795383185.880987   11552 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: "
    "Failed call to cuInit: UNKNOWN ERROR (303)",
]
SHOWN = [
    "E0000 00:00:1795383185.880987   11552 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: "
    "Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
    "F0000 00:00:1795383185.880987   11552 cpu_feature.cc:1] The TensorFlow library was compiled to use AVX",
    "oneDNN custom operations are on, said a user",
    "",
    "a line without an end",
]
WRITES = """
import os, sys
from raytf.console import quiet
with quiet.quiet_native():
    os.write(2, sys.argv[1].encode())
    print("from Python", file=sys.stderr)
    if sys.argv[2] == "dies":
        os.write(2, b"its last words")
        os.abort()
os.write(2, b"and afterwards")
"""


@pytest.mark.parametrize("line", NOISE)
def test_start_up_lines_are_known(line):
    assert native_lines.is_native(line)


@pytest.mark.parametrize(("how", "last"), [("lives", "and afterwards"), ("dies", "its last words")])
def test_all_other_lines_go_through_the_last_one_of_a_crash_too(how, last):
    lines = [line for pair in zip(NOISE, [*SHOWN, "more"], strict=True) for line in pair]
    text = "\n".join(lines) + "\n"
    done = subprocess.run([sys.executable, "-c", WRITES, text, how], capture_output=True, text=True, timeout=60)
    assert done.stderr == "\n".join([*SHOWN, "more", "from Python", last])
    assert (done.returncode == 0) == (how == "lives")


def test_all_lines_are_shown_on_request():
    command = [sys.executable, "-c", WRITES, NOISE[1] + "\n", "lives"]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr.startswith(NOISE[1])


class Taken:
    """Entries of this process alone."""

    def __init__(self):
        self._names = set()

    def claim(self, name):
        return not (name in self._names or self._names.add(name))


def test_a_warning_is_shown_by_the_first_of_several_workers(capsys):
    """As often as one worker alone logs it; an error of each is shown."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    entries = Taken()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rank in (0, 1):
                with shared_warnings.shown_once(entries):
                    for _ in range(2):
                        warnings.warn_explicit("careful", UserWarning, "theirs.py", 3)
                    warnings.warn_explicit(f"only rank {rank}", UserWarning, "theirs.py", 4)
                    warnings.warn_explicit(f"an <object at 0x7f{rank}>", UserWarning, "theirs.py", 5)
                    logging.getLogger("theirs").warning("logged")
                    logging.getLogger("theirs").error("an error")
    finally:
        logging.getLogger().removeHandler(handler)
    expected = ["careful", "careful", "only rank 0", "an <object at 0x7f0>", "only rank 1"]
    assert [str(warning.message) for warning in caught] == expected
    assert capsys.readouterr().err.splitlines() == ["logged", "an error", "an error"]


def test_a_warning_of_a_logger_without_handlers_is_shown_by_the_first_worker(capsys, monkeypatch):
    """Python's handler of last resort is on no logger."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    entries = Taken()
    for _ in (0, 1):
        with shared_warnings.shown_once(entries):
            logging.getLogger("theirs").warning("logged")
    assert capsys.readouterr().err.splitlines() == ["logged"]


def test_a_warning_is_shown_while_the_head_does_not_answer(capsys, monkeypatch):
    """By each worker, rather than end its training."""

    def lost(*_, **__):
        raise RpcError("RPC error: UNAVAILABLE")

    monkeypatch.setattr(ray_core, "kv_put", lost)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.warns(UserWarning, match="careful"), shared_warnings.shown_once(Entries("warnings")):
        warnings.warn_explicit("careful", UserWarning, "theirs.py", 3)
        logging.getLogger("theirs").warning("logged")
    assert capsys.readouterr().err.splitlines() == ["logged"]


def test_a_warning_that_raytf_logs_is_shown_by_the_first_worker(capsys):
    entries, logger = Taken(), logs.get_logger("raytf.one")
    for rank in (0, 1):
        with shared_warnings.shown_once(entries):
            logger.warning("checkpoints are late")
            logger.warning("also of rank %d", rank)
            logger.info("a normal event")
    lines = ["checkpoints are late", "also of rank 0", "a normal event", "also of rank 1", "a normal event"]
    assert capsys.readouterr().err.splitlines() == [f"raytf: {line}" for line in lines]


def test_a_line_of_source_is_shown_of_warnings_of_others_alone():
    """A line of raytf does not help the reader of the warning."""
    for entries in (None, Taken()):
        with warnings.catch_warnings(record=True) as caught, shared_warnings.shown_once(entries):
            warnings.simplefilter("always")
            for name in (shared_warnings.__file__, __file__):
                warnings.warn_explicit("careful", UserWarning, name, 1)
        first, second = (warnings.formatwarning(w.message, w.category, w.filename, w.lineno, w.line) for w in caught)
        assert first.splitlines() == [f"{shared_warnings.__file__}:1: UserWarning: careful"]
        assert second.splitlines()[1].strip().strip('"') == __doc__


IMPORTS = """
import logging, os, sys, threading, warnings, signal
def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    said = {one.name: (one.level, one.filters[:], one.handlers[:]) for one in loggers if one.filters or one.handlers}
    return said, sys.meta_path[:], dict(os.environ), warnings.filters[:], threading.active_count(), sys.excepthook
before = state()
import raytf
assert state() == before
assert not {"tensorflow", "keras", "ray"} & set(sys.modules)
"""


def test_an_import_of_raytf_changes_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
