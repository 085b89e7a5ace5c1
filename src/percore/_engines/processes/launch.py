"""Code that the launchers share: capture the current environment, start a fresh interpreter, watch a process for its end.

- A process is dead when its pidfd becomes readable. Its pid is only reported, never used to signal or wait for it, except
  by `open_child` when it cannot open a pidfd.
- This module reaps its own children. Something else may reap them first (SIGCHLD ignored, os.waitpid(-1) in the user's
  program). The exit code then comes from the kernel by the pidfd; before Linux 6.15 it is unknown, never 0.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import marshal
import os
import re
import signal
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

from percore._common.system import limit_of_processes
from percore._engines.processes.descriptors import Fd, above_streams, anonymous_file, hold, kept_in_forks, let_go
from percore._worker_process.world import HELD_BACK, Helper, World

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from percore._common.sure_handles import SureHandle

ENTRY = "percore._worker_process.main:run"

# Sets sys.path first: percore may be importable only because the supervisor's program changed sys.path. It imports without garbage
# collections, which would find nothing. The fork server turns them on again before it forks, and a spawned worker before it calls
# its entry.
_BOOT = """\
import gc, sys, marshal
gc.disable()
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


class Process(Protocol):
    """One OS process."""

    pid: int | None
    """The process id. None until known: a fork server answers a moment after the launch."""

    peak: int | None
    """Once it has ended: the most bytes of memory that it had in use at a time, with shared memory. None: unknown."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal, and never to a pid that another process may have got.

        Once the process is gone, do nothing. Before the pid is known, send the signal as soon as the pid arrives.
        """

    is_lost: bool
    """Once it has ended: whether nobody knows if it was ever started, because the helper that was to start it has died."""

    refusal: str
    """Once it has ended: why it was never started, as a clause; empty if it was, or if that is unknown."""

    reason_lost: str
    """The end of the traceback with which that helper has failed; empty if it is unknown."""


class Launcher(Protocol):
    """A way to start processes."""

    def launch(self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]) -> Process:
        """Start `percore._worker_process.main.run(boot, fds)` in a new process, without blocking the loop.

        The caller still owns `fds` and closes them. The launcher calls `on_exit` once, from the loop and never during this call,
        when the system has reported the process dead. Its argument is the exit code, as subprocess defines it, or None if unknown.
        If that call raises a KeyboardInterrupt, nobody knows what it has done, and the launcher calls it once more.

        Raises:
            OSError: the process could not be started; nothing is left behind.
        """

    def renew(self) -> None:
        """Launch no more processes from one that has imported modules: they may have changed on disk."""

    def helpers(self) -> dict[int, str]:
        """The processes that the launcher needs beside those it launches: role by pid."""

    async def aclose(self) -> None:
        """Release the resources that launches share. All launched processes must have ended."""


def last_line(traceback: str) -> str:
    """Return the last line of a traceback, to be appended to a text; empty if there is none."""
    lines = traceback.rstrip().splitlines()
    return f": {lines[-1]}" if lines else ""


def is_stream(fd: int) -> bool:
    """Whether a program started now would inherit this standard stream: it is open, and exec does not close it."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def search_path() -> list[str]:
    return [_exact(entry) for entry in list[object](sys.path) if isinstance(entry, str)]  # the import system ignores others too


def world_for_exec(entry: str, boot: bytes) -> World:
    """Capture the part of the current environment that a fresh interpreter does not inherit by exec."""
    argv = [_exact(str(argument)) for argument in getattr(sys, "argv", [""])]  # a program may have put a Path there
    return World(search_path(), argv, None, None, None, entry, boot)


def world_for_fork(entry: str, boot: bytes) -> World:
    """Capture the whole current environment, for a worker that is forked from an older process."""
    return world_for_exec(entry, boot)._replace(environment=environment(), umask=_umask(), affinity=sorted(os.sched_getaffinity(0)))


def _exact(text: str) -> str:
    return str.__str__(text)  # marshal rejects subclasses


def environment() -> dict[bytes, bytes]:
    """Return the environment of this program as Python code sees it."""
    # Another thread may change it meanwhile, so a name may be gone when its value is read.
    found = ((name, os.environb.get(name)) for name in list(os.environb))
    return {name: value for name, value in found if name and value is not None}


def _umask() -> int | None:
    # os.umask() can only be read by changing it, which would affect files that other threads create.
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1], 8) for line in status if line.startswith(b"Umask:")), None)
    except OSError:
        return None  # no /proc: workers keep the umask that the fork server was started with


def is_frozen() -> bool:
    """Whether PyInstaller or a similar tool built this program. `sys.executable` is then the program itself."""
    return bool(getattr(sys, "frozen", False))


def interpreter() -> str:
    """Return the path of the interpreter for helper processes, found as multiprocessing finds it. Starts nothing.

    Raises:
        RuntimeError: the executable is not a Python interpreter, so starting it might start this program again and again. Or
            this is a frozen program that was started as a helper of itself and runs its own code instead.
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
    """Whether a frozen program was started as a helper but runs its own code, because it does not call `freeze_support`."""
    is_helper = _FORK_ARGUMENT in (*sys.argv[1:2], *sys.orig_argv[1:2])
    process = sys.modules.get("multiprocessing.process")
    return is_helper and not Helper.has_begun and (process is None or process.parent_process() is None)


