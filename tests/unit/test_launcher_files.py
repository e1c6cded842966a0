"""The files for Ray's cluster launcher: Ray accepts them, and refuses them with a wrong field; scripts for hosts."""

from __future__ import annotations

import copy
import os
import pathlib
import signal
import subprocess
import sys

import botocore.loaders
import botocore.model
import botocore.validate
import jsonschema
import pytest
import yaml
from ray._common.network_utils import parse_address
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.waiting import until

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("aws", "gcp", "on-premises")


def config(name: str) -> dict:
    return yaml.load((ROOT / "cluster" / f"{name}.yaml").read_text(), yaml.CSafeLoader)


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name):
    prepared = prepare_config(config(name))
    validate_config(prepared)
    assert prepared["head_setup_commands"][:2] == prepared["worker_setup_commands"] == config(name)["setup_commands"]
    assert any("--constraint constraints.txt" in command for command in prepared["worker_setup_commands"])
    for commands in (prepared["head_start_ray_commands"], prepared["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1]
    sources = [source for source in prepared["file_mounts"].values() if not source.startswith("~")]
    assert sources and all((ROOT / source).exists() for source in sources)
    for node_type in prepared["available_node_types"].values():
        assert 0 <= node_type["min_workers"] <= node_type["max_workers"] <= prepared["max_workers"]


def test_hosts_of_ones_own_all_stay():
    (node_type,) = prepare_config(config("on-premises"))["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(config("on-premises")["provider"]["worker_ips"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("max_worker", 3, "'max_worker' was unexpected"),
        ("max_workers", "3", "'3' is not of type 'integer'"),
        ("setup_commands", "pip install raytf", "is not of type 'array'"),
        ("auth/ssh_users", "me", "'ssh_users' was unexpected"),
        ("file_mounts", ["raytf"], r"\['raytf'\] is not of type 'object'"),
    ],
)
def test_ray_refuses_a_wrong_field(name, path, value, message):
    wrong = at = copy.deepcopy(prepare_config(config(name)))
    *way, last = path.split("/")
    for part in way:
        at = at[part]
    at[last] = value
    with pytest.raises(jsonschema.ValidationError, match=message):
        validate_config(wrong)


@pytest.mark.slow  # the model of EC2's requests is large
def test_ec2_would_take_the_requests():
    model = botocore.model.ServiceModel(botocore.loaders.Loader().load_service_model("ec2", "service-2"))
    request = model.operation_model("RunInstances").input_shape
    validator = botocore.validate.ParamValidator()
    for node_type in config("aws")["available_node_types"].values():
        asked = node_type["node_config"] | {"MinCount": 1, "MaxCount": 1}
        assert not validator.validate(asked, request).has_errors()
        asked["BlockDeviceMapping"] = asked.pop("BlockDeviceMappings")
        report = validator.validate(asked, request).generate_report()
        assert 'Unknown parameter in input: "BlockDeviceMapping"' in report


# What the scripts call: this Ray notes its words and runs the command, and this Slurm starts it here.
# Where a file `waits` is there, it starts the command once `go` is there, too, and never after `over`.
CODE = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"  # as ray symmetric-run has it
COMMANDS = {
    "ray": f"""echo "$*" >> "$HOME/noted"; [ "$1" = stop ] && exit
        while [ "$1" != -- ]; do shift; done; shift
        while [ -e "$HOME/waits" ] && [ ! -e "$HOME/go" ]; do [ -e "$HOME/over" ] && exit; sleep 0.1; done
        exec {sys.executable} -S -c '{CODE}' "$@" """,
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=0 exec "$@" """,
    "scontrol": """[ "$1" = requeue ] && echo "$2" > "$HOME/requeued"; echo "$3" """,
    "ssh": """echo "$1" >> "$HOME/reached" """,
}
SLURM = {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7"}


@pytest.fixture
def environment(tmp_path):
    """The environment in which a script calls these commands, with the folder as its home."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def start(tmp_path, environment):
    """Runs a script for hosts with some words; (exit code, stdout, stderr, what Ray was given)."""

    def starting(script: str, *words: str, **variables: str):
        command = ["bash", str(ROOT / "cluster" / script), *words]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=60)
        noted = tmp_path / "noted"
        return done.returncode, done.stdout, done.stderr, noted.read_text().split() if noted.exists() else []

    return starting


def test_a_job_of_whole_nodes_has_all_their_memory():
    """Slurm gives it the partition's default otherwise, and Ray counts the host's."""
    options = {line.split()[1] for line in (ROOT / "cluster" / "slurm.sh").open() if line.startswith("#SBATCH")}
    assert {"--exclusive", "--mem=0"} <= options


@pytest.mark.parametrize("head", ["10.1.2.3", "fd00::1"])
@pytest.mark.parametrize("script", ["ssh.sh", "slurm.sh"])
def test_the_head_may_have_an_ipv6_address(start, script, head):
    slurm = {"SLURM_JOB_NODELIST": head, **SLURM}
    hosts = [head] if script == "ssh.sh" else []
    code, out, _, words = start(script, *hosts, "echo", "trained", **slurm)
    assert code == 0 and out == "trained\n"
    assert parse_address(words[words.index("--address") + 1]) == (head, "6379")


@pytest.mark.parametrize("script", ["ssh.sh", "slurm.sh"])
@pytest.mark.parametrize("known", ["echo 127.0.1.1 STREAM node1", "exit 2"])
def test_a_head_that_its_host_does_not_know_by_address_has_its_own(start, tmp_path, script, known):
    """Debian's /etc/hosts has 127.0.1.1 for the own name, and an alias of ssh alone has no address."""
    for name, text in {"getent": known, "hostname": "echo '10.1.2.3 10.9.9.9 '"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    hosts = ["node1 node2"] if script == "ssh.sh" else []
    code, out, _, words = start(script, *hosts, "echo", "trained", SLURM_JOB_NODELIST="node1", **SLURM)
    assert code == 0 and out == "trained\n"
    assert words[words.index("--address") + 1] == "10.1.2.3:6379"


@pytest.mark.parametrize("text", ["10.1.2.3 10.1.2.4 10.1.2.5", "10.1.2.3\n10.1.2.4\n10.1.2.5\n"])
def test_hosts_may_be_on_one_line_or_several(start, tmp_path, text):
    code, out, _, words = start("ssh.sh", text, "echo", "trained")
    assert code == 0 and out == "trained\n"
    assert words[words.index("--min-nodes") + 1] == "3" and words[words.index("--address") + 1] == "10.1.2.3:6379"
    assert sorted((tmp_path / "reached").read_text().split()) == ["10.1.2.4", "10.1.2.5"]


@pytest.mark.parametrize(
    "script, words", [("ssh.sh", []), ("ssh.sh", ["10.1.2.3"]), ("ssh.sh", ["", "true"]), ("slurm.sh", [])]
)
def test_a_script_without_a_command_starts_nothing(start, script, words):
    code, _, err, noted = start(script, *words, SLURM_JOB_NODELIST="10.1.2.3", SLURM_JOB_NUM_NODES="1")
    assert code == 2 and err.startswith("usage: ") and not noted


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(
    "script, number, requeued",
    [("ssh.sh", signal.SIGTERM, False), ("slurm.sh", signal.SIGUSR1, True), ("slurm.sh", signal.SIGTERM, False)],
)
def test_a_signal_before_ray_is_up_is_not_lost(tmp_path, environment, script, number, requeued, starts):
    """The command that starts after it is stopped, or Ray after a while; the exit code is 143 in both cases."""
    text = (ROOT / "cluster" / script).read_text()
    (tmp_path / script).write_text(text if starts else text.replace("patience=60", "patience=1"))
    (tmp_path / "waits").touch()
    command = ["bash", str(tmp_path / script), *(["10.1.2.3"] if script == "ssh.sh" else []), "sleep", "9"]
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(command, env=environment | SLURM | {"SLURM_JOB_NODELIST": "10.1.2.3"}, stderr=err)
    try:
        until((tmp_path / "noted").exists)
        process.send_signal(number)
        if starts:
            until(lambda: "before the command has started" in (tmp_path / "err").read_text())
            (tmp_path / "go").touch()
        assert process.wait(timeout=60) == 143
    finally:
        (tmp_path / "over").touch()
        process.kill()
    assert (tmp_path / "requeued").exists() == requeued
    assert ("the command has not started: " in (tmp_path / "err").read_text()) != starts
    assert ("stop\n" in (tmp_path / "noted").read_text()) == (script == "ssh.sh" and not starts)
