"""The examination of a worker process that reads nothing: does it run, and where are its threads?

Each worker answers ASK_SIGNAL between two steps of its main thread, and has faulthandler's handler for STACKS_SIGNAL, which is C
code that needs neither the GIL nor the loop. Both write the stacks of all threads to a file in memory. All workers of an engine
share this file, so one is examined at a time, and other programs that read stacks keep out meanwhile (`stacks_file`).
"""

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from percore._common.sure_handles import SureHandle, surely_later
from percore._engines.processes.descriptors import anonymous_file, let_go
from percore._engines.processes.launch import Process
from percore._protocol.interfaces import Condition
from percore._worker_process import stacks_file
from percore._worker_process.boot import ASK_SIGNAL, STACKS_NAME, STACKS_SIGNAL

if TYPE_CHECKING:
    import signal

_WINDOW: Final = 0.1
"""Seconds over which a process is watched: the usual period of a cgroup's CPU quota. Writing stacks takes far less."""
_PATIENCE: Final = 0.4
"""Seconds after which a process that has not answered is asked by STACKS_SIGNAL: C code holds its GIL or its main thread."""
_LATEST: Final = 1.0
"""Seconds after which a process that has written no stacks will not write any: its handler was replaced, or it gets no CPU."""
_TRY_AGAIN: Final = 0.01
"""Seconds after which the file is tried again that another program has: it reads the stacks of one worker in less."""
_MOST_TRIES: Final = 100
"""Tries after which the file is used all the same: the other program has been stopped in the middle."""
_MOST_BYTES: Final = 1 << 18
"""Bytes of stacks that are read. A hundred threads of a hundred frames each have more."""
_PACKAGE: Final = __file__.removesuffix(os.path.join("_engines", "processes", "examination.py"))
_OF_LOOP: Final = r'File ".*[/\\\\]asyncio[/\\\\]\w+\.py"'
"""The frames of an event loop that runs a callback or a task of the user's own."""
_MOSTLY: Final = 0.8
"""The share of a window in which a process had to wait for a CPU, from which on it counts as starved."""


class CpuTimes(NamedTuple):
    """Nanoseconds that the main thread of a process has waited for a CPU, and its cgroup for its quota."""

    waited: int
    throttled: int


class _Examination(NamedTuple):
    pid: int
    process: Process
    told: Callable[[Condition], None]


class Examiner:
    """Examines the workers of one engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create the file.

        Raises:
            OSError: no descriptor is left.
        """
        self._loop = loop
        self._file = anonymous_file(b"", STACKS_NAME)
        self.fd = self._file.number
        """For each worker: where its stacks go."""
        self._waiting: deque[_Examination] = deque()
        self._timer: SureHandle | None = None

    def examine(self, pid: int, process: Process, told: Callable[[Condition], None]) -> None:
        """Examine a process, when those before it have been examined, and call `told`."""
        self._waiting.append(_Examination(pid, process, told))
        if self._timer is None:
            self._begin()

    def forget(self, process: Process) -> None:
        """Call nobody any more about this process, which has ended."""
        self._waiting = deque(one for one in self._waiting if one.process is not process)

    def close(self) -> None:
        """Examine nothing more. Idempotent."""
        self._waiting.clear()
        if self._timer is not None:
            self._stop_timer()
            stacks_file.release(self.fd)
        let_go(self._file)

    def _go_on(self, seconds: float, step: Callable[..., None], *args: object) -> None:
        before, self._timer = self._timer, surely_later(self._loop, seconds, step, *args)
        if before is not None:
            before.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, tries: int = 0) -> None:
        """Examine the first that waits, once no other program uses the file. Others get it between two examinations."""
        self._stop_timer()
        stacks_file.release(self.fd)
        if not self._waiting:
            return
        stacks_file.claim(self.fd)
        if not stacks_file.take(self.fd) and tries < _MOST_TRIES:
            self._go_on(_TRY_AGAIN, self._begin, tries + 1)
            return
        one = self._waiting[0]
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)  # for the workers too: they share the position
        before = _cpu_times(one.pid)
        started = self._loop.time()
        one.process.kill(ASK_SIGNAL if stacks_file.HAS_LOCKS else STACKS_SIGNAL)
        further: list[tuple[signal.Signals | None, float]] = [(None, _LATEST)]
        if stacks_file.HAS_LOCKS:
            further = [(STACKS_SIGNAL, _LATEST), (None, _PATIENCE)]
        self._go_on(_WINDOW, self._look, one, before, started, further)

    def _look(
        self, one: _Examination, before: CpuTimes, started: float, further: "list[tuple[signal.Signals | None, float]]"
    ) -> None:
        """Tell the findings. `further`: what else to send, and how long to wait then, while there are none; the last one first."""
        if not self._waiting or self._waiting[0] is not one:  # it has ended
            self._begin()
            return
        seconds = self._loop.time() - started
        obstacle = _obstacle(one.pid, before, seconds)
        stacks = os.pread(self.fd, _MOST_BYTES, 0).decode(errors="replace")
        if not obstacle and not stacks and further:
            signum, wait = further.pop()
            if signum is not None:
                one.process.kill(signum)
            self._go_on(wait, self._look, one, before, started, further)
            return
        self._waiting.popleft()
        try:
            one.told(told_by(stacks, obstacle))
        finally:
            self._begin()


