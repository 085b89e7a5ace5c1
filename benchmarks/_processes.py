"""What processes use, as the system tells it (Linux's /proc, and psutil)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable


def descendants() -> set[int]:
    """All that this process has started, and what those have."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def uss_of(pid: int | None) -> int:
    """What this process has for itself alone."""
    if pid is None:
        raise RuntimeError("there is no process to look at")
    uss: int = psutil.Process(pid).memory_full_info().uss
    return uss


def cpu_of_all(pids: Iterable[int]) -> float:
    """Seconds that the threads of these processes have run, to the nanosecond."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def forget_peaks(pids: Iterable[int]) -> None:
    """The peaks of their memory count from what they have now."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_of_all(pids: Iterable[int]) -> int:
    """The most memory that each of these processes had, added up; what several share counts for each."""
    return sum(_peak_of(pid) for pid in pids)


def _peak_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"the system does not tell the memory of process {pid}")


def own_and(pids: Iterable[int]) -> list[int]:
    return [os.getpid(), *pids]
