"""How much memory is left for large payloads: who touches more is killed, where an allocator would refuse.

Best effort: others take memory at the same time. So what is asked for has to leave a margin, and a long payload asks again.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

from percore._platform import HAS_MEMFD

MARGIN = 16 << 20 if HAS_MEMFD else 0
"""Bytes of fresh pages that are touched without asking: writing them takes longer than asking. A file's room is asked at once."""

_CGROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60
_V2 = ("memory.max", "memory.current", b"inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")


def room_left() -> int | None:
    """Bytes that may still be touched: of the machine and of this process's cgroups, or of the disk. None: nobody tells."""
    if HAS_MEMFD:
        return min(_rooms(), default=None)
    import tempfile  # as for the files themselves

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
    """What this cgroup and those around it have left. In a container the path may be the host's: only the root is there."""
    most, used, cache = names
    parts = path.strip("/").split("/") if path != "/" else []
    for depth in range(len(parts) + 1):
        folder = "/".join([root, *parts[:depth]])
        # Without a limit it says "max", which is no number, or one beyond all memory; what it has used is then not worth asking.
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
