"""The capabilities of the operating system, checked once at import, and how much memory it has left.

PERCORE_WITHOUT="memfd,eventfd,pidfd,setsig,uvloop,reuseport" makes percore on Linux behave as on systems that lack these, so that
one machine can test all of the fallbacks. Workers inherit the environment, so both sides of a channel always agree.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterator

_without = frozenset(filter(None, os.environ.get("PERCORE_WITHOUT", "").replace(" ", "").split(",")))
_known = frozenset({"memfd", "eventfd", "pidfd", "setsig", "uvloop", "reuseport"})

if _without - _known:
    raise ImportError(
        f"PERCORE_WITHOUT={','.join(sorted(_without))} names something unknown; known are: {', '.join(sorted(_known))}"
    )


def _pidfd_works() -> bool:
    # The function may exist and the system may still refuse the call (old kernels: ENOSYS; old container profiles: EPERM).
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _memfd_works() -> bool:
    try:
        os.close(os.memfd_create("percore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        return False
    return True


HAS_MEMFD = "memfd" not in _without and _memfd_works()
HAS_EVENTFD = "eventfd" not in _without and hasattr(os, "eventfd")
HAS_PIDFD = "pidfd" not in _without and _pidfd_works()
HAS_SETSIG = "setsig" not in _without and sys.platform == "linux" and hasattr(fcntl, "F_SETSIG")
HAS_REUSEPORT = "reuseport" not in _without and sys.platform == "linux"
"""Whether the system divides connections among sockets that share a port. macOS has SO_REUSEPORT, and gives all to one of them."""
IS_FREE_THREADED = "t" in sys.abiflags
"""Whether this is a free-threaded build of Python. The GIL may be enabled all the same."""


has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
"""Return whether only one thread of this process runs Python code at a time. An import may change that."""


def limit_of_processes() -> str:
    """Return, as a clause, why the system may refuse another process or thread, and what to do."""
    import resource  # workers need it for nothing else

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    many = "any number of" if soft == resource.RLIM_INFINITY else soft
    return (
        f"this user may have {many} processes and threads, and the cgroup or the machine may allow fewer; raise the limit "
        "(ulimit -u, pids.max)"
    )


def metrics_wanted() -> bool:
    """Whether runners that start now measure their calls: PERCORE_METRICS is not 0."""
    return os.environ.get("PERCORE_METRICS") != "0"


def debug_wanted() -> bool:
    """Whether runners that start now audit themselves: PERCORE_DEBUG is 1."""
    return os.environ.get("PERCORE_DEBUG") == "1"


def uvloop_wanted() -> bool:
    """Whether the default loop of workers may be uvloop. It must also be installed."""
    return "uvloop" not in _without


def has_greenlets() -> bool:
    """Return whether gevent has replaced threads by greenlets (`monkey.patch_all()`)."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def new_loop() -> AbstractEventLoop:
    """Return a new event loop: uvloop's if it is wanted and installed, otherwise asyncio's.

    Where gevent has replaced threads by greenlets, it is asyncio's: its selector lets other greenlets run, and uvloop does not.
    """
    if uvloop_wanted() and not has_greenlets():
        with suppress(ImportError):
            import uvloop

            return uvloop.new_event_loop()
    import asyncio

    return asyncio.new_event_loop()


def default_start_method() -> str:
    """Return "forkserver" if the system has pidfds and F_SETSIG, which percore's fork server needs, else "spawn"."""
    return "forkserver" if HAS_PIDFD and HAS_SETSIG else "spawn"


# Memory left for large payloads. A process that touches more shared memory than is left is killed, not refused. This is a best
# effort, since other processes take memory at the same time. So callers leave a margin, and check again while they write a long
# payload.

MARGIN = 16 << 20 if HAS_MEMFD else 0
"""Bytes of fresh pages written between two checks, so that a check takes less time than the writing. 0 for files on a disk."""

_CGROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60
_V2 = ("memory.max", "memory.current", b"inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")


def room_left() -> int | None:
    """Return how many bytes the machine and this process's cgroups, or the disk, have left. None if the system does not say."""
    if HAS_MEMFD:
        return min(_rooms(), default=None)
    import tempfile  # seldom needed, and not cheap to import

    status = os.statvfs(tempfile.gettempdir())
    return status.f_bavail * status.f_frsize


def _rooms() -> Iterator[int]:
    with suppress(OSError, KeyError, ValueError):
        fields = _fields("/proc/meminfo")
        yield (fields[b"MemAvailable:"] + fields[b"SwapFree:"]) * 1024
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                yield from _of_cgroup(_CGROUPS, path, _V2)
            elif "memory" in controllers.split(","):
                yield from _of_cgroup(f"{_CGROUPS}/memory", path, _V1)


def _of_cgroup(root: str, path: str, names: tuple[str, str, bytes]) -> Iterator[int]:
    """Yield the bytes left in this cgroup and its parents. In a container the path may be the host's; then only the root exists."""
    most, used, cache = names
    parts = path.strip("/").split("/") if path != "/" else []
    for depth in range(len(parts) + 1):
        folder = "/".join([root, *parts[:depth]])
        # Without a limit the file has "max", which is not a number, or a number beyond all memory. Then the usage is not read.
        with suppress(OSError, KeyError, ValueError):
            if (limit := _number(f"{folder}/{most}")) < _NO_LIMIT:
                yield limit - _number(f"{folder}/{used}") + _fields(f"{folder}/memory.stat")[cache]


def _number(path: str) -> int:
    with open(path, "rb", buffering=0) as file:
        return int(file.read(64))


def _fields(path: str) -> dict[bytes, int]:
    with open(path, "rb", buffering=0) as file:
        words = (line.split() for line in file.read(1 << 16).splitlines())
        return {row[0]: int(row[1]) for row in words if len(row) > 1}
