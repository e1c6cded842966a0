"""Pods of cluster/kubernetes as a node would run them: namespaces of this machine, the files' commands, users, mounts.

Each has an address, a name that no other pod knows, processes, a read-only root, /tmp and /dev/shm. The user is the
files', without rights but to read all files, as this machine's Python may be in the home of root.
"""

from __future__ import annotations

import contextlib
import pathlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil
import yaml

from cluster import namespaces
from tests import waiting

ROOT = pathlib.Path(__file__).parents[1]
SERVICE = "raytf-train-head-svc.default.svc.cluster.local"
# The mount points of `SETUP`'s root, in which the pod's program is started as the pod's user.
SETUP = """
set -e
root=$1 name=$2 hosts=$3 shared=$4 shm=$5 job=$6 cgroup=$7; shift 7
if [ "$cgroup" ]; then echo 0 > "$cgroup/cgroup.procs"; fi
hostname "$name"
mount -t tmpfs none "$root"
for path in /*; do
    case $path in /proc | /tmp | /opt | /shared | /lost+found | /old_root) continue ;; esac
    if [ -L "$path" ]; then cp -a "$path" "$root/"; continue; fi
    [ -d "$path" ] || continue
    mkdir "$root$path"; mount --rbind "$path" "$root$path"
done
mkdir -p "$root/proc" "$root/tmp" "$root/shared" "$root/opt/raytf/jobs"
mount -t proc none "$root/proc"
mount -t tmpfs -o mode=1777 none "$root/tmp"
mount -t tmpfs -o "mode=1777,size=$shm" none "$root/dev/shm"
mount --bind "$hosts" "$root/etc/hosts"
# no name server, which is known at once
mount --bind /dev/null "$root/etc/resolv.conf"
mount --bind "$shared" "$root/shared"
for part in raytf tests cluster; do cp -a "$PWD/$part" "$root/opt/raytf/"; done
cp "$PWD/cluster/kubernetes/drain.sh" "$root/opt/raytf/"
cp "$job" "$root/opt/raytf/jobs/digits.py"
for path in usr etc var root home work srv mnt media; do
    [ ! -d "$root/$path" ] || mount -o remount,bind,ro "$root/$path"
done
mount -o remount,ro "$root"
cd /
exec chroot "$root" "$@"
"""


