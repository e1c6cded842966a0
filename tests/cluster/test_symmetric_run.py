"""cluster/slurm.sh and cluster/ssh.sh on three hosts: network namespaces with processes, /tmp and ssh of their own.

`srun`, `scontrol` and `ssh` are scripts of this test, so that no Slurm is needed. Processes have namespaces, as
`ray stop`, which ends what `ray symmetric-run` has started, ends every Ray process that it sees.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from cluster import namespaces
from tests.waiting import until

WHY_NOT = namespaces.available()
ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
ONE_CPU = '{"CPU": 1}'
# A command in a host with processes and a /tmp of its own; the shell that starts it stays as their first.
HOST = "unshare -m --pid --fork --kill-child --mount-proc bash -c 'mount -t tmpfs none /tmp; \"$@\"; exit $?' bash"
# What a host does that others reach: it runs a line at a time, which it is given with the environment of who gives it.
SERVER = """
while read -r line < "$FOLDER/ask.$0"; do
    bash -c "$line" > "$FOLDER/out.$0" 2>&1 &
    until [ -e "$FOLDER/over" ] || ! kill -0 $! 2> /dev/null; do sleep 0.2; done
    if [ -e "$FOLDER/over" ]; then kill -9 -1; fi
done
"""
SSH = """#!/bin/bash
name=$(grep "^$1 " "$FOLDER/names" | cut -d' ' -f2)
echo "$2" > "$FOLDER/ask.$name"
exec cat "$FOLDER/out.$name"
"""
# Starts a task on each host. As Slurm's srun with --wait=10 it kills the others 10 s after the first task that ends;
# its exit code is then that of the signal (src/srun/launch.c), whatever that of the first task was.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export -p > "$FOLDER/environment"
node=0
for address in $OTHERS; do
    node=$((node + 1))
    ssh $address ". $FOLDER/environment; SLURM_NODEID=$node $(printf '%q ' "$@")" &
done
SLURM_NODEID=0 "$@" &
wait -n; code=$?
for _ in $(seq 100); do [ "$(jobs -r)" ] && sleep 0.1; done
[ "$(jobs -r)" ] && code=137
kill -9 $! 2> /dev/null
touch "$FOLDER/over"
wait
rm "$FOLDER/over"
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then tr , '\\n' <<< "$3"; else echo "$2" > "$FOLDER/requeued"; fi
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Starts a script on the first of three hosts; the folder that they share; the hosts."""
    with three_hosts(tmp_path_factory.mktemp("shared")) as found:
        yield found


@contextlib.contextmanager
def three_hosts(folder: pathlib.Path, ipv6: bool = False):
    """What `started` gives."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "ssh": SSH}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "home" / ".ray").mkdir(parents=True)
    (folder / "home" / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    processes = []
    with namespaces.hosts(3, ipv6=ipv6) as hosts:
        (folder / "names").write_text("".join(f"{host.address} {host.name}\n" for host in hosts))
        environment = os.environ | {
            "PATH": f"/mnt:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": "/mnt/home",
            "FOLDER": "/mnt",
            "SLURM_JOB_NODELIST": ",".join(host.address for host in hosts),
            "SLURM_JOB_ID": "7",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 * 2**20),
            "RAY_agent_register_timeout_ms": "200000",  # a busy machine takes its time
            "RAY_OVERRIDE_RESOURCES": ONE_CPU,  # by ssh Ray counts the cores of a host, here those of the machine
        }
        addresses = " ".join(host.address for host in hosts)
        inside = f'mount --bind {folder} /mnt; {HOST} "$@"'
        for host in hosts[1:]:
            for name in ("ask", "out"):
                os.mkfifo(folder / f"{name}.{host.name}")
            command = host.command(["unshare", "-m", "bash", "-c", inside, "bash", "bash", "-c", SERVER, host.name])
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))

        def start(script: str, name: str, nodes: int = 3, workers: str = "2"):
            inside = f'mount --bind {folder} /mnt; {HOST} "$@"'
            job = [*(["bash", str(ROOT / "cluster" / script)]), *([addresses] if script == "ssh.sh" else [])]
            job += ["python", "-m", "tests.cluster.ended_job", "/mnt", name, workers]
            command = hosts[0].command(["unshare", "-m", "bash", "-c", inside, "bash", *job])
            own = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "2" if nodes == 1 else "1"}
            if nodes == 1:
                own["RAY_OVERRIDE_RESOURCES"] = "{}"
            own |= {"OTHERS": " ".join(host.address for host in hosts[1:nodes])}
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes.append(process)
            return process

        try:
            yield start, folder, hosts
        finally:
            for process in processes:
                process.kill()
                process.wait()


def script_of(process) -> psutil.Process:
    """The shell that runs the script."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended has no command
            words = child.cmdline()
            if words[:1] == ["bash"] and words[1:] and words[1].endswith(("slurm.sh", "ssh.sh")):
                return child
    raise AssertionError("no shell runs the script")


