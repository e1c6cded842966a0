"""Network interfaces of hosts, and the one on which a run's workers listen; needs no Ray."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from raytf.errors import ConfigError


def check_network(network: str | None) -> None:
    """Raises ConfigError unless `network` may be an interface's name, or is a network of addresses."""
    try:
        if network is not None and ("/" in network or not 0 < len(network) < 16):  # Linux' longest name has 15 bytes
            ipaddress.ip_network(network, strict=False)
    except (TypeError, ValueError):
        raise ConfigError(
            "network must be the name of a network interface, or a network of addresses, or None",
            repr(network),
            'For example "eth1" or "10.1.0.0/16"',
        ) from None


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each of this host's interfaces, without those of IPv6 that are valid on a link only."""
    kinds = socket.AF_INET, socket.AF_INET6
    return {
        name: [entry.address for entry in entries if entry.family in kinds and not entry.address.startswith("fe80:")]
        for name, entries in psutil.net_if_addrs().items()
    }


def choose_address(addresses: Mapping[str, list[str]], network: str | None, node: str) -> tuple[str | None, str | None]:
    """Returns (interface, address) of a worker; pure.

    Args:
        addresses: Addresses of the host's interfaces.
        network: As `TensorflowConfig.network`.
        node: Address of the host in Ray.

    Returns:
        The address is None if the host has none in `network`. The interface is None, too, if none has the address, such
        as with NAT.
    """
    interfaces = [(name, address) for name, addresses in addresses.items() for address in addresses]
    if network is None:
        return next((name for name, address in interfaces if address == node), None), node
    if "/" in network:
        known = ipaddress.ip_network(network, strict=False)
        fit = [interface for interface in interfaces if ipaddress.ip_address(interface[1]) in known]
    else:
        fit = [interface for interface in interfaces if interface[0] == network]
    fit.sort(key=lambda interface: (":" in interface[1]) != (":" in node))  # of several first the kind that Ray uses
    return fit[0] if fit else (None, None)


def worker_addresses(
    hosts: Mapping[str, Mapping[str, list[str]]], network: str | None
) -> dict[str, tuple[str | None, str]]:
    """Returns (interface, address) of a worker on each host; pure.

    Args:
        hosts: Addresses of the interfaces of each host, by its address in Ray.
        network: As `TensorflowConfig.network`.

    Raises:
        ConfigError: A host has no address in `network`, or two hosts have the same.
    """
    chosen_addresses = {node: choose_address(interfaces_of, network, node) for node, interfaces_of in hosts.items()}
    if nodes_without_address := [node for node, (_, address) in chosen_addresses.items() if address is None]:
        raise ConfigError(
            "network= names an interface, or a network of addresses, that each worker's host has",
            f"{network!r}, and "
            + "; ".join(f"{node} has {describe_interfaces(hosts[node])}" for node in nodes_without_address),
            "Name one of these",
        )
    for node, (_, address) in chosen_addresses.items():
        if same := [
            other for other, interface in chosen_addresses.items() if interface[1] == address and other != node
        ]:
            raise ConfigError(
                "network= must connect the hosts, each with an address of its own",
                f"{network!r} is {address} on {', '.join([node, *same])}",
                "Name another interface, or a network of addresses",
            )
    return chosen_addresses


def describe_interfaces(addresses: Mapping[str, list[str]]) -> str:
    """Returns interfaces with their addresses as text: "lo (127.0.0.1), eth0 (10.0.0.3)"."""
    return ", ".join(f"{name} ({', '.join(addresses) or 'no address'})" for name, addresses in addresses.items())


def interface_lines(interfaces_by_node: Mapping[str, str | None]) -> list[str]:
    """Returns a line for each interface, with the nodes whose workers exchange by it."""
    nodes_by_name: dict[str | None, list[str]] = {}
    for node, name in interfaces_by_node.items():
        nodes_by_name.setdefault(name, []).append(node)
    return [
        f"workers exchange by {name or 'an unknown interface'} on {', '.join(nodes)}"
        for name, nodes in nodes_by_name.items()
    ]
