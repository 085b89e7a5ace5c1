"""What both sides of a connection between a program and a host must have alike."""

import platform
import sys

import percore
from percore._protocol.host_orders import Greeting


def greeting(pid: int) -> Greeting:
    """Return what this process has."""
    return Greeting(f"{sys.implementation.name} {'.'.join(platform.python_version_tuple()[:2])}", percore.__version__, pid)
