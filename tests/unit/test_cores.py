"""Cores that workers of a host claim: none has two, and the end of a process gives them back."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from raytf.runtime import cores
from raytf.storage.snapshots import SnapshotWriter

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)

# Claims cores, prints which, and obeys its input: "keep", "mask" of its threads, "release".
CHILD = """
import os, sys, threading
from raytf.runtime import cores

cores._name = lambda core: f"\\0raytf_test/{sys.argv[1]}/{core}"
cores._DOOR = f"\\0raytf_test/{sys.argv[1]}"
cores._CHECK_INTERVAL = 0.1
os.sched_setaffinity(0, set(map(int, sys.argv[2].split(","))))
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    word, _, count = line.strip().partition(" ")
    if word == "claim":
        print(cores.claim_cores(int(count)), sorted(cores.own_cores()), flush=True)
    elif word == "mask":
        masks = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
        print(sorted(masks), flush=True)
    else:
        {"keep": cores.enforce_cores, "release": cores.release_cores}[word]()
        print("done", flush=True)
"""


class Child:
    """A process that claims cores, in a space of names of the test's own."""

    def __init__(self, space, allowed):
        mask = ",".join(map(str, allowed))
        command = [sys.executable, "-c", CHILD, space, mask]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def tell(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().strip()

    def ask(self, text):
        self.tell(text)
        return self.answer()

    def sees(self, masks):
        """Waits until its threads may use these, and returns what they may."""
        until = time.monotonic() + 20
        while (found := self.ask("mask")) != str(masks) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def two(request):
    """Two cores of this machine."""
    return sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def start(two):
    children = []
    space = f"{os.getpid()}_{time.monotonic_ns()}"
    with contextlib.ExitStack() as stack:

        def start(count):
            new = [Child(space, two) for _ in range(count)]
            for child in new:
                stack.callback(child.end)
            children.extend(new)
            return [child.ready() for child in new]

        yield start


def test_two_processes_have_a_core_each_and_a_third_none_until_one_dies(start, two):
    a, b, c = start(3)
    for child in (a, b, c):  # at the same time
        child.tell("claim 1")
    answers = [child.answer() for child in (a, b, c)]
    assert sorted(answers) == sorted([f"True [{two[0]}]", f"True [{two[1]}]", "False []"])
    has = [child for child, text in zip((a, b, c), answers, strict=True) if text.startswith("True")]
    (without,) = {a, b, c} - set(has)
    own = [(int(text[6:-1]),) for text in answers if text.startswith("True")]
    for child, its in zip(has, own, strict=True):
        child.ask("keep")
        assert child.ask("mask") == str([its])
    assert without.ask("mask") == str([tuple(two)])
    has[0].end()  # by SIGKILL
    assert has[1].sees([tuple(two)]) == str([tuple(two)])  # nobody else has the other one
    assert without.ask("claim 1") == f"True {list(own[0])}"
    without.ask("keep")
    assert has[1].sees([own[1]]) == str([own[1]])
    has[1].ask("release")
    assert has[1].ask("mask") == str([tuple(two)])
    assert without.ask("claim 2") == f"True {two}"  # instead of what it had


def test_claim_of_more_cores_than_are_free_gets_none_and_leaks_none(start, two):
    a, b = start(2)
    assert a.ask("claim 3") == "False []"
    assert a.ask("claim 1").startswith("True")
    assert b.ask("claim 2") == "False []"
    assert b.ask("claim 1").startswith("True")


@pytest.mark.slow
def test_process_that_hangs_within_a_claim_is_not_waited_for_for_long(start, two):
    (a,) = start(1)
    space = a.process.args[3]
    with cores.socket.socket(cores.socket.AF_UNIX) as door:
        door.bind(f"\0raytf_test/{space}")
        door.listen()
        assert a.ask("claim 2") == f"True {two}"


def test_threads_that_a_user_has_put_elsewhere_are_left_alone(monkeypatch, two):
    monkeypatch.setattr(cores, "_name", lambda core: f"\0raytf_test/{os.getpid()}/{core}")
    before, ended, put = os.sched_getaffinity(0), threading.Event(), threading.Event()

    def elsewhere():
        os.sched_setaffinity(0, {two[1]})
        put.set()
        ended.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert put.wait(20)
    others = cores._claimed(two[1])
    try:
        assert cores.claim_cores(1)
        cores.enforce_cores()
        assert two[1] not in os.sched_getaffinity(0)
        assert os.sched_getaffinity(thread.native_id) == {two[1]}
    finally:
        cores.release_cores()
        others.close()
        ended.set()
        thread.join()
    assert os.sched_getaffinity(0) == before


def test_the_process_that_writes_checkpoints_may_use_all(tmp_path, monkeypatch, two):
    import pyarrow.fs

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {two[0]})
    try:
        writer = SnapshotWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"), cpus=frozenset(before))
        try:
            writer.write("step_000000000001", {"state.json": "{}"})
            writer.finish(60.0)
            assert os.sched_getaffinity(writer.pid) == before
        finally:
            writer.close()
    finally:
        os.sched_setaffinity(0, before)


