"""What a script prints and how it ends, whatever processes it leaves; without Ray."""

import math
import os
import pathlib
import signal
import time
import types

import pytest

import raytf
from raytf import timeouts
from raytf.collectives import ring_token
from raytf.launch import launcher
from raytf.launch import runner as runner_module
from raytf.launch.runner import TaskLocation, TaskRunner
from raytf.launch.spec import LaunchSpec
from raytf.runtime import cores, ports, settings, shared_folders
from tests.waiting import until

LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
print(child.pid)
print('x' * 50 + '\\n', end='')
sys.stdout.write('no end')
{then}
"""


ROOT = str(pathlib.Path(raytf.__file__).parents[1])


@pytest.fixture
def runner(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "POLL_INTERVAL", 0.1)
    runner = TaskRunner()
    runner._location, runner._ports = TaskLocation("127.0.0.1:1", str(tmp_path)), settings.PORTS
    yield runner
    runner.stop(0.0)


def start(runner, tmp_path, text, frozen_s=math.inf, pinned=False):
    (tmp_path / "script.py").write_text(text)
    return runner.start(["script.py"], False, {"PYTHONPATH": ROOT}, ring_token.new_token(), frozen_s, pinned)


def follow(runner, number, seconds=30.0):
    """(lines of stdout, lines of stderr, how it ended)."""
    lines = {"stdout": [], "stderr": []}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for kind, value in runner.follow(number):
            if kind == "exit":
                return lines["stdout"], lines["stderr"], value
            lines[kind].append(value)
    raise AssertionError(f"no end; {lines}")


def test_a_restart_claims_no_further_port(runner, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    folder, allowed = shared_folders.describe_folder(str(tmp_path)), settings.Listening((31_915, 31_915))
    try:
        for _ in range(3):
            assert runner.reserve(folder, timeouts.get(), allowed).address == "127.0.0.1:31915"
    finally:
        ports.end_claims()


@pytest.mark.slow
def test_end_does_not_wait_for_processes_that_a_script_left(runner, tmp_path):
    out, _, end = follow(runner, start(runner, tmp_path, LEAVES.format(then="sys.exit(3)")))
    os.kill(int(out[0]), signal.SIGKILL)
    assert out[1:] == ["x" * 50, "no end"] and end.code == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_script_keeps_to_the_cores_that_are_claimed_for_it(runner, tmp_path, monkeypatch):
    text = "import os, sys\nprint(sorted(os.sched_getaffinity(0)), 'ray' in sys.modules)"
    everything = sorted(os.sched_getaffinity(0))
    others = [cores._claimed(core) for core in everything[1:]]  # by this test, or by somebody else already
    try:
        with monkeypatch.context() as patch:
            patch.setattr(cores, "_name", lambda core: f"\0raytf_test/{os.getpid()}/{core}")
            patch.setattr(cores, "choose_cores", lambda free, count, levels: everything[:1])
            assert cores.claim_cores(1)
        (line,), _, _ = follow(runner, start(runner, tmp_path, text, pinned=True))
        assert line == f"{everything[:1]} False"
        (line,), _, _ = follow(runner, start(runner, tmp_path, text))
        assert line == f"{everything} False" and not cores.own_cores()
    finally:
        cores.release_cores()
        cores._close(others)


@pytest.mark.slow
def test_the_end_of_one_is_not_taken_for_that_of_the_next(runner, tmp_path):
    first = start(runner, tmp_path, LEAVES.format(then="sys.stdout.flush()\nimport time\ntime.sleep(60)"))
    child = int(runner.follow(first)[0][1])
    try:
        runner.stop(5.0)
        second = start(runner, tmp_path, "import time\ntime.sleep(2.5)\nprint('second')")
        assert runner.follow(first) == [], "who still follows the first gets nothing of the second"
        out, _, end = follow(runner, second)
        assert (out, end.code) == (["second"], 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_restart_ends_what_is_left_of_the_one_before(runner, tmp_path):
    first = start(runner, tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    pid = int(runner.follow(first)[0][1])
    assert follow(runner, start(runner, tmp_path, ""))[2].code == 0
    assert not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_all_lines_come_though_nobody_follows_for_a_while(runner, tmp_path):
    number = start(runner, tmp_path, "for i in range(30_000): print(i)\nraise SystemExit('why')")
    while not runner._script.events.full():
        time.sleep(0.01)
    time.sleep(2.5)  # longer than is waited for what a script leaves
    out, error, end = follow(runner, number)
    assert out == [str(i) for i in range(30_000)] and error == ["why"] and (end.code, end.error) == (1, "why")


def test_stopped_script_is_ended_and_reported(runner, tmp_path):
    text = "import os, signal\nprint(os.getpid(), flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('on')"
    number = start(runner, tmp_path, text, frozen_s=0.5)
    out, _, end = follow(runner, number)
    assert len(out) == 1 and end.status == 128 + signal.SIGSTOP and not end.is_consequence()
    assert end.reason().startswith(f"frozen: its process {out[0]} on 127.0.0.1 is stopped by a signal (SIGSTOP?), for ")


def test_script_that_resumes_in_time_is_left_alone(runner, tmp_path):
    text = "import os, signal\nprint(os.getpid(), flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('on')"
    number = start(runner, tmp_path, text, frozen_s=60)
    pid = int(runner.follow(number)[0][1])
    while runner.stopped_exit() is None:
        time.sleep(0.01)
    assert "stopped by a signal" in runner.stopped_exit().reason()
    last_check = runner._script._last_check
    while runner._script._last_check == last_check:
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)
    out, _, end = follow(runner, number)
    assert (out, end.code) == (["on"], 0)


@pytest.mark.slow
def test_a_script_that_closes_its_pipes_is_followed_to_its_end(runner, tmp_path):
    number = start(runner, tmp_path, "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1)\nos._exit(4)")
    assert follow(runner, number)[2].code == 4


STANDS = """
import threading

