"""The judge of the fault tests: it stands outside of the processes under test and believes only the kernel and files.

A program under test is a process of its own that tells its story in lines on standard output. The judge waits for these with a
limit, opens pidfds of whatever there is, kills, and looks what is left. A limit that is passed is a hang: the stacks of all
processes go into the failure.
"""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 20.0
"""Seconds after which what a test waits for counts as hung: ten times the hard bound of nearly everything."""

# Makes the terminal on standard input the controlling one, so that Ctrl-C typed there is a signal to the whole group.
_ON_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Watch:
    """Processes known by pidfds, opened while they lived."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._fds: dict[int, int] = {}
        for pid in pids:
            self.add(pid)

    def add(self, pid: int) -> None:
        """Watch one more; one that is gone already is gone."""
        if pid not in self._fds:
            with contextlib.suppress(ProcessLookupError):
                self._fds[pid] = os.pidfd_open(pid)

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Watch nobody any more."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def send(self, pid: int, signum: int) -> bool:
        """Send a signal to one of them, and to nobody else who may have its number by now. False: it is gone."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            signal.pidfd_send_signal(self._fds[pid], signum)
            return True
        return False

    def wait_gone(self, seconds: float) -> list[int]:
        """Pids that are alive after so many seconds."""
        waiting = {fd: pid for pid, fd in self._fds.items()}
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        deadline = time.monotonic() + seconds
        while waiting:
            gone = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not gone:
                break
            for fd, _ in gone:
                poller.unregister(fd)
                del waiting[fd]
        return sorted(waiting.values())

    def kill(self) -> None:
        for fd in self._fds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)


class Program:
    """A program under test: `python -m tests.e2e.fault_programs STORY ARGUMENTS`."""

    def __init__(
        self,
        *arguments: str,
        stderr: Path,
        terminal: int | None = None,
        points: str = "",
        dev: bool = False,
        module: str = "tests.e2e.fault_programs",
        prefix: Sequence[str] = (),
    ) -> None:
        """`terminal`: the program's side of a pseudo-terminal, to be its controlling one. `prefix`: a command that runs it."""
        self.stderr_path = stderr
        self._buffer = b""
        command = [*prefix, sys.executable, *(["-X", "dev", "-W", "error"] if dev else []), "-m", module, *arguments]
        if terminal is not None:
            command = [sys.executable, "-I", "-S", "-c", _ON_TERMINAL, *command]
        with open(stderr, "wb") as error:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PERCORE_POINTS": points},
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=subprocess.PIPE,
                stderr=error,
                start_new_session=terminal is not None,
            )
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with Watch(self.descendants()) as left:
            self.process.kill()
            self.process.wait()
            if kind is not None:
                left.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def line(self, seconds: float = LIMIT) -> str:
        """The next line of its standard output, "" at the end of it."""
        line = self.next_line(seconds)
        if line is None:
            self.hangs(f"it said nothing for {seconds:g} s")
        return line or ""

    def next_line(self, seconds: float) -> str | None:
        """As `line`; None: there is none within so many seconds."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            data = os.read(self._out, 65536)
            if not data:
                return ""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def expect(self, word: str, seconds: float = LIMIT) -> str:
        """The rest of the next line that begins with this word."""
        while line := self.line(seconds):
            if line.split(maxsplit=1)[0] == word:
                return line[len(word) :].strip()
        pytest.fail(f"the program ended with {self.process.wait()} before it said {word!r}:\n{self.stderr}")

    def told(self, word: str, seconds: float = LIMIT) -> Any:
        """As `expect`, for a line that goes on in JSON."""
        return json.loads(self.expect(word, seconds))

    def descendants(self) -> list[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        return []

    def end(self, seconds: float = LIMIT) -> int:
        """Wait for its end: its return code."""
        with Watch([self.pid]) as itself:
            if itself.wait_gone(seconds):
                self.hangs(f"it did not end within {seconds:g} s")
        return self.process.wait()

    def hangs(self, why: str) -> None:
        """Fail, with the stacks of every process that can tell its own."""
        with Watch([self.pid, *self.descendants()]) as everybody:
            for pid in everybody._fds:
                if _tells_stacks(pid):
                    os.kill(pid, signal.SIGUSR1)
            # Each writes its stacks within its signal handler; then nobody has anything more to say.
            everybody.wait_gone(1.0)
            states = "\n".join(map(_state, everybody._fds))
            everybody.kill()
        pytest.fail(f"the program hangs: {why}\n{states}\n{self.stderr}")


def _tells_stacks(pid: int) -> bool:
    """Whether it has a handler for SIGUSR1: faulthandler's."""
    caught = next((line for line in _status(pid) if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []


def _state(pid: int) -> str:
    return f"pid {pid}: " + next((line for line in _status(pid) if line.startswith("State:")), "gone")


def wait_stopped(pid: int) -> None:
    """Until a process that was sent SIGSTOP is stopped."""
    deadline = time.monotonic() + LIMIT
    while "T" not in _state(pid).split()[3:4]:
        assert time.monotonic() < deadline, _state(pid)
        os.sched_yield()


class Wire:
    """A FIFO on which calls tell what they do (see `fault_calls.tell`)."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # For writing too: so it never ends.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._buffer = b""

    async def line(self) -> str:
        """The next line, as soon as there is one."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._fd, readable.set)
        try:
            async with asyncio.timeout(LIMIT):
                while b"\n" not in self._buffer:
                    await readable.wait()
                    readable.clear()
                    with contextlib.suppress(BlockingIOError):
                        self._buffer += os.read(self._fd, 65536)
        finally:
            loop.remove_reader(self._fd)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    async def lines(self, count: int) -> list[str]:
        return [await self.line() for _ in range(count)]

    async def worker(self) -> tuple[int, int, int]:
        """Index, generation and pid of whoever tells next."""
        index, generation, pid = map(int, (await self.line()).split()[:3])
        return index, generation, pid

    def give(self, count: int) -> None:
        """Let so many that wait to read this go on."""
        os.write(self._fd, b"." * count)

    def write(self, line: str) -> None:
        """Tell a line to whoever reads this."""
        os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


def figures(name: str, values: list[float]) -> str:
    """A distribution in a line, in milliseconds."""
    ordered = sorted(value * 1000 for value in values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9, 0.99)]
    return f"{name}: n={len(ordered)} p50={at[0]:.1f} p90={at[1]:.1f} p99={at[2]:.1f} max={ordered[-1]:.1f} ms"


def complaints(text: str) -> str:
    """What was said on standard error, without the reports that other programs of the machine had the CPU."""
    return re.sub(r"percore: worker .*(gets too little CPU time|goes on, after) .*\n", "", text)


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """The user's side and the program's side of a pseudo-terminal."""
    ours, theirs = os.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)