def steps(folder, name):
    path = folder / f"{name}_0.txt"
    return [tuple(map(int, line.split()[1:3])) for line in path.read_text().splitlines()] if path.exists() else []


def finished(process, code):
    out, _ = process.communicate(timeout=400)
    assert process.returncode == code, out[-6000:]
    return out


def held(job, folder, name):
    """Blocks until a run waits after the step that its file names."""
    until(lambda: steps(folder, name)[-1:] == [(1, 4)], job)


def raylet_of(host) -> psutil.Process | None:
    """The raylet in a host's network namespace, or None."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            process = psutil.Process(int(pid))
            if process.name() == "raylet":
                return process
    return None


def weights(folder, name):
    with np.load(folder / f"{name}.npz") as file:
        return [file[key] for key in file]


def nodes_of(folder, name) -> set[str]:
    """Ray's ids of the nodes on which two workers have made steps."""
    return {line.split()[0] for i in range(2) for line in (folder / f"{name}_{i}.txt").read_text().splitlines()}


@pytest.fixture(scope="module")
def undisturbed(started):
    """The run by plain ssh, to its end, with a worker on each of two hosts."""
    start, folder, _ = started
    finished(start("ssh.sh", "quiet"), 0)
    assert len(steps(folder, "quiet")) == 3 * 14 and len(nodes_of(folder, "quiet")) == 2
    return weights(folder, "quiet")


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_requeued_slurm_job_resumes_at_the_next_step(started, nodes, request):
    """The signal comes in the second epoch; no step is lost, and none is made twice."""
    start, folder, _ = started
    name = f"run{nodes}"
    (folder / f"{name}_hold").write_text("1 4")
    job = start("slurm.sh", name, nodes)
    held(job, folder, name)
    script_of(job).send_signal(signal.SIGUSR1)
    out = finished(job, 143)
    assert (folder / "requeued").read_text().strip() == "7", out
    (folder / "requeued").unlink()
    finished(start("slurm.sh", name, nodes), 0)
    assert steps(folder, name) == [(epoch, batch) for epoch in range(3) for batch in range(14)]
    assert not (folder / "requeued").exists()
    if nodes == 3:
        for left, right in zip(weights(folder, name), request.getfixturevalue("undisturbed"), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-9)


def test_a_cancelled_slurm_job_stops_after_its_step_and_is_not_queued_again(started):
    start, folder, _ = started
    (folder / "cancelled_hold").write_text("1 4")
    job = start("slurm.sh", "cancelled", nodes=1)
    held(job, folder, "cancelled")
    script_of(job).send_signal(signal.SIGTERM)
    finished(job, 143)
    assert not (folder / "requeued").exists()


def test_a_slurm_node_whose_ray_ends_starts_it_again(started):
    """The job continues: the others train, and the node comes back."""
    start, folder, hosts = started
    (folder / "lost_hold").write_text("1 4\n1 6")  # the second one if the chief was lost, after step (1, 4)
    job = start("slurm.sh", "lost", workers="1-3")
    held(job, folder, "lost")
    first = raylet_of(hosts[1])
    first.kill()
    until(lambda: (again := raylet_of(hosts[1])) is not None and again.pid != first.pid, job)
    (folder / "lost_hold").write_text("")
    finished(job, 0)
    assert steps(folder, "lost")[-1] == (2, 13)


def test_a_command_by_ssh_that_is_stopped_is_resumed_by_the_same_line(tmp_path):
    """On hosts with IPv6 alone, with a worker on each of two; no step is lost, and none is made twice."""
    with three_hosts(tmp_path, ipv6=True) as (start, folder, _):
        (folder / "stopped_hold").write_text("1 4")
        job = start("ssh.sh", "stopped")
        held(job, folder, "stopped")
        script_of(job).send_signal(signal.SIGTERM)
        finished(job, 143)
        assert len(nodes_of(folder, "stopped")) == 2
        finished(start("ssh.sh", "stopped"), 0)
        assert steps(folder, "stopped") == [(epoch, batch) for epoch in range(3) for batch in range(14)]
