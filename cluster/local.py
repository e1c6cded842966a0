"""Start and end a Ray cluster of several nodes on this one machine, to try what needs a cluster.

python cluster/local.py up --nodes 3 --cpus 2
python cluster/local.py status
python cluster/local.py down

A node is a `ray start --block` with folders and ports of its own, so that several clusters and a `ray start` of the
user do not meet. `ray stop` would end every Ray process of the machine; `down` ends those of one cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import itertools
import json
import os
import pathlib
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil

from raytf.errors import ConfigError, RaytfError

if TYPE_CHECKING:
    from cluster.namespaces import Host

STATE = "cluster.json"
# Every process of a cluster inherits this variable; its value is the cluster's own.
MARK = "RAYTF_LOCAL_CLUSTER"
# Ray's own default, 30 % of the machine's memory, would be promised once for each node.
OBJECT_STORE_BYTES = 512 * 2**20
# A Unix socket's path has at most 107 bytes; Ray's part, "/12/session_<date>_<pid>/sockets/<name>", takes up to 75.
LONGEST_FOLDER = 107 - 75
# Seconds until all nodes must be alive: it takes 10 on an idle machine.
START_SECONDS = 180
# `ray start` ends its processes in order within a few seconds of SIGTERM; what is left then is killed.
GRACE_SECONDS = 10
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

# Runs in a process of its own: Ray's client keeps settings, among them the token, for the life of a process.
ASK_RAY = """
import json, sys, time
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_nodes
address, wanted = sys.argv[1], int(sys.argv[2])
dashboard = JobSubmissionClient(address).get_address()
while len(alive := list_nodes(address=dashboard, filters=[("state", "=", "ALIVE")])) < wanted:
    time.sleep(0.2)
print(json.dumps({"dashboard": dashboard, "alive": len(alive)}))
"""


class LocalClusterError(RaytfError, RuntimeError):
    """A cluster did not start, or did not end; the message contains the node and the end of its log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster, as its state file holds it.

    Args:
        folder: where the state file is.
        ray_folder: files, logs and token of the nodes, removed when the cluster ends.
        mark: value of the environment variable that its processes bear.
        cpus: CPUs of each node.
        nodes: ids of the `ray start` processes, head first; later ones of these ids do not bear the mark.
        address: host:port of the GCS, for `ray.init` and RAY_ADDRESS; "" until it is known.
        dashboard: URL for `ray job submit`; "" until it is known.
    """

    folder: str
    ray_folder: str
    mark: str
    cpus: int
    nodes: tuple[int, ...] = ()
    address: str = ""
    dashboard: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs besides the address: Ray asks for the token, and takes RAY_AUTH_TOKEN before the file."""
        path = os.path.join(self.ray_folder, "auth_token")
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path, "RAY_AUTH_TOKEN": ""}

    def log(self, node: int) -> pathlib.Path:
        """The output of a node's `ray start`."""
        return pathlib.Path(self.ray_folder, f"node-{node}.log")


