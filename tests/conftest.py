"""Fixtures of all tests: one Ray cluster for many, and a check that a test cleans up."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# Figures of Ray's own, for a Prometheus that no test reads: each process of a node would send them all the time. Ray's
# log monitor lists a node's log files ten times a second while there are fewer than a threshold, else twice.
os.environ |= {
    "RAY_enable_metrics_collection": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "METRICS_RECORD_INTERVAL_S": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
}

import hypothesis
import pytest

# A shell that starts a program in the background has it ignore SIGINT, and all that the program starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is shared takes its time: no test asserts an absolute one. And a gate gives the same answer every time.
hypothesis.settings.register_profile("raytf", deadline=None, derandomize=True)
hypothesis.settings.load_profile("raytf")
# What Ray, TensorFlow and pytest set in this process by design.
_FREE_VARIABLES = (
    *("PYTEST_", "RAY_", "TF2_BEHAVIOR", "TF_", "KMP_", "GRPC_", "PYTHON", "COLUMNS", "TPU_", "OMP_"),
    *("HDF5_", "ENABLE_RUNTIME_", "CRC32C_SW_MODE"),
)
# Tests of what runs from the start in what others leave of the machine; they come last, in this order.
_LAST = ("processes/test_parity.py", "processes/test_resume.py")
# What `make lint` and `make test` run of these, unless it is marked as slow; `make test-all` runs all else.
_GATE = ("tests/core/", "tests/lint/", "tests/unit/", "tests/processes/test_parity.py")
# Whose runs wait so many times as long before they take another way: the machine may be busy. The doctor's time is an
# argument, of which its steps take their parts.
_PATIENT, _IMPATIENT, _TIMES = ("tests/cluster/", "tests/core/"), "tests/cluster/test_doctor.py", 5
# Files of which each takes minutes. They come first, so that at the end no process of pytest waits for another.
_LONG = (
    *("cluster/test_graceful_stop.py", "jobs/test_run.py", "cluster/test_sweep.py", "cluster/test_parameter_server.py"),
    *("jobs/test_output.py", "cluster/test_job_submit.py", "cluster/test_fit.py", "cluster/test_hosts.py"),
)
# Ray gives a node 30 s to start, which a busy machine may not do at once.
_STARTS = 4
_BEHIND_KEY = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the gate, and puts those last for whose background processes no other test is to wait."""
    cases = collections.Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        sampled = item.get_closest_marker("sampled")
        passed_over = sampled is not None and cases[function] % sampled.args[0]
        cases[function] += 1
        if item.nodeid.startswith(_GATE) and item.get_closest_marker("slow") is None and not passed_over:
            item.add_marker("gate")
    order = {name: i - len(_LONG) for i, name in enumerate(_LONG)} | {name: i + 1 for i, name in enumerate(_LAST)}
    items.sort(key=lambda item: order.get(_file(item.nodeid), 0))


def _file(nodeid: str) -> str:
    return "/".join(nodeid.partition("::")[0].split("/")[-2:])


