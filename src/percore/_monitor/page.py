"""The page of a runner: what `percore top` shows of it, in shared memory that other processes of the same user find and read.

A page is a memfd whose name begins with PAGE_NAME. Nobody maps it: the program writes it with one system call, and readers open it
through /proc/PID/fd. It holds a head and a JSON object:

    8 bytes   MAGIC, with the version of the format
    4 bytes   number of bytes of the JSON, little endian
    4 bytes   their CRC-32
    ...       the JSON, UTF-8

A reader that meets a page in the middle of a write finds a wrong checksum, and reads again.
"""

import fcntl
import json
import os
import sys
import zlib
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from percore._monitor.statistics import Statistics
    from percore._monitor.usage import ProcessUsage

PAGE_NAME: Final = "percore-page"
"""The name of the memfd, as /proc shows it after `/memfd:`."""

MAGIC: Final = b"percore\x01"
_HEAD: Final = len(MAGIC) + 8
_MOST: Final = 1 << 20
"""Largest page in bytes. One with more functions shows the first ones."""

_KINDS: Final = {"pid": int, "number": int, "program": str, "statistics": dict}
"""What every version writes. A page is that of another program, which may be broken."""


class NoPage(Exception):
    """What was read is no page, or one that is being written."""


def page_of(
    statistics: "Statistics", number: int, at: float, due: float | None, elsewhere: "Sequence[ProcessUsage]" = ()
) -> dict[str, Any]:
    """Return the object of a page.

    `number`: that of the runner in this program, from 1. `at` and `due`: the times of this page and of the next one, as
    `time.monotonic()`; None: the runner is at rest.
    `elsewhere`: what processes on other machines use; those who read the page look at the processes of this one themselves.
    """
    return {
        "pid": os.getpid(),
        "number": number,
        "program": os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "",
        "at": at,
        "due": due,
        "statistics": _plain(statistics),
        "elsewhere": _plain(tuple(elsewhere)),
    }


@cache
def _names(kind: Any) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _plain(value: object) -> Any:
    """Return records as dicts. `dataclasses.asdict` would copy every value."""
    kind: Any = type(value)
    names = _names(kind)
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def encode(body: dict[str, Any]) -> bytes:
    """Return the bytes of a page. Functions that do not fit are left out, the last ones first."""
    data = json.dumps(body, separators=(",", ":")).encode()
    while len(data) > _MOST and body["statistics"]["functions"]:
        functions = body["statistics"]["functions"]
        del functions[len(functions) // 2 :]
        data = json.dumps(body, separators=(",", ":")).encode()
    return MAGIC + len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def decode(data: bytes) -> dict[str, Any]:
    """Return the object of a page.

    Raises:
        NoPage: these bytes are none, or a write was under way when they were read.
    """
    if len(data) < _HEAD or data[: len(MAGIC)] != MAGIC:
        raise NoPage("it does not begin as a page of this version of percore does")
    length, checksum = (int.from_bytes(data[at : at + 4], "little") for at in (len(MAGIC), len(MAGIC) + 4))
    body = data[_HEAD : _HEAD + length]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise NoPage("it is being written")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoPage("it holds no JSON") from error
    if type(found) is not dict or not all(type(found.get(name)) is kind for name, kind in _KINDS.items()):
        raise NoPage("it holds no object, or not that of a page")
    return found


class PageFile:
    """The memfd of a page. It goes with its descriptor, at the latest with the process."""

    def __init__(self) -> None:
        """Create an empty page.

        Raises:
            OSError: the system has no memfd, or no descriptor is left.
        """
        fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC)
        try:
            self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # never a standard stream
        finally:
            os.close(fd)
        _open.add(self)

    def write(self, data: bytes) -> None:
        """Replace what the page holds."""
        if self._fd >= 0:
            os.pwrite(self._fd, data, 0)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        fd, self._fd = self._fd, -1
        _open.discard(self)
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close the page of a runner that was dropped and never closed."""
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


_open: Final[WeakSet[PageFile]] = WeakSet()


def _forked() -> None:
    """In a fork: close the pages, which are the parent's."""
    for page in list(_open):
        page.close()


os.register_at_fork(after_in_child=_forked)
