"""What both ways to start a process share: the world of now, a fresh interpreter, the watch on a death.

- A process is dead when its pidfd says so. Its number is used for nothing but telling it.
- Our children are reaped by us alone, but others may be faster (SIGCHLD ignored, os.waitpid(-1) in the user's program):
  then the kernel is asked, and where it does not know, the exit code is unknown, never 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast

from percore._engines.fds import Fd, above_streams, anonymous_file, hold, let_go
from percore._worker.world import HELD_BACK, Helper, World

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

ENTRY = "percore._worker.main:run"

# sys.path first: percore may be importable only because the supervisor changed its own.
_BOOT = """\
import sys, marshal
with open(int(sys.argv[1]), "rb") as file:
    data = marshal.load(file)
sys.path[:] = data[0]
from {module} import {function}
{function}(data)
"""
_FORK_ARGUMENT = "--multiprocessing-fork"
_PYTHON = re.compile(r"(python|pypy|graalpy)[0-9.]*[a-z]*(-[\w.-]+)?")
_CODE_PATIENCE = 0.1
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 0x8  # Linux 6.15
_INFO_SIZE, _INFO_EXIT_CODE = 64, 60  # bytes of struct pidfd_info, offset of its exit_code


def is_stream(fd: int) -> bool:
    """Whether a program started now would get this standard stream: open, and not closed by exec."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def search_path() -> list[str]:
    return [_exact(entry) for entry in list[object](sys.path) if isinstance(entry, str)]  # others are ignored there too


def world_for_exec(entry: str, boot: bytes) -> World:
    """The world of now for a fresh interpreter: what exec does not bring."""
    argv = [_exact(str(argument)) for argument in getattr(sys, "argv", [""])]  # a program may have put a Path there
    return World(search_path(), argv, None, None, None, entry, boot)


def world_for_fork(entry: str, boot: bytes) -> World:
    """The whole world of now, for a worker that is born from an older process."""
    return world_for_exec(entry, boot)._replace(
        environment=_environment(), umask=_umask(), affinity=sorted(os.sched_getaffinity(0))
    )


def _exact(text: str) -> str:
    return str.__str__(text)  # marshal takes no subclasses


def _environment() -> dict[bytes, bytes]:
    # Another thread may change it meanwhile: a name may be gone by the time its value is asked for.
    found = ((name, os.environb.get(name)) for name in list(os.environb))
    return {name: value for name, value in found if name and value is not None}


def _umask() -> int | None:
    # os.umask() can only be read by changing it, which other threads would notice in the files they create.
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1], 8) for line in status if line.startswith(b"Umask:")), None)
    except OSError:
        return None  # no /proc: the one the fork server was started with


def is_frozen() -> bool:
    """Whether this program was made by PyInstaller or the like: `sys.executable` is the program then."""
    return bool(getattr(sys, "frozen", False))


def interpreter() -> str:
    """What to start helpers with, as multiprocessing finds it. Starts nothing.

    Raises:
        RuntimeError: it is no Python, and to start it might start this program again and again; or that has happened already.
    """
    executable: str | None = sys.executable
    of_multiprocessing = sys.modules.get("multiprocessing.spawn")
    if of_multiprocessing is not None:
        given = of_multiprocessing.get_executable()
        if given is not None and os.fsdecode(given) != executable:
            return os.fsdecode(given)  # the user has called multiprocessing.set_executable
    if is_frozen():
        if _is_second_program():
            raise RuntimeError(
                "this frozen program was started as a helper process of itself and has run its own code instead: "
                "call multiprocessing.freeze_support() first of all under `if __name__ == '__main__':`"
            )
    elif not executable or not (_is_python(executable) or _is_python(os.path.realpath(executable))):
        raise RuntimeError(
            f"percore starts its workers with a Python interpreter, and sys.executable is {executable!r}, which does not look like "
            "one; probably this program embeds Python. Name the interpreter: multiprocessing.set_executable('/usr/bin/python3')"
        )
    return cast("str", executable)


def _is_python(path: str) -> bool:
    return _PYTHON.fullmatch(os.path.basename(path)) is not None


