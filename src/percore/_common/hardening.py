"""Closes processes to others of the same user (`Runner(harden=True)`), by prctl of Linux.

A closed process has PR_SET_DUMPABLE = 0: only root may trace it, read its memory, environment and descriptors, or get a core dump
of it. Its forks are closed, too; a program that it executes is open again. PR_SET_NO_NEW_PRIVS takes the way to other rights:
programs that it starts, and those that they start, never have more than it has.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_DUMPABLE: Final = 4
_NO_NEW_PRIVS: Final = 38


class Closed:
    """Whether this program, or the one that it is a fork of, was closed."""

    is_program = False


def can_close() -> bool:
    """Whether this system and this Python can close a process."""
    return _prctl() is not None


def close_program() -> None:
    """Close this program to others of its user, for good. Workers that are forked from now on are closed from their beginning.

    Raises:
        OSError: the system refuses it.
    """
    if not Closed.is_program:
        close_process()
        Closed.is_program = True


def close_process() -> None:
    """Close this process to others of its user.

    Raises:
        OSError: the system refuses it.
    """
    _set(_DUMPABLE, 0, "PR_SET_DUMPABLE")


def renounce_privileges() -> None:
    """Give up that this thread, and those that it starts, get more rights by the programs that they execute.

    Raises:
        OSError: the system refuses it.
    """
    _set(_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def _set(option: int, value: int, name: str) -> None:
    prctl = _prctl()
    assert prctl is not None, "the options of a runner are checked"
    if prctl(option, value, 0, 0, 0):
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, f"harden=True: the system refuses prctl({name}), errno {number}")


@cache
def _prctl() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    try:
        import ctypes  # seldom needed, and not cheap to import

        found: Any = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, AttributeError, OSError):  # a Python that was built without it, or a C library that hides it
        return None
    found.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    found.restype = ctypes.c_int
    return found  # type: ignore[no-any-return]
