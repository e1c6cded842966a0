"""Packet filters on sockets: kernel programs that drop incoming packets. On Linux; does not import Ray.

A program is a list of steps: (operation, steps to skip if equal, steps to skip if not, argument).
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence

# From Linux' include/uapi: asm-generic/socket.h, linux/filter.h and linux/bpf_common.h.
_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06

Program = Sequence[tuple[int, int, int, int]]
# Drops all packets, without acknowledging them.
NOTHING: Program = ((_RETURN, 0, 0, 0),)


def attach_filter(sock: socket.socket, program: Program) -> None:
    """Filters the incoming packets of a socket by a program, from now on.

    Raises:
        OSError: The kernel rejects the filter.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))


def only_to_address(host: str) -> Program:
    """Returns a program that drops packets for other addresses than `host`, a numeric address."""
    address = ipaddress.ip_address(host)
    version, begins = (0x40, 16) if address.version == 4 else (0x60, 24)
    loads = [(_LOAD_BYTE, _NETWORK_HEADER, version)]
    loads += [
        (_LOAD_WORD, _NETWORK_HEADER + begins + i, int.from_bytes(address.packed[i : i + 4]))
        for i in range(0, len(address.packed), 4)
    ]
    steps = []
    for i, (load, offset, wanted) in enumerate(loads):
        distance = 2 * (len(loads) - 1 - i) + 1  # steps from this one to the last, which drops
        steps.append((load, 0, 0, offset))
        if i == 0:
            steps.append((_AND, 0, 0, 0xF0))
        steps.append((_JUMP_IF_EQUAL, 0, distance, wanted))
    return [*steps, (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
