"""A ring over hosts, which are network namespaces: a vanished host and a slow process are distinguished."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster import namespaces

WHY_NOT = namespaces.available()
# Seconds after which a host is lost, and of which a process may be late by more.
HOST_GONE = 3


@pytest.fixture
def ring():
    """(hosts, processes) of a ring of three hosts that has joined."""
    with namespaces.hosts(3) as hosts:
        processes = [
            subprocess.Popen(
                host.command(
                    [sys.executable, "-m", "tests.processes.ring_host", host.address, str(rank), str(HOST_GONE)]
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            ports = [int(process.stdout.readline()) for process in processes]
            for process in processes:
                say(process, json.dumps([(host.address, port) for host, port in zip(hosts, ports, strict=True)]))
            assert [process.stdout.readline() for process in processes] == ["joined\n"] * 3
            yield hosts, processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def say(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
def test_a_host_that_vanishes_is_noticed(ring):
    """Before it took what one neighbour has for it, and while the other waits for what it has."""
    hosts, (first, _, last) = ring
    for process in (first, last):
        say(process, 1 << 22)
    hosts[1].cut()
    found = [process.stdout.readline() for process in (first, last)]
    assert all("lost a neighbour in the ring of workers" in text for text in found), found
    assert all("its host does not answer any more" in text for text in found), found
    assert all("worker 1 is lost" in text for text in found), found
    assert all(float(text.split()[0]) < 10 * HOST_GONE for text in found), found
