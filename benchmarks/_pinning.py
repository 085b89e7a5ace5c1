"""Which CPUs a row's processes run on. A round trip takes several times as long across two CPUs as on one, and the kernel
places two processes as it likes: where that decides the figure, both sides are placed by hand, and alike."""

from __future__ import annotations

import enum
import os
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable


class Pin(enum.Enum):
    """Where the processes of a row run. Without two CPUs, or elsewhere than on Linux: wherever they like."""

    NOTHING = "wherever they like"
    TWO = "everything on the same two CPUs"
    APART = "this process on one CPU, all others on a second one"

    def apply(self) -> None:
        """Every thread of this process and of every process that it has started, from now on."""
        cpus = two_cpus()
        if self is Pin.NOTHING or cpus is None:
            return
        here, there = cpus
        ours, theirs = ({here}, {there}) if self is Pin.APART else ({here, there}, {here, there})
        _pin(psutil.Process(), ours)
        for child in psutil.Process().children(recursive=True):
            _pin(child, theirs)


_USABLE = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
"""As it was before anything was pinned."""


def two_cpus() -> tuple[int, int] | None:
    return (_USABLE[0], _USABLE[1]) if len(_USABLE) >= 2 else None


def _pin(process: psutil.Process, cpus: set[int]) -> None:
    for thread in _threads_of(process):
        if sys.platform == "linux":
            try:
                os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                continue  # it has ended meanwhile, and needs no CPU


def _threads_of(process: psutil.Process) -> Iterable[int]:
    try:
        return [thread.id for thread in process.threads()]
    except psutil.NoSuchProcess:
        return []
