"""Finds the programs of this user that use percore, and reads their pages through /proc."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from percore._monitor.page import PAGE_NAME, NoPage, decode

_TRIES: Final = 20
"""How often a page that is being written is read again."""

_PAUSE: Final = 0.002
"""Seconds between two of these readings."""

_LINKS: Final = (f"/memfd:{PAGE_NAME}", f"/memfd:{PAGE_NAME} (deleted)")


class ProgramGone(Exception):
    """The program has ended, or it has no runner any more."""


def why_refused(pid: int) -> str:
    """Return why the system does not let this user look into a process."""
    with suppress(OSError, StopIteration, ValueError):
        users = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:"))
        if int(users.split()[1]) == os.getuid():  # the kernel gives its folder in /proc to root
            return "is closed to all but root, as percore.Runner(harden=True) does"
    return "belongs to another user"


@dataclass(frozen=True, slots=True)
class Program:
    """A process with runners.

    Attributes:
        pid: its process id.
        name: the name of its script, or of its interpreter if it has none.
        command: its command line.
    """

    pid: int
    name: str
    command: str


def programs() -> list[Program]:
    """Return the programs of this user that have a page, by process id."""
    found = [_program(pid) for pid in _pids() if _paths(pid)]
    return [one for one in found if one is not None]


def read(pid: int) -> list[dict[str, Any]]:
    """Return the pages of a program, in the order in which its runners were made.

    Raises:
        ProgramGone: it has none.
        PermissionError: it belongs to another user, or is closed to all but root.
    """
    pages = []
    for path in _paths(pid, strict=True):
        with suppress(OSError, NoPage, KeyError):  # a later version of percore may write another page
            page = _page(path)
            if page["pid"] == pid:  # else it is that of a parent, in a fork that has inherited it
                pages.append(page)
    if not pages:
        raise ProgramGone
    return sorted(pages, key=lambda page: int(page["number"]))


def _page(path: Path) -> dict[str, Any]:
    for _ in range(_TRIES):
        with suppress(NoPage), opened(path, PAGE_NAME, os.O_RDONLY) as fd:
            return decode(os.pread(fd, os.fstat(fd).st_size, 0))
        time.sleep(_PAUSE)
    raise NoPage("it never was whole")


@contextmanager
def opened(path: Path, name: str, mode: int) -> Iterator[int]:
    """Open a descriptor of another process that is a memfd of this name. Its number may be that of another file meanwhile.

    Such a file is closed at once. If it is a pipe, opening it does not wait.

    Raises:
        OSError: the process has closed the memfd, or has ended.
    """
    fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{name}"):
            raise FileNotFoundError(path)
        yield fd
    finally:
        os.close(fd)


def _pids() -> Iterator[int]:
    own = os.getuid()
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdecimal() and (own == 0 or entry.stat().st_uid == own):
                yield int(entry.name)


def _paths(pid: int, *, strict: bool = False) -> list[Path]:
    """Return the paths of the descriptors of a process that are pages. `strict`: raise if it is not this user's."""
    folder, found = Path(f"/proc/{pid}/fd"), []
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []
    except PermissionError:
        if strict:
            raise
        return []
    for name in names:
        try:
            if os.readlink(folder / name) in _LINKS:
                found.append(folder / name)
        except PermissionError:  # root without its capabilities may list them
            if strict:
                raise
        except OSError:
            pass
    return found


def _program(pid: int) -> Program | None:
    try:
        name = read(pid)[0].get("program", "")
        # One line: what follows `-c` may have several.
        command = " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split())
    except (ProgramGone, OSError):
        return None
    return Program(pid, name or command.split(" ")[0], command)
