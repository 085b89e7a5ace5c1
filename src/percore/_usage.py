"""What a runner's processes use of the machine, as the system tells it.

psutil is imported with the first reading, in its thread: neither `import percore` nor a worker pays for it.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from psutil import Process


_LEAST: Final = 1.0
"""Seconds between two readings of CPU time that are compared: with fewer, a step of the system's count is seen as a load."""

_Reading: TypeAlias = tuple[float, float]
"""CPU time used, and when."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process.

    Attributes:
        pid: its process id.
        role: "supervisor", "fork server", or "worker 0" and so on.
        rss: bytes it has in physical memory, whoever else has them too: shared memory, and what it has inherited by a fork.
        uss: bytes in physical memory that it alone has, and that its end would free. None where the system does not tell.
        cpu: percent of one CPU: 100.0 is one CPU all the time, and threads together can use more. It is the CPU time used since
            the runner's latest `usage()` that is a second old or older, over the time since then; where there is none, since the
            process was started. The system counts in steps, often of 10 ms, which would make a shorter time a guess.
        threads: how many it has.
    """

    pid: int
    role: str
    rss: int
    uss: int | None
    cpu: float
    threads: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What the supervisor and its workers use: memory, CPU and threads, process by process.

    `str()` of it is a table for people: PID, RES, USS, %CPU and threads, and a line of totals. RES of the total counts what
    processes share once for each of them; USS can be added up.

    Attributes:
        processes: those that were there, the supervisor first.
    """

    processes: tuple[ProcessUsage, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("PID", "process", "RES", "USS", "%CPU", "threads")]
        rows += [(str(one.pid), one.role, *_figures(one.rss, one.uss, one.cpu, one.threads)) for one in self.processes]
        rows.append(("", "total", *self._totals()))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_line(row, widths) for row in rows)

    def _totals(self) -> tuple[str, ...]:
        known = [one.uss for one in self.processes if one.uss is not None]
        return _figures(
            sum(one.rss for one in self.processes),
            sum(known) if len(known) == len(self.processes) else None,
            sum(one.cpu for one in self.processes),
            sum(one.threads for one in self.processes),
        )


def _figures(rss: int, uss: int | None, cpu: float, threads: int) -> tuple[str, ...]:
    return _mebibytes(rss), "-" if uss is None else _mebibytes(uss), f"{cpu:.1f}", str(threads)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    """Figures to the right, the role to the left."""
    pid, role, *figures = (text.rjust(width) for text, width in zip(row, widths, strict=True))
    return "  ".join((pid, role.strip().ljust(widths[1]), *figures))


class UsageMeter:
    """Reads what processes use, and remembers their CPU time for the next reading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a reading whose caller was cancelled may still be under way when the next one begins
        self._before: dict[Process, tuple[_Reading, ...]] = {}

    async def read(self, roles: Mapping[int, str]) -> Usage:
        """The usage of these processes, by pid and role, in their order; read in a thread of its own.

        A process that has ended, ends meanwhile, or may not be looked at is left out. Cancelled: returns at once; the thread
        finishes its reading, a matter of milliseconds, and this one counts as the previous reading.
        """
        reading: Future[Usage] = Future()
        # Not by the loop's executor: the user may have filled it with calls that never end.
        threading.Thread(target=self._read_into, args=(reading, dict(roles)), name="percore-usage", daemon=True).start()
        return await asyncio.wrap_future(reading)

    def _read_into(self, reading: "Future[Usage]", roles: Mapping[int, str]) -> None:
        if reading.set_running_or_notify_cancel():
            try:
                usage = self._read(roles)
            except BaseException as error:
                reading.set_exception(error)
            else:
                reading.set_result(usage)

    def _read(self, roles: Mapping[int, str]) -> Usage:
        with self._lock:
            before, self._before = self._before, {}
            found = (self._measure(pid, role, before) for pid, role in roles.items())
            return Usage(tuple(one for one in found if one is not None))

    def _measure(self, pid: int, role: str, before: "dict[Process, tuple[_Reading, ...]]") -> ProcessUsage | None:
        import psutil

        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and only has not been waited for
                return None
            times = process.cpu_times()
            used, now = times.user + times.system, time.monotonic()
            # A Process stands for its pid and its start: another process with the same pid is another key.
            # A start is told by the wall clock alone.
            readings = before.get(process) or ((0.0, now - (time.time() - process.create_time())),)
            (used_then, then), self._before[process] = _compared(readings, (used, now))
            return ProcessUsage(
                pid=pid,
                role=role,
                rss=process.memory_info().rss,
                uss=_uss(process),
                cpu=_percent(used - used_then, now - then),
                threads=process.num_threads(),
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None


def _uss(process: "Process") -> int | None:
    import psutil

    # psutil 8 has this name for it, and warns of the older one.
    read: Any = getattr(process, "memory_footprint", None) or process.memory_full_info
    try:
        size: int | None = getattr(read(), "uss", None)
    except psutil.AccessDenied:
        return None
    return size


def _compared(readings: tuple[_Reading, ...], latest: _Reading) -> tuple[_Reading, tuple[_Reading, ...]]:
    """Which earlier reading, one of two at most, the latest one is compared with; and the readings for the next time."""
    last = readings[-1]
    if latest[1] - last[1] >= _LEAST:
        return last, (last, latest)
    return readings[0], (readings[0], latest if len(readings) == 1 else last)


def _percent(used: float, seconds: float) -> float:
    """Seconds of CPU time within so many seconds, in percent of one CPU."""
    # No process uses more than all CPUs. Where it looks so, the clock was set, or a step of the system's count fell into a short
    # time: then this is the longest time in which it can have used so much.
    seconds = max(seconds, used / (os.cpu_count() or 1))
    return 100 * used / seconds if used > 0 else 0.0
