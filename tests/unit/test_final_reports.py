"""Of all processes that are about to be ended the last words are taken at once, with one deadline. No Ray."""

import threading

import pytest

from raytf.runtime.process_monitor import ProcessKiller


@pytest.fixture
def watches():
    """A watchdog that does not look by itself, which would take Ray."""
    return object.__new__(ProcessKiller)


def test_all_are_asked_at_once(watches):
    together = threading.Barrier(8, timeout=60.0)  # none answers before all are asked
    watches._final_report_of = lambda key: (together.wait(), key)
    found = watches._collect_final_reports(list(range(8)))
    assert {key: kept for key, (_, kept) in found.items()} == {key: key for key in range(8)}


def test_one_that_never_answers_holds_up_none_of_the_others(watches, set_timeouts):
    set_timeouts(final_report=0.5)
    ended = threading.Event()
    watches._final_report_of = lambda key: ended.wait() if key == 0 else ("words", key)
    found = watches._collect_final_reports([0, 1, 2])
    assert found == {1: ("words", 1), 2: ("words", 2)}
    ended.set()
