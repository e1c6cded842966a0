"""A member of a ring of processes dies: all others learn which, at once, wherever they are."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys

import pytest

SIZE = 5
# Within which all learn it: far more than a round trip, as the machine may be busy, and far less than any time limit.
REPORT_SECONDS = 10


@contextlib.contextmanager
def ring_of_processes(hosts):
    """Processes that have joined; "tcp" gives each a host of its own, so that no Unix socket is used."""
    addresses = [f"127.0.0.{rank + 1}" if hosts == "tcp" else "127.0.0.1" for rank in range(SIZE)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.ring_host", address, str(rank), "35"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, address in enumerate(addresses)
    ]
    try:
        ports = [int(answer_of(process, 60)) for process in processes]
        for process in processes:
            say(process, json.dumps(list(zip(addresses, ports, strict=True))))
        assert [answer_of(process, 60) for process in processes] == ["joined\n"] * SIZE
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def say(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def has_answered(processes, seconds) -> bool:
    poll = select.poll()
    for process in processes:
        poll.register(process.stdout, select.POLLIN)
    return bool(poll.poll(1e3 * seconds))


def answer_of(process, seconds):
    assert has_answered([process], seconds), f"process {process.args[-2]} said nothing"
    return process.stdout.readline()


@pytest.mark.parametrize("hosts", ["unix", "tcp"])
@pytest.mark.parametrize("items", [10, 1 << 22])
def test_all_members_learn_who_died(hosts, items):
    """Worker 0 waits for worker 4, which does something else and learns it when it sums again."""
    with ring_of_processes(hosts) as processes:
        for rank in (0, 1, 3):
            say(processes[rank], items)
        processes[2].send_signal(signal.SIGKILL)
        answers = [answer_of(processes[rank], REPORT_SECONDS) for rank in (0, 1, 3)]
        say(processes[4], items)
        answers.append(answer_of(processes[4], REPORT_SECONDS))
        assert all("worker 2 is lost" in text and "seen by worker" in text for text in answers), answers


def test_stopped_member_is_waited_for_and_its_death_then_reported():
    with ring_of_processes("tcp") as processes:
        processes[2].send_signal(signal.SIGSTOP)
        for process in processes:
            say(process, 10)
        assert not has_answered(processes, 1)
        processes[2].send_signal(signal.SIGCONT)
        assert [answer_of(process, REPORT_SECONDS) for process in processes] == [f"{SIZE}.0\n"] * SIZE
        processes[2].send_signal(signal.SIGSTOP)
        say(processes[0], 10)
        processes[2].send_signal(signal.SIGKILL)
        assert "worker 2 is lost" in answer_of(processes[0], REPORT_SECONDS)


@pytest.mark.parametrize("hosts", ["unix", "tcp"])
def test_two_deaths_at_once(hosts):
    with ring_of_processes(hosts) as processes:
        for rank in (0, 1, 3):
            say(processes[rank], 1 << 20)
        for rank in (2, 4):
            processes[rank].send_signal(signal.SIGKILL)
        answers = [answer_of(processes[rank], REPORT_SECONDS) for rank in (0, 1, 3)]
        assert all("worker 2 is lost" in text or "worker 4 is lost" in text for text in answers), answers


@pytest.mark.parametrize("hosts", ["unix", "tcp"])
def test_a_fork_neither_hides_the_death_of_a_member_nor_leaves_for_it(hosts):
    with ring_of_processes(hosts) as processes:
        say(processes[2], "fork and exit")
        answer_of(processes[2], REPORT_SECONDS)
        for process in processes:
            say(process, 10)
        assert [answer_of(process, REPORT_SECONDS) for process in processes] == [f"{SIZE}.0\n"] * SIZE
        say(processes[2], "fork")
        fork = int(answer_of(processes[2], REPORT_SECONDS))
        try:
            for rank in (0, 1, 3, 4):
                say(processes[rank], 10)
            processes[2].send_signal(signal.SIGKILL)
            answers = [answer_of(processes[rank], REPORT_SECONDS) for rank in (0, 1, 3, 4)]
        finally:
            os.kill(fork, signal.SIGKILL)
        assert all("worker 2 is lost" in text for text in answers), answers