def _obstacle(pid: int, before: CpuTimes, seconds: float) -> str:
    """Return why the process does not run, or an empty string."""
    if state_of(_text(f"/proc/{pid}/stat")) in ("T", "t"):
        return "its process is stopped, by a signal or a debugger"
    now = _cpu_times(pid)
    waited, throttled = (now.waited - before.waited) / 1e9 / seconds, (now.throttled - before.throttled) / 1e9 / seconds
    if throttled >= _MOSTLY:
        return f"its cgroup has used up its CPU quota (it was throttled for {min(throttled, 1):.0%} of the time)"
    if waited >= _MOSTLY:
        return f"its process gets too little CPU time (it waited for a CPU for {min(waited, 1):.0%} of the time)"
    return ""


def told_by(text: str, obstacle: str) -> Condition:
    """Return the condition of a worker process that has written this text."""
    stacks, is_between_steps, call = stacks_file.without_call(text)
    return condition_of(stacks, "Current thread", call, obstacle, is_stuck=not is_between_steps)


def condition_of(stacks: str, loop: str, call: int | None = None, obstacle: str = "", *, is_stuck: bool = False) -> Condition:
    """Return the condition of a worker with these stacks.

    `loop`: how the head of its loop's thread begins. `is_stuck`: whether C code holds the loop's thread, or the GIL.
    """
    threads = _users(stacks)
    blocking = [lines for lines in threads if lines[0].startswith(loop)]
    if not blocking and is_stuck and len(threads) == 1:  # no other thread can hold the GIL
        blocking = threads
    return Condition(obstacle, _text_of(threads) or stacks.strip(), call, _outermost(blocking[0]) if blocking else "")


def without_own(stacks: str) -> str:
    """Return the stacks without percore's frames below the user's, and without threads that run percore's code alone."""
    return _text_of(_users(stacks)) or stacks.strip()


def _text_of(threads: list[list[str]]) -> str:
    return "\n\n".join(map("\n".join, threads))


def _users(stacks: str) -> list[list[str]]:
    """Return the threads that run the user's code: their heads, and their lines without percore's frames below the user's."""
    threads: list[list[str]] = []
    for thread in stacks.strip().split("\n\n"):
        lines = thread.splitlines()
        threads.append(lines[: next((number for number, line in enumerate(lines) if f'File "{_PACKAGE}' in line), len(lines))])
    return [lines for lines in threads if len(lines) > 1]


def _outermost(lines: list[str]) -> str:
    """Return the name of the outermost function of the user's."""
    named = [line.rpartition(" in ")[2] for line in lines[1:] if not re.search(_OF_LOOP, line)]
    return named[-1] if named else ""


def state_of(stat: str) -> str:
    """Return the state of a process from its /proc/PID/stat, such as "T" for stopped; empty if there is none."""
    return stat.rpartition(")")[2][1:2]


def _cpu_times(pid: int) -> CpuTimes:
    """Return the times of a process. A time that the system does not report counts as 0."""
    waited = throttled = 0
    with suppress(ValueError, IndexError):
        waited = int(_text(f"/proc/{pid}/task/{pid}/schedstat").split()[1])
    with suppress(ValueError):
        throttled = _throttled(_text(f"/proc/{pid}/cgroup"))
    return CpuTimes(waited, throttled)


def _throttled(cgroups: str) -> int:
    """Return the nanoseconds for which the cgroup of a process was throttled, from its /proc/PID/cgroup.

    A quota can be that of an ancestor, and only the cgroup with the quota counts how long it was throttled. In a container the path
    may be the host's; then only the root exists.
    """
    found = [0]
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _fields_of_cgroups("/sys/fs/cgroup", path, "throttled_usec", 1000)
        elif "cpu" in controllers.split(","):
            found += _fields_of_cgroups("/sys/fs/cgroup/cpu", path, "throttled_time", 1)
    return max(found)


def _fields_of_cgroups(root: str, path: str, field: str, unit: int) -> Iterator[int]:
    names = path.strip("/").split("/")
    for count in range(len(names) + 1):
        for words in map(str.split, _text("/".join((root, *names[:count], "cpu.stat"))).splitlines()):
            if words[0] == field:
                yield int(words[1]) * unit


def _text(path: str) -> str:
    with suppress(OSError), open(path, errors="surrogateescape") as file:
        return file.read()
    return ""