def pytest_collection_finish(session):
    """Starts what runs next to the other tests, but in one of several processes of pytest: their first one does."""
    config = session.config
    gc.freeze()  # what was imported stays: nothing is to look through it again and again for what may go
    if not (hasattr(config, "workerinput") or config.option.collectonly):
        _start_behind(config, [item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Sends a process of pytest-xdist the folder of those results."""
    node.workerinput["behind"] = _behind(node.config).folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    _start_behind(node.config, ids)


def _behind(config):
    from tests.processes.behind import Behind

    if _BEHIND_KEY not in config.stash:
        config.stash[_BEHIND_KEY] = Behind()
    return config.stash[_BEHIND_KEY]


def _start_behind(config, ids) -> None:
    collected = {_file(nodeid) for nodeid in ids}
    wanted = [name for name in _LAST if name in collected]
    if not wanted or _behind(config).started:
        return
    from tests.processes import groups, resume_groups

    kinds = dict(zip(_LAST, (groups.parity_stages, resume_groups.stages), strict=True))
    _behind(config).start({name: kinds[name] for name in wanted}, ids)


def pytest_sessionfinish(session):
    """Ends what runs next to the tests."""
    if (behind := session.config.stash.get(_BEHIND_KEY, None)) is not None:
        behind.end()


def pytest_unconfigure(config):
    """Ends a pytest that cannot end, and shows what it waits for: CI would wait for it until its own limit.

    One of pytest-xdist's processes may wait for the other one's tests."""
    faulthandler.dump_traceback_later(1800 if hasattr(config, "workerinput") else 120, exit=True)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Fails a test that leaks environment variables or threads; TF_CONFIG is the dangerous one."""
    before, running = dict(os.environ), set(threading.enumerate())
    if (keras := sys.modules.get("keras")) is not None:
        keras.config.set_floatx("float32")  # a model of an earlier test may have been built for float64 in this process
        from keras.src.backend.common import global_state

        global_state.set_global_attribute("dtype_policy", None)  # as it is before one is asked for: it follows floatx
    yield
    changed = {k for k in before.keys() ^ os.environ.keys() if not k.startswith(_FREE_VARIABLES)}
    changed |= {k for k in before.keys() & os.environ.keys() if before[k] != os.environ[k] and "PYTEST" not in k}
    changed |= {k for k in ("TF_CONFIG", "TF_USE_LEGACY_KERAS") if before.get(k) != os.environ.get(k)}
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    threads = []
    for thread in set(threading.enumerate()) - running:
        if not thread.daemon or "_follow" in thread.name:  # pytest could not end before it does, or it is raytf's
            thread.join(30)
            threads += [thread.name] * thread.is_alive()
    assert not threads, f"the test left threads running: {threads}"


@pytest.fixture(scope="module", autouse=True)
def patience(request):
    """Deadlines that a busy machine keeps, where clusters are real: which way a run takes is not for load to say."""
    with contextlib.ExitStack() as stack:
        if request.node.nodeid.startswith(_PATIENT) and request.node.nodeid != _IMPATIENT:
            from raytf import testing

            stack.enter_context(testing.scale_timeouts(_TIMES))
        yield


@pytest.fixture
def set_timeouts(patience):
    """set_timeouts(ring_join=1.0) sets deadlines by name until the test ends; see `raytf.timeouts`."""
    from raytf import timeouts

    before = timeouts.get()
    yield lambda **seconds: timeouts.set_current(dataclasses.replace(timeouts.get(), **seconds))
    timeouts.set_current(before)


@pytest.fixture(scope="session", autouse=True)
def claims_of_ports():
    """Closes those that this process has made: they end with it, and Python warns of what nobody closed."""
    yield
    if (ports := sys.modules.get("raytf.runtime.ports")) is not None:
        ports.end_claims()


@pytest.fixture(autouse=True)
def gives_back(request):
    """Fails a test that leaves CPUs of the common cluster taken: the next would wait for them, until its own limit."""
    yield
    if "ray_cluster" not in request.fixturenames:
        return
    import ray
    from ray.util.placement_group import placement_group_table

    from raytf.compat import ray_core
    from raytf.fitting import warm

    if warm.has_group():  # they give it back when somebody wants it
        return

    deadline = time.monotonic() + 60
    while ray.is_initialized() and (free := ray.available_resources().get("CPU", 0)) < ray.cluster_resources()["CPU"]:
        if time.monotonic() > deadline:
            groups = [its for its in placement_group_table().values() if its["state"] != "REMOVED"]
            actors = [(its.name, its.class_name, its.pid) for its in ray_core.living_actors()]
            pytest.fail(f"the test left {free} CPUs free; placement groups: {groups}; actors: {actors}")
        time.sleep(0.1)


@pytest.fixture(scope="session")
def behind(request):
    """The results of the processes of `_LAST`: a `Results`."""
    from tests.processes.behind import Results

    given = getattr(request.config, "workerinput", None)  # of a process of pytest-xdist
    return Results(given["behind"] if given else _behind(request.config).folder)


@pytest.fixture(scope="session")
def ray_cluster():
    """One local Ray for all tests that need no cluster of their own: four CPUs, so that three workers fit."""
    import psutil
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # four idle processes for each driver
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves workers a hundredth of a machine that others use
        _start(ray)
        yield ray
    processes = psutil.Process().children(recursive=True)
    ray.shutdown()
    _wait_gone(processes)


def _start(ray) -> None:
    for left in reversed(range(_STARTS)):
        try:
            ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise


def _wait_gone(processes, timeout=120):
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=timeout)
    assert not alive, f"processes outlive the cluster: {[p.name() for p in alive if p.is_running()]}"