def start_python(target: str, data: tuple[Any, ...], fds: Sequence[int], *, stdout: bool) -> int:
    """Run `target`, a "module:function", as `function(data)` in a fresh interpreter, and return the pid. The caller reaps it.

    The new process inherits `fds` and gets their numbers as arguments. The signals that a terminal sends to the whole
    process group (SIGINT, SIGTERM) stay blocked until the new process has handlers for them. `stdout`: whether it inherits
    standard output.

    Raises:
        OSError: the process could not be started.
        RuntimeError: as `interpreter`.
    """
    executable = interpreter()
    if is_frozen():
        import pickle  # here, because other programs need it only later, while the fork server starts

        # Start the program itself: its `multiprocessing.freeze_support()` recognises this and reads two pickles from a descriptor.
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
    process = None
    try:
        with kept_in_forks():  # gevent's Popen forks in Python, and then closes all but `pass_fds`
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if stdout and is_stream(1) else subprocess.DEVNULL,
                stderr=None if is_stream(2) else subprocess.DEVNULL,
                pass_fds=numbers,
                env=environment(),  # os.environ: the C library's environment may have more, which Python code does not see
            )
        process.returncode = 0  # keeps Popen from reaping the process or warning about it: the caller reaps it
    finally:
        let_go(file)
        _unblock(mask, process)
    return process.pid


def _unblock(mask: Iterable[int], process: subprocess.Popen[bytes] | None) -> None:
    """Restore the signal mask. If a signal that has come meanwhile has a handler that raises, end the process: nobody knows it."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException:
        if process is not None:
            end_child(process.pid)
        raise


def open_child(pid: int) -> Fd:
    """Open the pidfd of a child that was just started. If that fails, the child is killed and reaped before the error is raised."""
    try:
        return hold(Fd(above_streams(os.pidfd_open(pid))))
    except BaseException:
        end_child(pid)
        raise


def end_child(pid: int) -> None:
    """Kill and reap a child that was just started. Do nothing if it was reaped."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # with SIGCHLD ignored, the kernel has reaped it
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # else another process may have got its pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def advice_on(code: int | None) -> str:
    """Return which limit to raise after this error of starting a process, as an appendix to a text; empty if no limit is known."""
    return f": {limit_of_processes()}" if code == errno.EAGAIN else ""


def exit_code(pidfd: int) -> int | None:
    """Return the exit code of a dead process, and reap it if it is a child of this process. None: not known, or not yet."""
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
    """A process known by its pidfd and watched by one loop. Use it only in that loop's thread."""

    pid: int | None = None
    peak: int | None = None
    is_lost = False
    refusal = ""
    reason_lost = ""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int | None], None]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._pidfd: Fd | None = None
        self._timer: SureHandle | None = None
        self._gone = False

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone, do nothing."""
        # The pidfd is already closed when the interpreter is ending. So is the lifeline, which has killed the process.
        if self._pidfd is not None and self._pidfd.number >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd.number, signum)
            except ProcessLookupError:
                pass
            except PermissionError:  # this program has given up rights that it had when it started the process
                if signum == signal.SIGKILL:
                    self._cut()

    def _cut(self) -> None:
        """Cut the lifeline of the process, which kills it. Idempotent."""
        raise NotImplementedError

    def _watch(self, pid: int, pidfd: Fd) -> bool:
        """Watch a process by its pidfd, and return True.

        Raises:
            OSError: the loop cannot; the pidfd is closed.
        """
        try:
            self._loop.add_reader(pidfd.number, self._on_death, pidfd)
        except BaseException:
            let_go(pidfd)
            raise
        self.pid, self._pidfd = pid, pidfd
        return True

    def _on_death(self, pidfd: Fd) -> None:
        if self._gone:
            return
        code = self._known_code(pidfd)
        if code is not None:
            self._finish(code)
        else:
            if self._timer is None:
                self._timer = self._later(self._patience(), self._after_patience, pidfd)
            self._loop.remove_reader(pidfd.number)  # last: if a Ctrl-C ends this before, the loop calls it again

    def _later(self, seconds: float, callback: Callable[..., None], *args: object) -> SureHandle:
        from percore._common.sure_handles import surely_later  # not needed before the fork server starts

        return surely_later(self._loop, seconds, callback, *args)

    def _after_patience(self, pidfd: Fd) -> None:
        self._finish(self._known_code(pidfd))

    def _known_code(self, pidfd: Fd) -> int | None:
        return exit_code(pidfd.number)

    def _patience(self) -> float:
        """How many seconds to wait for the exit code of a dead process before it counts as unknown."""
        return _CODE_PATIENCE

    def _finish(self, code: int | None) -> None:
        """Release everything, then call `on_exit`. Only the first call does anything."""
        if self._gone:
            return
        once_more = self._loop.call_soon(self._end, code)
        try:
            self._end(code)
        except Exception:
            once_more.cancel()
            raise
        once_more.cancel()  # not after a Ctrl-C, which may have kept the owner from hearing of the death

    def _end(self, code: int | None) -> None:
        self._gone = True
        if self._timer is not None:
            self._timer.cancel()
        self._release()
        self._on_exit(code)

    def _release(self) -> None:
        """Release everything. Twice is as once."""
        if self._pidfd is not None:
            if self._pidfd.number >= 0:
                self._loop.remove_reader(self._pidfd.number)
            let_go(self._pidfd)
            self._pidfd = None
