"""The title of a process: its command line, as `ps`, `top` and /proc show it.

The kernel shows the memory into which it put the arguments when the process was started. A program may write there. If the last
byte of that memory is not NUL, the kernel takes the memory for a title and shows it up to the first NUL.

Nothing of Python reads that memory after its start: `sys.argv` and `sys.orig_argv` are copies. The title never grows beyond it,
because the environment follows. It is written through /proc/self/mem: where the memory is gone or sealed, that raises an error,
and a write to the address would crash.

The library setproctitle looks for the arguments in that memory when it is first used. So if it is installed, it writes the title:
then code in a worker can use it, too.

On systems without /proc, processes keep their command lines.
"""

import contextlib
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any, Final

_LEAST: Final = len("percore: worker 1023") + 2
"""Bytes of arguments below which a title would not fit. A fork of a program that was started as `python x.py` has so few."""

_SHORT: Final = 15
"""The longest name that the kernel keeps for a process, in bytes."""

_NO_NAME: Final = frozenset({"", "-", "-c", "-m"})

_SPAN: Final = slice(45, 47)
"""Fields 48 and 49 of proc(5), from the third one on: where the memory of the arguments begins and ends."""


def program_name() -> str:
    """Return the name of the program by `sys.argv`: of its script, or of the package that `python -m` runs. Empty: it has none."""
    path = str(next(iter(getattr(sys, "argv", ())), ""))
    if path in _NO_NAME:
        return ""
    folder, name = os.path.split(path)
    return os.path.basename(folder) if name == "__main__.py" else name


def set_title(what: str, program: str, short: str) -> None:
    """Show this process as `percore: <what> of <program>`, or by its short name if there is no room. Never raises."""
    text = f"percore: {what}" + f" of {program}" * bool(program)
    library = _library()
    if library is None:
        _set_own(os.fsencode(text), short)
    else:
        with contextlib.suppress(Exception):  # as it does itself where it cannot set titles
            library.setproctitle(text)


@cache
def _library() -> Any:
    """Return setproctitle, or None. The fork server looks for it once for all its workers, which would search the path again."""
    try:
        return import_module("setproctitle")
    except Exception:  # not installed, or unusable here
        return None


def _set_own(title: bytes, short: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a sandbox that hides this
        first, end = _arguments()
        if end - first >= _LEAST:
            _write(title, first, end)
            return
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as comm:
        comm.write(os.fsencode(short)[:_SHORT])


def _arguments() -> tuple[int, int]:
    """Return where the memory of this process's arguments begins and ends.

    Raises:
        OSError, ValueError: the system does not say.
    """
    with open("/proc/self/stat", "rb") as file:
        return _arguments_in(file.read())


def _arguments_in(stat: bytes) -> tuple[int, int]:
    # The second field is the name in parentheses, which may contain anything. The third one follows them.
    fields = stat.rpartition(b")")[2].split()
    first, end = map(int, fields[_SPAN])  # a ValueError where there are fewer: user-mode QEMU makes a file of its own
    return first, end if first else first


def _write(title: bytes, first: int, end: int) -> None:
    memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(memory, title[: end - first - 2] + b"\0", first)
        os.pwrite(memory, b".", end - 1)  # not NUL: from now on this memory is a title
    finally:
        os.close(memory)
