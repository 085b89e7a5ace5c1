"""Usage: memory, CPU and threads of a runner's processes, which `Runner.usage` reads from the system.

The first reading imports psutil, in its thread. `import percore` and the workers do not import it.
"""

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from percore._monitor.tables import Table, mebibytes
from percore._monitor.threads import in_thread

if TYPE_CHECKING:
    from psutil import Process


_LEAST: Final = 1.0
"""Least seconds between two readings of CPU time that are compared. The system counts in steps, which distort shorter intervals."""

_HEAD: Final = ("PID", "process", "RES", "USS", "%CPU", "threads")

_Reading: TypeAlias = tuple[float, float]
"""CPU time used in seconds, and the time of the reading."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Memory, CPU and threads of one process.

    Attributes:
        pid: the process id.
        role: "supervisor", "fork server", or "worker 0" and so on.
        rss: bytes in physical memory, including memory shared with other processes and pages inherited by a fork.
        uss: bytes in physical memory that no other process shares; they become free when the process ends. None if the system
            does not report it.
        cpu: CPU use in percent of one CPU. 100.0 means one CPU all the time; several threads together can use more. It is the
            average since the runner's latest `usage()` that is at least one second old, or since the process was started if there
            is none. (The system counts CPU time in steps, often of 10 ms, so a shorter interval would be inaccurate.) On a node it
            is the average of the last seconds, if the runner is busy.
        threads: number of threads.
    """

    pid: int
    role: str
    rss: int
    uss: int | None
    cpu: float
    threads: int


@dataclass(frozen=True, slots=True)
class ThreadsUsage:
    """What the system says of some threads of one process. Their memory is that of the process.

    Attributes:
        cpu: CPU use in percent of one CPU, as in ProcessUsage. None if there is no reading before.
        threads: number of threads.
    """

    cpu: float | None
    threads: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory, CPU and threads of the supervisor, the fork server and the workers, process by process.

    `str()` of it is a readable table with the columns PID, process, RES, USS, %CPU and threads, and a line of totals. The total of
    RES counts shared memory once for each process that shares it; the total of USS counts no memory twice. A notebook shows the
    table.

    Attributes:
        processes: the processes that were running, the supervisor first.
    """

    processes: tuple[ProcessUsage, ...]

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return self._table().html()

    def _table(self) -> Table:
        rows = [(str(one.pid), one.role, *_figures(one.rss, one.uss, one.cpu, one.threads)) for one in self.processes]
        return Table(_HEAD, (*rows, ("", "total", *self._totals())), frozenset({1}))

    def _totals(self) -> tuple[str, ...]:
        known = [one.uss for one in self.processes if one.uss is not None]
        return _figures(
            sum(one.rss for one in self.processes),
            sum(known) if len(known) == len(self.processes) else None,
            sum(one.cpu for one in self.processes),
            sum(one.threads for one in self.processes),
        )


def _figures(rss: int, uss: int | None, cpu: float, threads: int) -> tuple[str, ...]:
    return mebibytes(rss), "-" if uss is None else mebibytes(uss), f"{cpu:.1f}", str(threads)


class UsageMeter:
    """Reads the usage of processes, and remembers their CPU time for the next reading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a reading whose caller was cancelled may overlap with the next one
        self._before: dict[Process, tuple[_Reading, ...]] = {}

    async def read(self, roles: Mapping[int, str]) -> Usage:
        """Return the usage of these processes (role by pid), in their order. A new thread reads it.

        The result leaves out a process that has ended, ends meanwhile, or may not be inspected. If cancelled, this returns at once.
        The thread then finishes its reading within milliseconds, and the next reading is compared with it.
        """
        roles = dict(roles)
        return await in_thread("percore-usage", lambda: self.measure(roles))

    def measure(self, roles: Mapping[int, str]) -> Usage:
        """Return the usage of these processes, as `read` does, in the calling thread."""
        with self._lock:
            before, self._before = self._before, {}
            found = (self._measure(pid, role, before) for pid, role in roles.items())
            return Usage(tuple(one for one in found if one is not None))

    def _measure(self, pid: int, role: str, before: "dict[Process, tuple[_Reading, ...]]") -> ProcessUsage | None:
        import psutil

        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # it has ended and was not reaped yet
                return None
            times = process.cpu_times()
            used, now = times.user + times.system, time.monotonic()
            # psutil compares a Process by pid and start time, so a later process with the same pid is another key.
            # The system reports the start time by the wall clock only; convert it to the monotonic clock.
            readings = before.get(process) or ((0.0, now - (time.time() - process.create_time())),)
            (used_then, then), self._before[process] = _compared(readings, (used, now))
            return ProcessUsage(
                pid=pid,
                role=role,
                rss=process.memory_info().rss,
                uss=uss_of(process),
                cpu=_percent(used - used_then, now - then),
                threads=process.num_threads(),
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None


class ThreadsMeter:
    """Reads the CPU time of threads of one process, and remembers it for the next reading."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[_Reading, ...]] = {}

    def measure(self, pid: int, groups: Iterable[Sequence[int]]) -> list[ThreadsUsage | None]:
        """Return the usage of each group of threads, by the system's ids. None: no thread of it runs."""
        import psutil

        try:
            used = {one.id: one.user_time + one.system_time for one in psutil.Process(pid).threads()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            used = {}
        before, self._before, now = self._before, {}, time.monotonic()
        shares = {thread: self._share(thread, (seconds, now), before.get(thread)) for thread, seconds in used.items()}
        return [self._of_group([shares[thread] for thread in threads if thread in shares]) for threads in groups]

    def _share(self, thread: int, latest: _Reading, readings: tuple[_Reading, ...] | None) -> float | None:
        if readings is None:
            self._before[thread] = (latest,)
            return None
        earlier, self._before[thread] = _compared(readings, latest)
        return _percent(latest[0] - earlier[0], latest[1] - earlier[1], cpus=1)

    @staticmethod
    def _of_group(shares: Sequence[float | None]) -> ThreadsUsage | None:
        known = [share for share in shares if share is not None]
        return ThreadsUsage(sum(known) if known else None, len(shares)) if shares else None


def uss_of(process: "Process") -> int | None:
    """Return the unique set size of a process in bytes; None if the system does not report it, or not to this user."""
    import psutil

    # psutil 8 renamed memory_full_info to memory_footprint, and warns about the old name.
    read: Any = getattr(process, "memory_footprint", None) or process.memory_full_info
    try:
        size: int | None = getattr(read(), "uss", None)
    except psutil.AccessDenied:
        return None
    return size


def _compared(readings: tuple[_Reading, ...], latest: _Reading) -> tuple[_Reading, tuple[_Reading, ...]]:
    """Return the earlier reading to compare the latest one with, and the readings (two at most) to keep for the next time."""
    last = readings[-1]
    if latest[1] - last[1] >= _LEAST:
        return last, (last, latest)
    return readings[0], (readings[0], latest if len(readings) == 1 else last)


def _percent(used: float, seconds: float, cpus: int | None = None) -> float:
    """CPU time used within an interval, both in seconds, in percent of one CPU. `cpus`: how many it can use; None: all."""
    # No process can use more than that. If it seems to, the clock was set, or a counting step fell into a short interval. Then
    # assume the shortest interval in which the process can have used that much CPU time.
    seconds = max(seconds, used / (cpus or os.cpu_count() or 1))
    return 100 * used / seconds if used > 0 else 0.0
