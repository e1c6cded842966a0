"""Hosts on three networks: one that reaches Ray's head, another, and a dead one, to which their default route leads."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from cluster import local, namespaces

WHY_NOT = namespaces.available()
ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
DRIVER = """
import json
import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from tests.cluster import models


def hosts(config):
    import keras

    class Hosts(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
            note = [sorted(address.rpartition(":")[0] for address in addresses), os.environ.get("NCCL_SOCKET_IFNAME")]
            with open(f"{config['storage']}/note.{os.getpid()}", "w") as file:
                json.dump(note, file)

    return [Hosts()]


network, storage = sys.argv[1] or None, sys.argv[2]
ray.init(log_to_driver=False)
trainer = raytf.KerasTrainer(
    models.mlp,
    config={"batch_size": 7, "epochs": 1, "storage": storage},
    datasets={"train": models.dataset()},
    features=models.FEATURES,
    labels="label",
    callbacks=hosts,
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
    run_config=RunConfig(storage_path=storage),
    tensorflow_config=raytf.TensorflowConfig(network=network),
    progress=False,
)
try:
    planned = [value for name, value in raytf.plan(trainer).lines() if name == "network"]
    trainer.fit()
    print(json.dumps(planned))
except raytf.ConfigError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def cluster():
    """(hosts, cluster): a head without CPUs, and two hosts."""
    with namespaces.hosts(3, networks=2) as hosts:
        for i, host in enumerate(hosts):
            for line in (
                f"link add rtd{host.link[3:]} type veth peer name dead0 netns {host.name}",
                f"-n {host.name} addr add 192.168.77.{i + 1}/24 dev dead0",
                f"-n {host.name} link set dead0 up",
                f"-n {host.name} route add default via 192.168.77.254",
            ):
                subprocess.run(["ip", *line.split()], check=True)
        options = [["--num-cpus=0"]]
        with local.local_cluster(nodes=3, cpus=1, options=options, hosts=hosts) as found:
            yield hosts, found


def on_the_head(cluster, command: list[str], codes=(0,)) -> str:
    hosts, found = cluster
    done = subprocess.run(
        hosts[0].command(command),
        env=os.environ | found.environment | {"RAY_ADDRESS": found.address, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in codes, done.stdout + done.stderr[-4000:]
    return done.stdout


def train(cluster, network: str, folder):
    """Returns (the driver's output, what the workers note: their addresses, and NCCL's variable)."""
    message = json.loads(on_the_head(cluster, [sys.executable, "-c", DRIVER, network, str(folder)]).splitlines()[-1])
    return message, [json.loads(note.read_text()) for note in folder.glob("note.*")]


def sent(host, interface: str) -> int:
    """Bytes that the host has sent by an interface."""
    shown = subprocess.run(["ip", "-n", host.name, "-s", "-j", "link", "show", interface], capture_output=True)
    return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]


def test_workers_exchange_by_the_interface_that_reaches_rays_head(tmp_path, cluster):
    (_, *workers), _ = cluster
    planned, notes = train(cluster, "", tmp_path)
    assert notes == [[sorted(host.address for host in workers), None]] * 2
    inside = {host.address: host.link.replace("rto", "rti") for host in workers}
    assert sorted(planned) == sorted(f"workers exchange by {name} on {address}" for address, name in inside.items())


@pytest.mark.parametrize("named", ["net1", "{}.0/24"])
def test_workers_exchange_by_the_network_that_is_named(tmp_path, cluster, named):
    (_, *workers), _ = cluster
    (address,) = workers[0].further
    before = [sent(host, "net1") for host in workers]
    (line,), notes = train(cluster, named.format(address.rpartition(".")[0]), tmp_path)
    assert notes == [[sorted(host.further[0] for host in workers), "=net1"]] * 2
    assert line.startswith("workers exchange by net1 on ") and all(host.address in line for host in workers)
    for host, bytes_before in zip(workers, before, strict=True):
        assert sent(host, "net1") - bytes_before > 10_000


def test_a_network_that_no_host_has_is_refused_before_workers_start(tmp_path, cluster):
    (_, *workers), _ = cluster
    message, notes = train(cluster, "eth9", tmp_path)
    assert "'eth9'" in message and notes == []
    for host in workers:
        own = f"{host.link.replace('rto', 'rti')} ({host.address}), net1 ({host.further[0]})"
        assert f"{host.address} has lo (127.0.0.1" in message and own in message and "dead0 (192.168.77." in message


def test_scripts_and_the_doctor_take_the_network(tmp_path, cluster):
    (head, *workers), _ = cluster
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['TF_CONFIG'])")
    raytf = [sys.executable, "-m", "raytf.cli"]
    run = on_the_head(cluster, [*raytf, "run", "--network", "net1", "--num-workers", "2", str(script)])
    assert all(f"{host.further[0]}:" in run for host in workers)

    def examined(network: str):
        doctor = [*raytf, "doctor", "--no-training", "--seconds", "100", "--json", "--network", network]
        report = json.loads(on_the_head(cluster, doctor, codes=(0, 1)))
        found = {(finding["check"], *finding["nodes"]) for finding in report["findings"]}
        return report["interfaces"], found - {("name", host.address) for host in everywhere}  # as that of this machine

    everywhere = [head, *workers]
    assert examined("net1") == ({host.address: "net1" for host in everywhere}, set())
    wrong = {("network", host.address) for host in everywhere}
    assert examined("eth9") == ({host.address: None for host in everywhere}, wrong)


def test_hosts_with_ipv6_alone(tmp_path):
    """Workers on two hosts, and the two steps of the doctor on all three."""
    with (
        namespaces.hosts(3, ipv6=True) as hosts,
        local.local_cluster(nodes=3, cpus=1, options=[["--num-cpus=0"]], hosts=hosts) as found,
    ):
        planned, notes = train((hosts, found), "", tmp_path)
        doctor = [sys.executable, "-m", "raytf.cli", "doctor", "--seconds", "200", "--json"]
        report = json.loads(on_the_head((hosts, found), doctor, codes=(0, 1)))
    assert notes == [[sorted(f"[{host.address}]" for host in hosts[1:]), None]] * 2
    assert {line.rpartition(" on ")[2] for line in planned} == {host.address for host in hosts[1:]}
    assert {finding["check"] for finding in report["findings"]} <= {"name"} and not any(
        "training" in text for text in report["left_out"]
    )
    assert list(report["interfaces"]) == [host.address for host in hosts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pod(namespaces.Host):
    """A host with a name of its own, which is the only one that it knows, as a pod of Kubernetes has it."""

    folder: pathlib.Path

    def command(self, command: list[str]) -> list[str]:
        named = """
            hostname "pod-$1"
            { echo "127.0.0.1 localhost"; echo "$1 pod-$1"; } > "$2"
            mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf
            shift 2
            exec "$@"
        """
        hosts = str(self.folder / self.address)
        return super().command(["unshare", "-m", "-u", "sh", "-c", named, "sh", self.address, hosts, *command])


def test_pods_that_know_only_their_own_names(tmp_path):
    with namespaces.hosts(3) as hosts:
        pods = [Pod(**dataclasses.asdict(host), folder=tmp_path) for host in hosts]
        own, others = (
            [subprocess.run(pods[1].command(["getent", "hosts", f"pod-{pod.address}"])).returncode for pod in part]
            for part in (pods[1:2], [pods[0], pods[2]])
        )
        assert own == [0] and 0 not in others
        with local.local_cluster(nodes=3, cpus=1, options=[["--num-cpus=0"]], hosts=pods) as found:
            _, notes = train((pods, found), "", tmp_path)
    assert notes == [[sorted(pod.address for pod in pods[1:]), None]] * 2
