"""A dry run that a signal ends names the signal and the process's memory; it does not blame build_model. No Ray."""

import os
import signal

import pytest

from raytf.errors import ConfigError
from raytf.train import dry_run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_the_signal_is_named(number):
    error = dry_run._in_a_copy(lambda: os.kill(os.getpid(), number))
    text = str(error)
    assert isinstance(error, ConfigError) and number.name in text and "MB of memory at most" in text
    assert "must return a compiled" not in text
    assert ("dmesg" in text) == (number == signal.SIGKILL)


def test_partial_answer_is_no_answer():
    """The process is ended while it sends its answer."""

    class Halted:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)
            return int, ()

    assert "SIGKILL" in str(dry_run._in_a_copy(lambda: [bytes(1 << 20), Halted()]))


def test_the_limit_covers_the_whole_result(set_timeouts):
    """Another process keeps the pipe open, as a server that build_model has started."""
    set_timeouts(dry_run=0.5)
    reader, writer = os.pipe()

    def answer():
        if not os.fork():
            os.close(writer)
            os.read(reader, 1)  # until this test closes its end
            os._exit(0)
        return 1

    assert "no end after 0.5 s" in str(dry_run._in_a_copy(answer))
    os.close(reader)
    os.close(writer)