def stands_here():
    print("ready", flush=True)
    threading.Event().wait(60)

stands_here()
"""


def test_script_reports_its_activity_while_it_runs(runner, tmp_path):
    """A stopped one gives no answer; when it resumes, its late one is not taken for that to the next question."""
    number = start(runner, tmp_path, STANDS)
    while ("stdout", "ready") not in runner.follow(number):
        pass
    script = runner._script
    script._request_pipe.settimeout(20.0)
    assert runner.snapshot()["phase"] == "begin" and "in stands_here" in runner.stack()
    os.kill(script.pid, signal.SIGSTOP)
    script._request_pipe.settimeout(0.5)
    until(lambda: runner.snapshot() is None)  # its threads stop one after the other
    os.kill(script.pid, signal.SIGCONT)
    script._request_pipe.settimeout(20.0)
    assert "in stands_here" in runner.stack() and runner.snapshot()["step"] == 0


def test_the_wait_for_resources_names_what_holds_them(monkeypatch):
    lines, clock, answers = [], iter(range(0, 1000, 30)), iter((False, True))
    group = types.SimpleNamespace(wait=lambda seconds: next(answers))
    monkeypatch.setattr(launcher, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(launcher, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(launcher.ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(launcher.logger, "info", lines.append)
    monkeypatch.setattr(launcher.resources, "check_bundles", lambda *_: None)
    monkeypatch.setattr(launcher.resources, "placed_actor", lambda *_, **__: None)
    monkeypatch.setattr(launcher.resources, "held_by_others", lambda: "3 of 4 CPUs are held")
    launcher.ScriptCluster(LaunchSpec(script=__file__, num_workers=2))._open()
    needs = "2 task(s): 2 CPU, 1 free"
    assert lines == [
        f"waiting for the cluster's resources ({needs}): until other work ends or nodes come; 3 of 4 CPUs are held"
    ]
