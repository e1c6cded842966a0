"""Worker groups whose workers die, stop, or only take their time; and the monitor that distinguishes these."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raytf
from raytf import liveness
from raytf.runtime import process_monitor
from raytf.runtime.process_monitor import ProcessMonitor
from raytf.runtime.settings import WorkerSetup
from raytf.train.worker_group import TrialRun, WorkerGroup, WorkerGroupLostError

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


class DiesWhileItOpens:
    """Settings that end worker 1 when TensorFlow is prepared; worker 0 then waits for it."""

    @property
    def intra_op_threads(self):
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            os._exit(1)
        return 1

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(raytf.TensorflowConfig(), name)


def takes_its_time(session, config):
    """Worker 1 holds Python's lock for a while, reports, and stops."""
    if session.rank == 1:
        ctypes.PyDLL(None).sleep(6)
    session.report({"loss": 1.0}, None)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    session.report({"loss": 0.5}, None)


class Leader:
    """A stub for a trial's actor."""

    def __init__(self):
        process_monitor._ALIVE_INTERVAL, liveness.STOPPED_INTERVAL, liveness.POLL_INTERVAL = 0.5, 2.0, 0.5

    def open(self, tensorflow_config) -> str:
        try:
            self._group = WorkerGroup(tensorflow_config, {"CPU": 1}, 2, {})
        except WorkerGroupLostError as error:
            return str(error)
        return ""

    def train(self, loop) -> tuple[dict | None, str]:
        self._group.begin(TrialRun(train=loop, config={}, name="trial"))
        metrics = None
        try:
            metrics = self._group.continue_trial()[0]
            self._group.continue_trial()
        except WorkerGroupLostError as error:
            return metrics, str(error)
        finally:
            self._group.close(well=False)
        return metrics, ""


@pytest.fixture
def leader():
    group = placement_group([{"CPU": 1}] * 2)
    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    actor = ray.remote(Leader).options(num_cpus=0, scheduling_strategy=place).remote()
    yield actor
    ray.kill(actor)
    remove_placement_group(group)


def test_a_worker_that_dies_while_its_group_opens(leader):
    assert "worker 1 of the trial was lost" in ray.get(
        leader.open.remote(WorkerSetup(config=DiesWhileItOpens())), timeout=120
    )


def test_a_stopped_worker_is_named_and_one_that_is_busy_is_not(leader):
    assert ray.get(leader.open.remote(WorkerSetup()), timeout=120) == ""
    metrics, message = ray.get(leader.train.remote(takes_its_time), timeout=120)
    assert metrics == {"loss": 1.0}
    assert re.fullmatch(r"worker 1 on \S+ is frozen: its process \d+ is stopped by a signal .*, for \d+ s", message)


def one_does_not_come(session, config):
    """Worker 0 waits in an exchange for worker 1, which waits for itself."""
    import numpy as np

    from raytf.collectives import communicator

    if session.rank == 1:
        threading.Event().wait()
    communicator.sum_over_workers(raytf.get_strategy(), [np.ones(1)])


def test_a_worker_that_does_not_come_to_an_exchange_is_named_with_its_stack(leader):
    config = raytf.TensorflowConfig(hang_timeout_s=2, first_step_timeout_s=2)
    assert ray.get(leader.open.remote(WorkerSetup(config=config)), timeout=120) == ""
    _, message = ray.get(leader.train.remote(one_does_not_come), timeout=120)
    assert re.match(
        r"worker 1 hangs: its process \d+ on \S+ does not come to the exchange that others are in since \d+ s; "
        r"worker 0 waits for it since step 1\n",
        message,
    )
    # reported by the worker, or seen from outside where that takes long
    outside = r" Event\.wait \(threading\.py:\d+\)\n +one_does_not_come \((?:\S*/)?test_worker_group\.py:\d+\)"
    assert "threading.Event().wait()" in message or re.search(outside, message), message


class Sleeper:
    def place(self):
        return process_monitor.current_process()


def test_hosts_are_looked_at_by_an_actor_there(set_timeouts):
    """As if this node were another one: a stopped process is seen, and a watcher that does not answer is none."""
    now = [0.0]
    actor = ray.remote(Sleeper).options(num_cpus=0).remote()
    place = ray.get(actor.place.remote())
    monitor = ProcessMonitor(clock=lambda: now[0])
    monitor._node = ""
    monitor.watch(3, place)

    def until(done, waits=True):
        """Looks; seconds pass only while no answer is waited for, or where that is to last."""
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end
            host = monitor._hosts.get(place.node)
            now[0] += 1 if host is None or host._pending is None or not waits else 0
            if found := monitor.check():
                return found
            time.sleep(0.01)

    until(lambda: monitor._watched[3].seen)
    assert monitor.stopped_process() is None
    os.kill(place.pid, signal.SIGSTOP)
    (found,) = until(lambda: False)
    assert found.keys == (3,) and found.location == place and found.how.startswith("stopped by a signal")
    assert monitor.stopped_process() is not None
    os.kill(place.pid, signal.SIGCONT)
    monitor.mark_alive(3)
    until(lambda: monitor._watched[3].seen.state != "T")
    watcher = ray.get(monitor._hosts[place.node]._actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(watcher, signal.SIGSTOP)
    set_timeouts(host_silent=20.0)
    (found,) = until(lambda: False, waits=False)
    assert (found.keys, found.seen, found.how) == ((3,), None, "has not answered for 20 s (timeout)")
    ray.kill(actor)
    monitor.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(watcher, signal.SIGKILL)
