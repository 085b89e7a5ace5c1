"""How much memory is left for large payloads. A process that touches more shared memory than is left is killed, not refused.

This is a best effort, since other processes take memory at the same time. So callers must leave a margin, and must check again
while they write a long payload.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

from percore._platform import HAS_MEMFD

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
