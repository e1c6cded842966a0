"""All that a run holds of a cluster is taken at once: while it waits it holds nothing, and logs that."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table

from raytf import liveness, procfs
from raytf.errors import ResourceError
from raytf.runtime import process_monitor, reservation
from raytf.runtime.reservation import Reservation
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")

EVALUATOR = {"evaluator 0": {"CPU": 1.0}}


@contextlib.contextmanager
def three_of_four_cpus():
    other = Reservation({})
    other.take(3, {"CPU": 1.0}, "PACK", None)
    try:
        yield other
    finally:
        other.release()


def groups():
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_waiting_run_holds_nothing_logs_what_it_waits_for_and_starts_later(monkeypatch, capfd):
    monkeypatch.setattr(reservation, "_PATIENCE_INTERVAL", 0.0)
    run = Reservation(EVALUATOR)
    with three_of_four_cpus() as other:
        run.ensure(1, {"CPU": 1.0}, "PACK", None)
        assert not run.wait(1.0)
        until(lambda: ray.available_resources().get("CPU") == 1)
        other.release()
        assert run.wait(30.0) and run.bundle_indices == {"evaluator 0": 1}
        assert run.ensure(1, {"CPU": 1.0}, "PACK", None) == run.group, "workers that start anew have it still"
    run.release()
    output = capfd.readouterr().err
    # what Ray counts as free may be a moment old
    assert re.search(
        r"needs 2 CPU at once \(1 worker\(s\), evaluator 0\), and \d of 4 CPU are free; waiting for", output
    )
    assert "the cluster has given the run its resources" in output
    until(lambda: not groups())


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_wait_that_ends_badly_leaves_no_group(monkeypatch, error):
    run = Reservation(EVALUATOR, seconds=1.0)
    with three_of_four_cpus():
        if error is not None:
            monkeypatch.setattr(Reservation, "_describe_missing", lambda _: (_ for _ in ()).throw(error()))
        with pytest.raises(error or ResourceError, match=None if error else "timeout after 1 s: the run needs 3 CPU"):
            run.take(2, {"CPU": 1.0}, "PACK", None)
    until(lambda: not groups())


def test_a_process_that_is_stopped_is_ended_and_one_that_computes_is_not():
    node = ray.get_runtime_context().get_node_id()
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    stopped = subprocess.Popen(["sleep", "1000"])
    try:
        watching = process_monitor.ProcessKiller(seconds=1.0)
        # as if on another node: an actor looks there
        watching._node = "elsewhere"
        for name, process in (("busy", busy), ("stopped", stopped)):
            watching.watch(name, process_monitor.ProcessLocation(node, "10.0.0.2", process.pid, None))
        stopped.send_signal(19)
        assert stopped.wait(60) == -9 and busy.poll() is None
        watching.close()
        assert list(watching.ended) == ["stopped"]
        assert f"its process {stopped.pid} on 10.0.0.2 is stopped by a signal" in watching.ended["stopped"]
        assert procfs.read_state(busy.pid).state in "RS"
    finally:
        for process in (busy, stopped):
            process.kill()
            process.wait()


def test_answering_process_is_not_checked():
    """The time of a process that was stopped, resumed and answered begins again."""
    node = ray.get_runtime_context().get_node_id()
    process = subprocess.Popen(["sleep", "1000"])
    try:
        with process_monitor.ProcessKiller(seconds=0.0) as watching:
            watching.watch("it", process_monitor.ProcessLocation(node, "here", process.pid, None))
            process.send_signal(19)
            until = time.monotonic() + 2.5 * liveness.POLL_INTERVAL
            while time.monotonic() < until:
                watching.mark_alive("it")
                time.sleep(0.2)
            assert process.poll() is None and not watching.ended
    finally:
        process.kill()
        process.wait()
