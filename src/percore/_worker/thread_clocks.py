"""How long the threads of this process have computed, as the system tells.

A thread that is ready to run and gets no CPU counts as one that computes: other processes have it.
"""

import os
import sys
import time
from functools import cache
from typing import Final

_PROC: Final = "/proc"
"""Where the threads of this process are looked up: as /proc/TID, which /proc does not list, and not as /proc/self/task/TID.

Linux forgets an entry of the latter kind slowly if the thread lives as long as its process: the parent, which waits for the end of
that process, needed 20 to 90 ms of CPU for it (Linux 6.18).
"""


@cache
def _are_listed(pid: int) -> bool:
    """Whether /proc knows this process by its pid. That of another PID namespace shows other processes under these numbers."""
    try:
        return os.readlink(f"{_PROC}/self") == str(pid)
    except OSError:
        return False


def _of_process(_tid: int) -> float:
    """Return how long this process has computed: threads of other systems cannot be asked."""
    return time.process_time()


def _of_thread(tid: int) -> float:
    """Return how many seconds a thread of this process has computed, or was able to while other processes had the CPU."""
    try:
        cpu = time.clock_gettime(~tid << 3 | 6)  # the clock of a thread: see clock_getcpuclockid(3)
        if not _are_listed(os.getpid()):
            return cpu
        with open(f"{_PROC}/{tid}/schedstat", "rb", buffering=0) as file:  # called every few milliseconds
            return cpu + int(file.read(64).split()[1]) / 1e9
    except (OSError, ValueError, IndexError, OverflowError):  # the system has no such file
        return time.process_time()


def wants_cpu(tid: int) -> bool:
    """Whether a thread of this process is ready to run. The time for which it waits for a CPU is known only once it runs again.

    A thread that waits for the GIL is not ready to run. But it has run until this thread asked for the GIL, so that time is known.
    """
    try:
        with open(f"{_PROC}/{tid}/stat", "rb", buffering=0) as file:  # called every few milliseconds
            return _are_listed(os.getpid()) and file.read(256).rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):
        return False


computed: Final = _of_thread if sys.platform == "linux" else _of_process


class Reading:
    """How long a thread, and the process, had computed, and when."""

    __slots__ = ("at", "computed", "process", "tid")

    def __init__(self, tid: int, at: float) -> None:
        self.tid = tid
        self.at = at
        self.computed = computed(tid)
        self.process = time.process_time()

    def until(self, now: "Reading") -> tuple[float, float]:
        """Return how many seconds in each second the thread has computed since, and the process."""
        seconds = max(1e-9, now.at - self.at)
        return min(1.0, (now.computed - self.computed) / seconds), (now.process - self.process) / seconds
