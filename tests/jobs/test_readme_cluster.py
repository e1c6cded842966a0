"""How docs/guides/cluster.md starts Ray and submits jobs, command by command, from the token to the end of the jobs.

Options are added where hosts, ports and folders are this machine's, which several clusters share; HEAD and /shared get
their values. The "other host" is a second node of this machine.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile

import psutil
import pytest

import raytf
from cluster import local
from tests import blocks
from tests.jobs.test_output import without_phases

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
# Of the machine: two nodes on it, with few CPUs, and other clusters next to them.
NODE = "--num-cpus=2 --num-gpus=0 --object-store-memory=300000000 --dashboard-agent-listen-port=0 --log-color=false"
HEAD = "--port=0 --dashboard-port=0 --disable-usage-stats"
MODULE = """
def build_model(config):
    import keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model
"""


def commands():
    """Of both blocks, each in a line, without comments; those of the README are among them."""
    found = [c for name in ("start", "job") for c in blocks.commands(blocks.named("docs/guides/cluster.md", name))]
    assert set(blocks.commands(blocks.named("README.md", "cluster"))) <= set(found)
    return found


class Hosts:
    """Runs commands as a user of a cluster's hosts does, with a home and a temporary folder of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = secrets.token_hex(8)
        without = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
        self.environment = {name: value for name, value in os.environ.items() if name not in without} | {
            "HOME": str(folder),
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            local.MARK: self.mark,
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
        }

    def run(self, command, code=0, **variables):
        """What a command prints; `export` holds for those that follow."""
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value
            return ""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder / "clone",
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, f"{command}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        return done.stdout + done.stderr

    def end(self):
        cluster = local.Cluster(folder="", ray_folder="", mark=self.mark, cpus=2)
        processes = local.members(cluster)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([p for p in processes if local.lives(p)], timeout=20)
        assert not [process for process in processes if local.lives(process)]


@pytest.fixture
def hosts():
    import pandas as pd

    folder = pathlib.Path(tempfile.mkdtemp(prefix="rr"))  # a short path, as Unix sockets below it need
    for name in ("raytf", "jobs"):
        shutil.copytree(ROOT / name, folder / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "clone" / "mymodels.py").write_text(MODULE)
    (folder / "shared" / "data").mkdir(parents=True)
    pd.DataFrame({"a": range(40), "b": 1.0, "y": 2.0}).to_parquet(folder / "shared" / "data" / "part.parquet")
    made = Hosts(folder)
    yield made
    made.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(600)
def test_the_section_as_written(hosts):
    found = commands()
    assert [re.search(r"get-auth-token|\S+=token|start|job", c)[0] for c in found] == [
        *("get-auth-token", "RAY_AUTH_MODE=token", "start", "start", "job", "job")
    ]
    head, port = None, None
    for command in found:
        if command.startswith("ray start --head"):
            output = hosts.run(
                f"{command} {HEAD} {NODE} --temp-dir={hosts.folder}/ray --ray-client-server-port={_port()}"
            )
            head = (hosts.folder / "ray" / "ray_current_cluster").read_text()
            port = re.search(r"RAY_API_SERVER_ADDRESS='http://[^:]+:(\d+)'", output)[1]
            continue
        if head:
            command = command.replace("HEAD:6379", head).replace("HEAD:8265", f"{head.rpartition(':')[0]}:{port}")
        command = command.replace("/shared", f"{hosts.folder}/shared").replace("--num-workers 8", "--num-workers 2")
        if command.startswith("ray start"):
            # a host of its own has folders of its own; in a shared one each node unpacks a job's files once more
            command = f"{command} {NODE} --temp-dir={hosts.folder}/ray2"
        output = hosts.run(command)
        if command.startswith("ray job"):
            assert "raytf.load_model(" in output and "succeeded" in output, output
        if "jobs/digits.py" in command:
            _digits(output)
    _by_hand(hosts, head)


def _digits(output):
    """The accuracy of the example; the line that loads the model works; no line that is not for the user."""
    log = output[re.search(r"^Running entrypoint for job .*\n", output, re.MULTILINE).end() :].splitlines()
    log = log[
        : next((i for i, line in enumerate(log) if " cli.py:" in line), len(log))
    ]  # what follows is the command's
    noise = [line for line in log if re.search(r"Traceback|Error|WARNING|INFO|pid=\d+", line)]
    # Ray warns every driver, whatever its settings, that a busy machine of few cores starts many workers.
    assert not [line for line in noise if "worker processes have been started on node" not in line], output
    lines = [line for line in log if line.startswith("epoch ")]
    assert re.match(r"epoch 2/\d+  step 12/12  .*loss \d.*examples/s  \d+% waiting for input  \d+:\d\d left", lines[1])
    assert float(re.search(r"val_accuracy\W+(0\.\d+)\W*$", "\n".join(log), re.MULTILINE)[1]) >= 0.97
    model = raytf.load_model(re.search(r'raytf.load_model\("(.*)"\)', output)[1])
    assert model.output_shape == (None, 10)
    events = re.search(r"--logdir (\S+)", output)[1]
    assert any("tfevents" in f for f in os.listdir(os.path.join(events, "train")))


def _by_hand(hosts, head):
    """`RAY_ADDRESS=HOST:PORT` without RAY_AUTH_MODE: with the token, without one, with another; and of `raytf run`."""
    del hosts.environment["RAY_AUTH_MODE"]
    (hosts.folder / "clone" / "look.py").write_text("print('here')\n")
    nobody = hosts.folder / "nobody"
    nobody.mkdir()
    wrong = hosts.folder / "wrong"
    wrong.write_text("0" * 64)
    train = f"raytf train mymodels:build_model --data {hosts.folder}/shared/data --features a,b --labels y"
    train += f" --storage {hosts.folder}/shared/runs"
    assert "raytf.load_model(" in hosts.run(train, RAY_ADDRESS=head)
    run = "raytf run look.py"
    assert "[worker 0] here" in hosts.run(run, RAY_ADDRESS=head)
    for command in (train, run):
        output = without_phases(hosts.run(command, code=1, RAY_ADDRESS=head, HOME=str(nobody)))
        assert output.startswith(f"Error: The cluster at {head} wants a token; received: none where Ray looks"), output
        output = without_phases(hosts.run(command, code=1, RAY_ADDRESS=head, RAY_AUTH_TOKEN_PATH=str(wrong)))
        assert output.startswith(f"Error: The cluster at {head} requires its token; received: another one"), output
        assert str(wrong) in output and len(output.splitlines()) == 1


def _port():
    return local._free_port()
