"""On which interface of a host a worker listens."""

import pytest

from raytf.errors import ConfigError
from raytf.runtime import networks

HOST = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.0.2.7"],
    "eth1": ["fd00::7", "10.1.0.7", "10.1.0.8"],
    "eth2": [],
}


@pytest.mark.parametrize(
    ("network", "node", "place"),
    [
        (None, "192.0.2.7", ("eth0", "192.0.2.7")),
        (None, "fd00::7", ("eth1", "fd00::7")),
        (None, "203.0.113.1", (None, "203.0.113.1")),  # with NAT
        ("eth1", "192.0.2.7", ("eth1", "10.1.0.7")),
        ("eth1", "fd00::9", ("eth1", "fd00::7")),
        ("eth0", "fd00::9", ("eth0", "192.0.2.7")),
        ("10.1.0.0/16", "192.0.2.7", ("eth1", "10.1.0.7")),
        ("10.1.0.8/32", "192.0.2.7", ("eth1", "10.1.0.8")),
        ("10.1.3.4/16", "192.0.2.7", ("eth1", "10.1.0.7")),
        ("fd00::/8", "192.0.2.7", ("eth1", "fd00::7")),
        ("eth2", "192.0.2.7", (None, None)),
        ("eth9", "192.0.2.7", (None, None)),
        ("10.9.0.0/16", "192.0.2.7", (None, None)),
    ],
)
def test_the_interface_and_address_of_a_worker(network, node, place):
    assert networks.choose_address(HOST, network, node) == place


def test_a_host_without_the_interface_is_refused_with_those_that_it_has():
    hosts = {"10.0.0.1": {"eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]}, "10.0.0.2": {"eth0": ["10.0.0.2"], "ib1": []}}
    with pytest.raises(ConfigError, match=r"'ib0', and 10.0.0.2 has eth0 \(10.0.0.2\), ib1 \(no address\). Name one"):
        networks.worker_addresses(hosts, "ib0")
    assert networks.worker_addresses(hosts, "eth0") == {node: ("eth0", node) for node in hosts}


def test_a_network_of_each_hosts_own_is_refused():
    hosts = {f"10.0.0.{i}": {"docker0": ["172.17.0.1"]} for i in (1, 2)}
    with pytest.raises(ConfigError, match=r"'docker0' is 172.17.0.1 on 10.0.0.1, 10.0.0.2"):
        networks.worker_addresses(hosts, "docker0")


def test_lines_of_the_interfaces():
    by = {"10.0.0.1": "eth0", "10.0.0.2": "ib0", "10.0.0.3": "eth0", "10.0.0.4": None}
    assert networks.interface_lines(by) == [
        "workers exchange by eth0 on 10.0.0.1, 10.0.0.3",
        "workers exchange by ib0 on 10.0.0.2",
        "workers exchange by an unknown interface on 10.0.0.4",
    ]


def test_the_interfaces_of_this_host():
    assert "127.0.0.1" in networks.interfaces()["lo"]
