"""Asks a worker of another program for the stacks of its threads.

A worker answers ASK_SIGNAL between two steps of its main thread. If it does not, it is asked by STACKS_SIGNAL, for which it has
faulthandler's handler: that is C code, so it also answers while other C code holds the GIL. Both write to a memfd that all workers
of a runner share; the program has it too, to report blocked loops. One process at a time uses it (`stacks_file`). Nothing else of
the program takes part.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from percore._attach.programs import opened, why_refused
from percore._worker_process import stacks_file
from percore._worker_process.boot import ASK_SIGNAL, STACKS_NAME, STACKS_SIGNAL

_LATEST: Final = 2.0
"""Seconds after which a worker that has written nothing will not write: it is stopped, or gets no CPU."""

_PATIENCE: Final = 1.0
"""Seconds after which a worker that has not answered is asked by STACKS_SIGNAL."""

_STEP: Final = 0.02
_MOST: Final = 1 << 20


class NoStacks(Exception):
    """The worker has not answered; the text says why."""


def stacks_of(pid: int, step: float = _STEP) -> str:
    """Return the stacks of all threads of the worker with this process id, as faulthandler writes them.

    They are whole when the worker has written nothing more for `step` seconds.

    Raises:
        NoStacks: it is no worker of percore, has ended, belongs to another user, or does not answer.
    """
    try:
        with _own(_file(pid), step) as fd:
            return _written(pid, fd, step)
    except PermissionError as error:
        raise NoStacks(f"process {pid} {why_refused(pid)}") from error
    except OSError as error:
        raise NoStacks(f"process {pid} has ended") from error


def forget_stacks(pid: int) -> None:
    """Give back the memory of the stacks that this worker, and others of its runner, have written."""
    with suppress(OSError, NoStacks), _own(_file(pid), _STEP) as fd:
        os.ftruncate(fd, 0)


def is_worker(pid: int) -> bool:
    """Whether this process is a worker of percore now, whatever a page has said before."""
    try:
        _file(pid)
    except NoStacks:
        return False
    return True


@contextmanager
def _own(path: Path, step: float) -> Iterator[int]:
    """Open the file, and keep it from others during the block."""
    with opened(path, STACKS_NAME, os.O_RDWR) as fd:
        end = time.monotonic() + _LATEST
        while not stacks_file.take_unclaimed(fd):
            if time.monotonic() >= end:
                raise NoStacks("the program or another one reads the stacks of its workers")
            time.sleep(step)
        yield fd  # the lock goes with the descriptor


def _written(pid: int, fd: int, step: float) -> str:
    before = os.fstat(fd).st_size
    size = before
    for signum, seconds in ((ASK_SIGNAL, _PATIENCE), (STACKS_SIGNAL, _LATEST)):
        _file(pid)  # it may have ended a second ago, and its number be that of another process, which a signal would end
        os.kill(pid, signum)
        size = _size_after(fd, before, seconds, step)
        if size != before:
            break
    else:
        raise NoStacks(f"process {pid} has not answered: it is stopped, or gets no CPU time")
    # The workers write on at the place where they were, also after the file was emptied: a hole is before it.
    begins = os.lseek(fd, before if size > before else 0, os.SEEK_DATA)
    text = os.pread(fd, _MOST, begins).lstrip(b"\0").decode(errors="replace")
    return stacks_file.without_call(text)[0].strip()


def _size_after(fd: int, before: int, seconds: float, step: float) -> int:
    """Return the size of the file when its writer has paused, or after so many seconds."""
    size, end = before, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(step)
        now = os.fstat(fd).st_size
        if now == size != before:
            break
        size = now
    return size


def _file(pid: int) -> Path:
    folder = Path(f"/proc/{pid}/fd")
    try:
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):
                if os.readlink(folder / name).startswith(f"/memfd:{STACKS_NAME}"):
                    return folder / name
    except PermissionError as error:
        raise NoStacks(f"process {pid} {why_refused(pid)}") from error
    except OSError:
        pass
    raise NoStacks(f"process {pid} is no worker of percore that this user may ask, or it has ended")
