"""The memory of a process that becomes free when it ends: its unique set size (USS), without percore's shared memory.

A page of shared memory that only one process has touched counts as private in the system's figures. It is a message under way, and
stays when the process ends.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Final

_PRIVATE: Final = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
_SHARED: Final = re.compile(r" /(memfd:percore|.*/percore-[^/]*) \(deleted\)$")
"""The name of a mapping of percore's shared memory, with or without memfd."""


def memory_of(pid: int, enough: int) -> int | None:
    """Return how many bytes of memory a process has for itself; None if it has ended or the system does not tell.

    A figure of at most `enough` may include percore's shared memory, which is costly to tell apart.
    """
    try:
        size = own_bytes(_lines(f"/proc/{pid}/smaps_rollup"))
        if size > enough:
            size = min(size, own_bytes(_lines(f"/proc/{pid}/smaps")))
        return size or None  # a process that has ended and was not reaped has none
    except FileNotFoundError:
        return _by_psutil(pid)
    except PermissionError:  # its mappings are closed to this user (`harden=True`), and its sums are open to all
        return _by_sums(pid)
    except OSError:  # the process has ended, or may not be inspected
        return None


def resident_memory() -> int:
    """Return how many bytes of memory this process has; 0 if the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_lines("/proc/self/statm")[0].split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def own_bytes(smaps: Iterable[str]) -> int:
    """Return the bytes of private memory in the text of a /proc/PID/smaps or smaps_rollup, without percore's shared memory.

    In a mapping of that memory only copies that the process has made by writing count: they are anonymous.
    """
    kibibytes = 0
    counted: tuple[str, ...] = _PRIVATE
    for line in smaps:
        name, _, rest = line.partition(":")
        if " " in name:  # the first line of a mapping: addresses, permissions, offset, device, inode, name
            counted = ("Anonymous",) if _SHARED.search(line.rstrip()) else _PRIVATE
        elif name in counted:
            kibibytes += int(rest.split()[0])
    return kibibytes * 1024


def _lines(path: str) -> list[str]:
    with open(path, errors="surrogateescape") as file:
        return file.readlines()


def _by_sums(pid: int) -> int | None:
    """Return the anonymous memory of a process, with the pages that it shares with the process which has forked it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, resident, shared, *_ = map(int, _lines(f"/proc/{pid}/statm")[0].split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE") or None
    return None


def _by_psutil(pid: int) -> int | None:
    """Return the figure on systems without /proc/PID/smaps_rollup."""
    import psutil

    from percore._monitor.usage import uss_of

    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        size = uss_of(process)
        return process.memory_info().rss if size is None else size
    return None
