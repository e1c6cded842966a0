"""Connections of this process that are hung up, and what may listen where."""

import contextlib
import errno
import os
import random
import socket
import struct
import sys

import pytest

from raytf import cli
from raytf.errors import ConfigError
from raytf.runtime import packet_filter, ports
from raytf.runtime.settings import Listening


def test_hanging_up_ends_a_connection_and_leaves_no_descriptor():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        closed, kept = socket.create_connection(server.getsockname()), socket.create_connection(other.getsockname())
        with closed, kept, server.accept()[0] as accepted, other.accept()[0] as its:
            open_before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                ports.close_connections(address)
            assert len(os.listdir("/proc/self/fd")) == open_before
            assert closed.recv(1) == b"" and accepted.recv(1) == b""
            its.sendall(b"x")
            assert kept.recv(1) == b"x"


def test_hanging_up_leaves_connections_without_a_port():
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as one:
        server.bind(f"\0raytf_test/{os.getpid()}")
        server.listen()
        one.connect(server.getsockname())
        ports.close_connections("127.0.0.1:1")
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)


def test_a_port_is_reserved_while_connections_of_an_earlier_ring_remain(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()  # the side that closes first has the port for a minute
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind(("127.0.0.1", port))
    try:
        assert ports.reserve_address(Listening((port, port))) == f"127.0.0.1:{port}"
    finally:
        ports.end_claims()


def test_a_worker_listens_at_the_address_that_was_kept_for_it(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    allowed = Listening((31_910, 31_911))
    first = ports.reserve_address(allowed)
    try:
        second = ports.reserve_address(allowed)  # another's
        assert {ports.split_address(first)[1], ports.split_address(second)[1]} == set(allowed.ports)
        with pytest.raises(ConfigError, match=r"a free port.*none of 31910 to 31911 is free.*ports=\(first"):
            ports.reserve_address(allowed)
        with ports.own_socket(second) as ring:
            assert ring.getsockname() == ports.split_address(second)
            ring.listen()
            with socket.create_connection(ports.split_address(second)) as one, ring.accept()[0] as other:
                ring.close()
                with ports.own_socket(second) as again:  # while connections of the one before are left
                    again.listen()
                    with pytest.raises(ConfigError, match=f"own address of TF_CONFIG.*{second}.*in use"):
                        ports.own_socket(second)
                other.sendall(b"x")
                assert one.recv(1) == b"x"
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nothing is left of it
        with ports.own_socket(
            f"192.0.2.1:{ports.split_address(first)[1]}"
        ) as translated:  # not this host's, as with NAT
            assert translated.getsockname() == ("0.0.0.0", ports.split_address(first)[1])
    finally:
        ports.end_claims()
    assert ports.split_address(ports.reserve_address(allowed))[1] in allowed.ports
    ports.end_claims()


def takes_filters():
    with socket.socket() as sock, contextlib.suppress(OSError):
        packet_filter.attach_filter(sock, packet_filter.only_to_address("127.0.0.1"))
        return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOPROTOOPT])
def test_filter_that_the_kernel_refuses_is_reported(monkeypatch, caplog, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(packet_filter, "attach_filter", refused)
    with socket.create_server(("", 0)) as server:
        ports.listen_only_at(f"127.0.0.1:{server.getsockname()[1]}")
    assert f"as the kernel refuses a packet filter ([Errno {number}]" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
@pytest.mark.parametrize(
    ("everywhere", "host", "elsewhere"), [("", "127.0.0.2", "127.0.0.1"), ("::", "127.0.0.2", "::1")]
)
def test_what_listens_everywhere_is_kept_to_an_address(everywhere, host, elsewhere):
    """As TensorFlow's server listens, and gRPC with a socket for both kinds of addresses."""
    if not takes_filters():
        pytest.skip("the kernel takes no packet filter of this user")
    both = everywhere == "::"
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server((everywhere, 0), family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        ports.listen_only_at(f"192.0.2.1:{port}")  # not this host's: nothing happens
        assert ports.is_listening(f"127.0.0.1:{port}")
        server.accept()[0].close()
        ports.listen_only_at(f"{host}:{port}")
        assert not ports.is_listening(f"[{elsewhere}]:{port}" if both else f"{elsewhere}:{port}", 0.2)
        assert not ports.is_listening(f"127.0.0.1:{port}", 0.2)
        with socket.create_connection((host, port), 5) as one, server.accept()[0] as other:
            other.sendall(bytes(100_000))
            assert len(one.recv(100_000, socket.MSG_WAITALL)) == 100_000


def test_an_address_of_ipv6_too():
    steps = packet_filter.only_to_address("2001:db8::7")
    assert [argument for *_, argument in steps[3:-2:2]] == [0xFFF00000 + i for i in (24, 28, 32, 36)]
    assert [argument for *_, argument in steps[4:-2:2]] == [0x20010DB8, 0, 0, 7]
    # every comparison that fails leads to the last step, which drops
    assert {i + 1 + step[2] for i, step in enumerate(steps) if step[0] == 0x15} == {len(steps) - 1}


def test_ports_of_a_command():
    assert cli.parse_ports("20000-20099") == (20_000, 20_099)
    for wrong in ("20000", "a-b", "1-", "20000:20099", "30-20"):
        with pytest.raises(ConfigError, match="--ports takes FIRST-LAST"):
            cli.parse_ports(wrong)


def test_a_port_takes_nothing_from_the_users_random_numbers(monkeypatch):
    """Keras draws seeds from Python's own: a loop that builds its strategy had other weights than those of its seed."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    before = random.getstate()
    ports.reserve_address(Listening())
    ports.end_claims()
    assert random.getstate() == before