def test_on_a_host_where_one_has_none_nobody_keeps_to_its_own():
    addresses = ["10.0.0.1:20000", "10.0.0.2:20000", "10.0.0.1:20001", "[fe80::1]:20000"]
    assert cores.agree_on_pinning(addresses, [True, True, False, True]) == [False, True, False, True]


# Two sockets with two caches each of two physical cores with two threads: the second thread of core c is c + 8.
WIDE = {
    core: [
        frozenset({core % 8, core % 8 + 8}),
        frozenset(c for c in range(16) if c % 8 // 2 == core % 8 // 2),
        frozenset(c for c in range(16) if c % 8 // 4 == core % 8 // 4),
    ]
    for core in range(16)
}


@pytest.mark.parametrize(
    ("taken", "count", "chosen"),
    [
        ((), 1, {0}),
        ((), 2, {0, 8}),  # a physical core
        ((), 4, {0, 8, 1, 9}),  # that share a cache
        ((), 3, {0, 8, 1}),
        ((0, 8), 2, {4, 12}),  # of the socket that has more left
        ((0, 8, 1, 9, 4), 2, {6, 14}),
        ((0, 8), 4, {4, 12, 5, 13}),
        ((0, 1, 2, 3, 4, 5), 4, {6, 14, 7, 15}),
        ((0, 1, 2, 3), 8, {4, 12, 5, 13, 6, 14, 7, 15}),
        ((0,), 1, {4}),  # nobody computes on its other thread
        (range(1, 16), 1, {0}),
        ((), 16, set(range(16))),
    ],
)
def test_cores_that_share_caches_are_for_one_worker(taken, count, chosen):
    free = frozenset(range(16)) - set(taken)
    assert set(cores.choose_cores(free, count, WIDE)) == chosen


def test_linux_description_of_a_core_is_read(tmp_path):
    files = {
        "topology/thread_siblings_list": "3,11\n",
        "cache/index0/shared_cpu_list": "3,11\n",
        "cache/index3/shared_cpu_list": "0-3,8-11\n",
        "node0/cpulist": "0-7,8-15\n",
    }
    for name, text in files.items():
        (tmp_path / "cpu3" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cpu3" / name).write_text(text)
    found = cores.sharing_levels(3, tmp_path)
    assert sorted(map(len, found)) == [2, 8, 16] and frozenset({3, 11}) in found
    assert cores.sharing_levels(4, tmp_path) == []


SPINS = """
import os
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: {cores}])
import tensorflow as tf
from raytf.runtime.settings import WorkerSetup
from raytf.worker import context
with context.prepared(WorkerSetup()):
    assert int(tf.add(1, 1)) == 2
    print(tf.__internal__.eager_context.get_config().experimental.disable_thread_spinning)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_idle_threads_of_a_process_with_one_core_sleep_at_once(two, count):
    ran = subprocess.run([sys.executable, "-c", SPINS.format(cores=count)], capture_output=True, text=True, timeout=240)
    assert ran.stdout.split()[-1:] == [str(count == 1)], ran.stderr
