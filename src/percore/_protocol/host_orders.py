"""The first messages between a program and a host on another node, once both have proven who they are."""

import platform
import sys
from typing import Any, NamedTuple

from percore._protocol.worker_start import WorkerStart


class HostOrders(NamedTuple):
    """The first thing that a host gets, pickled.

    Attributes:
        node: the name of its node.
        lost_after: seconds without a beat after which the other side counts as lost.
        sizes: the options of the runner that say how much memory and how many start marks its workers need, by name.
        start: what the workers are started with.
        loop_factory: the pickled option, or nothing.
        debug: whether their loops are in debug mode.
        main: the program's `__main__`, as `MainInfo.as_tuple` gives it.
        source: the source of the script, if that is what `__main__` is: the node may not have the file.
        path: `sys.path` of the program.
        argv: `sys.argv` of the program.
    """

    node: str
    lost_after: float
    sizes: dict[str, Any]
    start: WorkerStart
    loop_factory: bytes
    debug: bool
    main: tuple[Any, ...]
    source: bytes | None
    path: list[str]
    argv: list[str]


class Greeting(NamedTuple):
    """What a host tells first: both sides must have these alike.

    Attributes:
        python: the version of Python without its last part, with the implementation: "cpython 3.13".
        percore: the version of percore.
        pid: the host's process.
    """

    python: str
    percore: str
    pid: int


def greeting(pid: int) -> Greeting:
    """Return what this process has."""
    python = f"{sys.implementation.name} {'.'.join(platform.python_version_tuple()[:2])}"
    # Not by an import: the package's own module names all rooms, and this one stands at the bottom.
    return Greeting(python, sys.modules["percore"].__version__, pid)
