"""Steers new connections to some of the sockets that share a port, by a program in the kernel (Linux: SO_ATTACH_REUSEPORT_CBPF).

Without it the kernel deals new connections to all of them, also to those whose workers are not ready. Such connections wait until a
worker accepts them. So a system that refuses the program costs time, and no connection.

The kernel numbers the sockets of a port in the order in which they began to listen. When one is closed, the last one takes over its
number.
"""

import array
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

_ATTACH: Final = 51  # SO_ATTACH_REUSEPORT_CBPF
_OTHER_NUMBERS: Final = ("sparc", "parisc")  # machines on which it is another option
_LOAD_RANDOM: Final = (0x20, 0, 0, 0xFFFFF000 + 56)  # BPF_LD | BPF_W | BPF_ABS, SKF_AD_OFF + SKF_AD_RANDOM
_MODULO, _JUMP_IF_EQUAL, _RETURN = 0x94, 0x15, 0x06
_INSTRUCTION: Final = struct.Struct("=HBBI")


def program(numbers: Sequence[int]) -> bytes:
    """Return a program that chooses one of these sockets at random for each connection."""
    lines = [_LOAD_RANDOM, (_MODULO, 0, 0, len(numbers))]
    for place, number in enumerate(numbers[:-1]):
        lines += [(_JUMP_IF_EQUAL, 0, 1, place), (_RETURN, 0, 0, number)]
    lines.append((_RETURN, 0, 0, numbers[-1]))
    return b"".join(_INSTRUCTION.pack(*line) for line in lines)


def steer(sock: socket.socket, numbers: Sequence[int]) -> bool:
    """Give new connections of a port to the sockets with these numbers alone. Return whether the system obeys.

    `sock`: any of the sockets of the port.
    """
    if os.uname().machine.startswith(_OTHER_NUMBERS):
        return False
    code = array.array("B", program(numbers))
    address, size = code.buffer_info()
    with suppress(OSError):  # a system without it
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HP", size // _INSTRUCTION.size, address))
        return True
    return False