def _is_second_program() -> bool:
    """Whether a frozen program was started as a helper and runs its own code all the same: it does not call `freeze_support`."""
    is_helper = _FORK_ARGUMENT in (*sys.argv[1:2], *sys.orig_argv[1:2])
    process = sys.modules.get("multiprocessing.process")
    return is_helper and not Helper.has_begun and (process is None or process.parent_process() is None)


def start_python(target: str, data: tuple[Any, ...], fds: Sequence[int], *, stdout: bool) -> int:
    """Run `function(data)` of "module:function" in a fresh interpreter with these fds, their numbers as arguments.

    Signals that a terminal sends to the whole group wait until the new process has its own way with them. Returns the
    pid; the caller reaps it.

    Raises:
        OSError: it could not be started.
        RuntimeError: as `interpreter`.
    """
    executable = interpreter()
    if is_frozen():
        # The program itself, whose `multiprocessing.freeze_support()` recognises this and reads two pickles from a descriptor.
        file = anonymous_file(pickle.dumps({}) + pickle.dumps(Helper(target, tuple(data), list(fds))))
        command = [executable, _FORK_ARGUMENT, f"pipe_handle={file.number}"]
    else:
        file = anonymous_file(marshal.dumps(tuple(data)))
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        module, _, function = target.partition(":")
        boot = _BOOT.format(module=module, function=function)
        command = [executable, *flags, "-P", "-c", boot, *map(str, (file.number, *fds))]
    numbers = [file.number, *fds]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if stdout and is_stream(1) else subprocess.DEVNULL,
            stderr=None if is_stream(2) else subprocess.DEVNULL,
            pass_fds=numbers,
            env=_environment(),  # os.environ: the C library may know of more, of which Python code sees nothing
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        let_go(file)
    process.returncode = 0  # tells Popen that there is nothing left to reap or to warn of: that is ours now
    return process.pid


def open_child(pid: int) -> Fd:
    """The pidfd of a child of ours that was started a moment ago. If that fails, the child is gone."""
    try:
        return hold(Fd(above_streams(os.pidfd_open(pid))))
    except OSError:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD ignored: reaped by the kernel
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def exit_code(pidfd: int) -> int | None:
    """The exit code of a dead process, reaped here if it is a child of ours. None: not known, or not yet."""
    try:
        status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return _exit_code_by_kernel(pidfd)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _exit_code_by_kernel(pidfd: int) -> int | None:
    info = bytearray(_INFO_SIZE)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None  # before Linux 6.15
    (mask,) = struct.unpack_from("Q", info, 0)
    if not mask & _PIDFD_INFO_EXIT:
        return None  # nobody has reaped it yet
    return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _INFO_EXIT_CODE)[0])


class Watched:
    """A process known by its pidfd, watched by one loop. To be used in that loop's thread only."""

    pid: int | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int | None], None]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._pidfd: Fd | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False

    def spoke(self) -> None:
        """As Process.spoke. A process that was started once is not started again."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone: nothing."""
        # Closed already where the interpreter is about to end: so is the lifeline, which has killed the process.
        if self._pidfd is not None and self._pidfd.number >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd.number, signum)

    def _watch(self, pid: int, pidfd: Fd) -> None:
        self.pid, self._pidfd = pid, pidfd
        self._loop.add_reader(pidfd.number, self._on_death, pidfd)

    def _on_death(self, pidfd: Fd) -> None:
        self._loop.remove_reader(pidfd.number)
        code = self._known_code(pidfd)
        if code is not None:
            self._finish(code)
        else:
            self._timer = self._loop.call_later(self._patience(), self._after_patience, pidfd)

    def _after_patience(self, pidfd: Fd) -> None:
        self._finish(self._known_code(pidfd))

    def _known_code(self, pidfd: Fd) -> int | None:
        return exit_code(pidfd.number)

    def _patience(self) -> float:
        """How long, in seconds, a dead process's exit code may stay away before it counts as unknown."""
        return _CODE_PATIENCE

    def _finish(self, code: int | None) -> None:
        """Let go of everything, then tell. The first call counts."""
        if self._gone:
            return
        self._gone = True
        if self._timer is not None:
            self._timer.cancel()
        self._release()
        self._on_exit(code)

    def _release(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd.number)
            let_go(self._pidfd)
            self._pidfd = None