def up(
    nodes: int = 2,
    cpus: int = 1,
    folder: str | os.PathLike | None = None,
    options: Sequence[Sequence[str]] = (),
    hosts: Sequence[Host] = (),
) -> Cluster:
    """Starts a head and `nodes` - 1 workers, and returns when all are alive and jobs can be submitted.

    Args:
        nodes: number of nodes, the head among them, at least 1.
        cpus: CPUs that Ray counts on each node, at least 1; there may be more in all than the machine has.
        folder: where the state file is written, made if need be; by default one of the user's below the system's
            temporary folder.
        options: more options of `ray start` for the first node, the second, and so on, such as resources and labels.
        hosts: a `namespaces.Host` for each node; by default all share this one. Drivers then run on one of them.

    Raises:
        ConfigError: an argument is wrong, or a cluster is up in the folder.
        LocalClusterError: a node ended or was too slow; nothing is left running.
    """
    for name, value in (("nodes", nodes), ("cpus", cpus)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1", repr(value), "Ask for 1 or more")
    if hosts and len(hosts) != nodes:
        raise ConfigError("There must be a host for each node", f"{len(hosts)} for {nodes}", "Give as many, or none")
    options = itertools.chain(options, itertools.repeat(()))
    places = zip(options, hosts or itertools.repeat(None), strict=False)
    head_host = hosts[0] if hosts else None
    cluster = _new(_own_folder(folder), cpus)
    deadline = time.monotonic() + START_SECONDS
    try:
        # Port 0 is the system's choice, made at the bind; only the client server cannot take it.
        head = ["--head", "--port=0", f"--ray-client-server-port={_free_port()}", "--disable-usage-stats"]
        head += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", "--dashboard-port=0"]
        cluster = _start(cluster, head, *next(places))
        written = pathlib.Path(cluster.ray_folder, "0", "ray_current_cluster")
        address = _wait(lambda: written.is_file() and written.read_text(), cluster, deadline)
        cluster = _save(dataclasses.replace(cluster, address=address))
        for _ in range(nodes - 1):
            cluster = add(cluster, *next(places))
        dashboard = ask(cluster, nodes, deadline, head_host)["dashboard"]
        return _save(dataclasses.replace(cluster, dashboard=dashboard))
    except BaseException:
        down(cluster.folder)
        raise


def add(cluster: Cluster, options: Sequence[str] = (), host: Host | None = None) -> Cluster:
    """Starts one more node of a cluster that is up; it joins a moment later, and ends with the others.

    Args:
        cluster: from `up`, or from `add`, which gives the one that knows all nodes.
        options, host: of this node, see `up`.
    """
    return _start(cluster, [f"--address={cluster.address}"], options, host)


def down(folder: str | os.PathLike | None = None) -> None:
    """Ends every process of the cluster whose state file is in the folder, and removes its files.

    Raises:
        ConfigError: no cluster is up in the folder.
        LocalClusterError: a process outlives SIGKILL; the state file stays.
    """
    cluster = load(folder)
    processes = members(cluster)
    for process in processes:
        if process.pid in cluster.nodes:
            _end(process.terminate)
    kill, give_up = time.monotonic() + GRACE_SECONDS, time.monotonic() + 2 * GRACE_SECONDS
    # Looked up again and again, as an ending Ray still starts processes; one that was a member stays one.
    while processes := {process for process in processes | members(cluster) if lives(process)}:
        now = time.monotonic()
        if now > give_up:
            pids = sorted(process.pid for process in processes)
            raise LocalClusterError(f"These processes of the cluster in {cluster.folder} outlive SIGKILL: {pids}")
        if now > kill:
            for process in processes:
                _end(process.kill)
        time.sleep(0.05)
    for node in cluster.nodes:
        if child := _children.pop(node, None):
            child.wait()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(cluster.ray_folder)
    _state(cluster.folder).unlink()


@contextlib.contextmanager
def local_cluster(
    nodes: int = 2,
    cpus: int = 1,
    options: Sequence[Sequence[str]] = (),
    hosts: Sequence[Host] = (),
):
    """A cluster for a `with` block, with a state file of its own; see `up` for arguments and errors."""
    with tempfile.TemporaryDirectory(prefix="raytf-") as folder:
        cluster = up(nodes, cpus, folder, options, hosts)
        try:
            yield cluster
        finally:
            if _state(folder).exists():
                down(folder)


def load(folder: str | os.PathLike | None = None) -> Cluster:
    """The cluster whose state file is in the folder, running or not.

    Raises:
        ConfigError: there is no state file, or the folder is another user's.
    """
    folder = _own_folder(folder)
    if not _state(folder).exists():
        raise ConfigError("A cluster must be up in the folder", folder, "Start one, or name its folder with --folder")
    values = json.loads(_state(folder).read_text())
    return Cluster(**{**values, "nodes": tuple(values["nodes"])})


def ask(cluster: Cluster, nodes: int, deadline: float, host: Host | None = None) -> dict:
    """Waits until Ray knows `nodes` living nodes; gives {"dashboard": URL, "alive": number of living nodes}.

    Args:
        cluster: a cluster whose GCS address is known.
        nodes: how many nodes to wait for, 0 to ask only.
        deadline: of `time.monotonic()`.
        host: of the first node, where it is not this one.

    Raises:
        LocalClusterError: Ray does not answer, or a node ended, or the deadline passed.
    """
    command = _on(host, [sys.executable, "-c", ASK_RAY, cluster.address, str(nodes)])
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        asking = subprocess.Popen(
            command, env=os.environ | cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            _wait(lambda: asking.poll() is not None, cluster, deadline)
        finally:
            asking.kill()
            asking.wait()
        output.seek(0), errors.seek(0)
        if asking.returncode:
            raise LocalClusterError(f"Ray at {cluster.address} does not say which nodes it has:\n{errors.read()}")
        return json.loads(output.read())


# --------------------------------------------------------------------------------------------------- processes


def members(cluster: Cluster) -> set[psutil.Process]:
    """The cluster's living processes: those with its mark, its nodes' sessions, and all descendants.

    No one of these is enough: Ray's workers overwrite their environment with their title, and a job's driver has a
    session of its own.
    """
    table = {p.pid: p for p in psutil.process_iter(["environ", "ppid", "status"]) if p.info["status"] not in _ENDED}
    heads = {node for node in cluster.nodes if node in table and _is_up(node, cluster)}
    pids = {pid for pid, process in table.items() if (process.info["environ"] or {}).get(MARK) == cluster.mark} | heads
    pids |= {pid for pid in table if _session(pid) in heads}
    while found := {pid for pid, process in table.items() if process.info["ppid"] in pids} - pids:
        pids |= found
    return {table[pid] for pid in pids}


def lives(process: psutil.Process) -> bool:
    """Whether the process is still there, and not a zombie or a later one of the same id."""
    try:
        return process.is_running() and process.status() not in _ENDED
    except psutil.NoSuchProcess:
        return False


def _is_up(node: int, cluster: Cluster) -> bool:
    if child := _children.get(node):  # its environment cannot be read yet when it has just been started
        return child.poll() is None
    try:
        process = psutil.Process(node)
        return process.environ().get(MARK) == cluster.mark and lives(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)


def _end(signalled: Callable[[], None]) -> None:
    """Signals a process; psutil refuses one that has ended, or a later one of its id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        signalled()


# ------------------------------------------------------------------------------------------------------ start

# The nodes that this very process has started: it must reap them.
_children: dict[int, subprocess.Popen] = {}


def _new(folder: str, cpus: int) -> Cluster:
    """A cluster without a node yet, with its state file."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("A local cluster runs on Linux", sys.platform, "Use a Linux machine")
    if not _ray().exists():
        raise ConfigError("Ray must be installed for this Python", sys.executable, "Run it with the venv's Python")
    if _state(folder).exists():
        if members(load(folder)):
            raise ConfigError("A folder holds one cluster, and one is up", folder, "End it, or use another --folder")
        down(folder)
    temporary = tempfile.gettempdir()
    if len(os.fsencode(temporary)) + len("/raytf-12345678") > LONGEST_FOLDER:
        raise ConfigError(
            "The temporary folder's path must be short, as Unix sockets below it allow for 107 bytes",
            temporary,
            "Set TMPDIR to a short one such as /tmp",
        )
    ray_folder = tempfile.mkdtemp(prefix="raytf-")
    # Ray listens on all interfaces, so a token keeps strangers out; its own file would be shared with other clusters.
    pathlib.Path(ray_folder, "tmp").mkdir()
    token = pathlib.Path(ray_folder, "auth_token")
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    cluster = Cluster(folder=folder, ray_folder=ray_folder, mark=secrets.token_hex(8), cpus=cpus)
    return _save(cluster)


def _on(host: Host | None, command: list[str]) -> list[str]:
    return command if host is None else host.command(command)


def _start(cluster: Cluster, role: list[str], options: Sequence[str], host: Host | None) -> Cluster:
    """Starts one more node."""
    index = len(cluster.nodes)
    command = _on(host, [str(_ray()), "start", "--block", *role, f"--num-cpus={cluster.cpus}"])
    # the others take the address that reaches the head
    command += [f"--node-ip-address={host.address}"] if host is not None and index == 0 else []
    # Each node would count all GPUs as its own.
    command += ["--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--dashboard-agent-listen-port=0"]
    # A folder for each node: in a common one, nodes that start together pick the same socket names.
    command += [f"--temp-dir={cluster.ray_folder}/{index}", "--log-color=false", *options]
    environment = os.environ | cluster.environment | {MARK: cluster.mark}
    # A job's `python` is then the Python that has raytf.
    environment["PATH"] = os.pathsep.join((str(_ray().parent), environment.get("PATH", os.defpath)))
    # Ray would wait half a minute for tasks to end that `down` is to end.
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    # TensorFlow and Ray leave files in it when their processes are killed, which is how Ray ends a worker.
    environment["TMPDIR"] = os.path.join(cluster.ray_folder, "tmp")
    environment.pop("RAY_ADDRESS", None)
    with cluster.log(index).open("w") as log:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _children[child.pid] = child
    return _save(dataclasses.replace(cluster, nodes=(*cluster.nodes, child.pid)))


def _wait(ready, cluster: Cluster, deadline: float):
    """Polls until `ready()` gives something true, which is returned; raises if a node ends or the deadline passes."""
    while not (value := ready()):
        for index, node in enumerate(cluster.nodes):
            if not _is_up(node, cluster):
                raise _ended(cluster, index)
        if time.monotonic() > deadline:
            logs = "\n".join(_tail(cluster, index) for index in range(len(cluster.nodes)))
            raise LocalClusterError(f"All nodes must be alive within {START_SECONDS} s, and some are not.\n{logs}")
        time.sleep(0.05)
    return value


def _ended(cluster: Cluster, index: int) -> LocalClusterError:
    return LocalClusterError(f"Node {index} must run until `down`, and it has ended.\n{_tail(cluster, index)}")


def _tail(cluster: Cluster, index: int) -> str:
    lines = cluster.log(index).read_text().splitlines()[-15:]
    return "\n".join([f"The last lines of node {index}:", *lines])


def _save(cluster: Cluster) -> Cluster:
    """Writes the state file in one step, so that `down` can end a cluster at any point of its start."""
    new = _state(cluster.folder).with_suffix(".new")
    new.write_text(json.dumps(dataclasses.asdict(cluster), indent=2))
    new.replace(_state(cluster.folder))
    return cluster


def _state(folder: str) -> pathlib.Path:
    return pathlib.Path(folder, STATE)


def _own_folder(folder: str | os.PathLike | None) -> str:
    folder = pathlib.Path(folder or os.path.join(tempfile.gettempdir(), f"raytf-{getpass.getuser()}")).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        # The state file contains which processes to end and which folder to remove.
        raise ConfigError("The folder must be one's own", folder, "Name another with --folder")
    return str(folder)


def _ray() -> pathlib.Path:
    return pathlib.Path(sys.executable).with_name("ray")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---------------------------------------------------------------------------------------------- command line


def _describe(cluster: Cluster) -> str:
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in cluster.environment.items())
    ray, python, script = (shlex.quote(str(path)) for path in (_ray(), sys.executable, os.path.relpath(__file__)))
    return f"""The cluster is up; nodes: {len(cluster.nodes)}, CPUs of each: {cluster.cpus}.
  GCS        {cluster.address}
  dashboard  {cluster.dashboard}
  logs       {cluster.ray_folder}

It answers only to those with its token:
  export {settings}
Submit a job:
  {ray} job submit --address {cluster.dashboard} --working-dir . -- \\
    python jobs/digits.py --num-workers 2 --storage "$PWD/runs"
Run a script on it from here:
  RAY_ADDRESS={cluster.address} {python} jobs/digits.py --num-workers 2
End it:
  {python} {script} down --folder {shlex.quote(cluster.folder)}"""


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {"up": "start a cluster", "status": "say whether all its nodes are alive", "down": "end it"}
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--folder", help=f"where {STATE} is kept; by default one of the user's")
        if name == "up":
            command.add_argument("--nodes", type=int, default=2, help="number of nodes, the head among them")
            command.add_argument("--cpus", type=int, default=1, help="CPUs of each node")
    options = parser.parse_args(arguments)
    try:
        if options.command == "up":
            print(_describe(up(options.nodes, options.cpus, options.folder)))
        elif options.command == "down":
            down(options.folder)
        else:
            cluster = load(options.folder)
            alive = ask(cluster, 0, time.monotonic() + START_SECONDS)["alive"]
            print(f"{alive} of {len(cluster.nodes)} nodes are alive at {cluster.address}, {cluster.dashboard}")
            sys.exit(alive != len(cluster.nodes))
    except RaytfError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