@dataclass(frozen=True)
class Pod:
    """A pod that runs.

    Args:
        name: of the pod, and of its host.
        process: parent of the pod's first process.
        user: options of `setpriv`.
        environment: of the container.
    """

    name: str
    process: subprocess.Popen
    user: list[str]
    environment: dict[str, str]
    log: pathlib.Path

    def popen(self, command: Sequence[str], **options) -> subprocess.Popen:
        """Starts a command in the pod, as `kubectl exec`."""
        inside = ["nsenter", "-t", str(self.first().pid), "-m", "-u", "-n", "-p", "-r", "-w", *self.user, *command]
        return subprocess.Popen(inside, env=self.environment, text=True, **options)

    def first(self) -> psutil.Process:
        """The pod's first process, with which all of its others end."""
        (first,) = waiting.until(psutil.Process(self.process.pid).children)
        return first

    def run(self, command: Sequence[str], timeout: float = 300) -> str:
        """What a command in the pod prints, which must end with 0."""
        with self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as done:
            try:
                said, _ = done.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                done.kill()
                raise
        assert done.returncode == 0, said[-6000:]
        return said

    def raylet(self) -> psutil.Process:
        """The pod's raylet, seen from the host."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in found if process.name() == "raylet")

    def kill(self) -> None:
        """Ends all of it at once, as the loss of its node."""
        if self.process.poll() is None:
            self.first().kill()
        self.process.wait()


@dataclass
class Cluster:
    """The pods of a RayJob's cluster.

    Args:
        spec: `rayClusterSpec` of the file.
        folder: of what the test keeps.
        shared: folder that all pods have at /shared.
        job: script at the place of the file's.
        shm, user: size of /dev/shm, and the pods' user id.
        ipv6: whether the pods have IPv6 alone.
        cpu: share of a core that each pod may use, or None.
    """

    spec: dict
    folder: pathlib.Path
    shared: pathlib.Path
    job: pathlib.Path
    shm: str = "64m"
    user: int = 1000
    home: str = "/tmp"
    ipv6: bool = False
    cpu: float | None = None
    pods: list[Pod] = field(default_factory=list)
    hosts: list[namespaces.Host] = field(default_factory=list)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    cgroups: list[pathlib.Path] = field(default_factory=list)

    @contextlib.contextmanager
    def up(self, workers: Sequence[int]) -> Iterator[Cluster]:
        """Head and worker pods with these numbers of CPUs, until the block ends."""
        with namespaces.hosts(1 + len(workers), ipv6=self.ipv6) as self.hosts:
            try:
                head = self.spec["headGroupSpec"]["rayStartParams"]
                self._start("raytf-train-head-abcde", self._command("--head", head, "52365"))
                self._wait()  # as KubeRay's init container of workers
                group = self.spec["workerGroupSpecs"][0]["rayStartParams"]
                for i, cpus in enumerate(workers):
                    given = {"num-cpus": str(cpus)} | group
                    self._start(f"raytf-train-workers-{i}", self._command(f"--address={SERVICE}:6379", given, "52365"))
                self._wait()
                yield self
            finally:
                self.down()

    def down(self) -> None:
        """Ends all pods at once."""
        for pod in self.pods:
            pod.kill()
            shutil.rmtree(self.folder / f"root-{pod.name}", ignore_errors=True)
        for cgroup in self.cgroups:
            cgroup.rmdir()
        self.pods, self.cgroups = [], []

    def _wait(self) -> None:
        """Waits until Ray runs in all pods."""
        deadline = time.monotonic() + 300
        while waits := [pod for pod in self.pods if "will now block" not in (log := pod.log.read_text())]:
            assert waits[0].process.poll() is None and time.monotonic() < deadline, log[-3000:]
            time.sleep(0.1)

    @staticmethod
    def _command(role: str, params: dict[str, str], agent: str) -> str:
        """KubeRay's command of a container."""
        given = " ".join(f"--{name}={value}" for name, value in params.items())
        return f"ulimit -n 65536; ray start {role} --block {given} --dashboard-agent-listen-port={agent}"

    def _start(self, name: str, command: str) -> None:
        i, host = len(self.pods), self.hosts[len(self.pods)]
        inside = host.link.replace("rto", "rti")
        subprocess.run(
            ["ip", "-6" if self.ipv6 else "-4", "-n", host.name, "route", "add", "default", "dev", inside], check=True
        )
        root, file = self.folder / f"root-{name}", self.folder / f"hosts-{name}"
        root.mkdir()
        file.write_text(
            f"127.0.0.1 localhost\n::1 localhost\n{host.address} {name}\n{self.hosts[0].address} {SERVICE}\n"
        )
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--no-new-privs"]
        user += [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
        user += ["--bounding-set=-all,+dac_read_search"]
        address = "127.0.0.1" if i == 0 and not self.ipv6 else SERVICE
        environment = {
            "PATH": f"{pathlib.Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": "/opt/raytf",
            "HOME": self.home,
            "CUDA_VISIBLE_DEVICES": "-1",
            "RAY_ADDRESS": f"{address}:6379",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_agent_register_timeout_ms": "200000",  # a busy machine takes its time
        }
        if self.cpu is not None:
            self.cgroups.append(pathlib.Path("/sys/fs/cgroup/cpu", host.name))
            self.cgroups[-1].mkdir()
            (self.cgroups[-1] / "cpu.cfs_quota_us").write_text(str(int(self.cpu * 100_000)))
        cgroup = str(self.cgroups[-1]) if self.cgroups else ""
        set_up = [
            "bash",
            "-c",
            SETUP,
            "bash",
            str(root),
            name,
            str(file),
            str(self.shared),
            self.shm,
            str(self.job),
            cgroup,
        ]
        line = host.command(["unshare", "-m", "--uts", "--pid", "--fork", *set_up, *user])
        log = self.folder / f"{name}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*line, "bash", "-c", "--", command], cwd=ROOT, env=environment, stdout=out, stderr=out
            )
        self.pods.append(Pod(name, process, user, environment, log))


def rayjob(name: str = "train") -> dict:
    """The RayJob of a file of cluster/kubernetes."""
    return next(yaml.load_all((ROOT / "cluster" / "kubernetes" / f"{name}.yaml").read_text(), yaml.CSafeLoader))["spec"]
