"""Start each worker as a fresh interpreter. This is slower than a fork server, but works on systems without pidfds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
from typing import TYPE_CHECKING

from percore._common.system import HAS_PIDFD
from percore._engines.processes.descriptors import Fd, duplicate, let_go, pipe
from percore._engines.processes.launch import ENTRY, Watched, end_child, interpreter, open_child, start_python, world_for_exec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SPAWNED = "percore._worker_process.world:spawned"


class SpawnLauncher:
    """Starts workers as children of this process. Launches share nothing."""

    def __init__(self, entry: str = ENTRY) -> None:
        """Check that there is an interpreter to start workers with.

        Raises:
            RuntimeError: there is none.
        """
        interpreter()
        self._entry = entry

    def launch(
        self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]
    ) -> SpawnedProcess | ThreadWatchedProcess:
        """As `Launcher.launch`, in the environment of this moment. Call it from the running loop."""
        with contextlib.ExitStack() as cleanup:
            read_end, lifeline = pipe()
            cleanup.callback(let_go, lifeline)
            with contextlib.ExitStack() as handed_on:
                handed_on.callback(let_go, read_end)
                passed = [read_end]
                for fd in fds:
                    passed.append(duplicate(fd))
                    handed_on.callback(let_go, passed[-1])
                numbers = [fd.number for fd in passed]
                pid = start_python(_SPAWNED, world_for_exec(self._entry, boot), numbers, stdout=True)
                cleanup.callback(end_child, pid)
            loop = asyncio.get_running_loop()
            watched = SpawnedProcess if HAS_PIDFD else ThreadWatchedProcess
            process = watched(loop, pid, lifeline, on_exit)
            cleanup.pop_all()
        return process

    def renew(self) -> None:
        """Do nothing: each process imports all modules itself."""

    def helpers(self) -> dict[int, str]:
        """Return no helpers: every process that this launcher starts is a worker."""
        return {}

    async def aclose(self) -> None:
        """Do nothing: launches share no resources."""


class SpawnedProcess(Watched):
    """A child of this process, watched through its pidfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int, lifeline: Fd, on_exit: Callable[[int | None], None]) -> None:
        super().__init__(loop, on_exit)
        self._lifeline = lifeline
        pidfd = open_child(pid)
        try:
            self._watch(pid, pidfd)
        except BaseException:
            end_child(pid)
            raise

    def _cut(self) -> None:
        let_go(self._lifeline)

    def _release(self) -> None:
        super()._release()
        self._cut()


class ThreadWatchedProcess:
    """A child of this process, watched by a thread that blocks until the child ends. For systems without pidfds.

    A signal must not reach another process that has got the pid of a reaped child. So the thread waits without reaping,
    and then, under the lock that `kill` takes, marks the child as dead and reaps it. (If the system has no waitid, the
    pid is free for a moment before the mark is set. A signal goes wrong only if the system reuses the pid at once.)
    """

    is_lost = False
    refusal = ""
    reason_lost = ""
    peak: int | None = None  # the system's figure includes what the program had before its child became another program

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int, lifeline: Fd, on_exit: Callable[[int | None], None]) -> None:
        self.pid: int | None = pid
        self._owner = os.getpid()
        self._loop = loop
        self._lifeline = lifeline
        self._on_exit = on_exit
        self._lock = threading.RLock()  # a garbage collection under it may end a dropped runner, which kills its workers
        self._alive = True
        self._is_told = False
        self._thread = threading.Thread(target=self._wait, args=(pid,), name=f"percore-wait-{pid}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.kill(pid, signal.SIGKILL)
            self._reap(pid)
            raise OSError(errno.EAGAIN, "could not start the thread that waits for a worker") from error

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone, do nothing."""
        if os.getpid() != self._owner:  # a copy in a fork of the program, where the lock may be held for ever
            return
        with self._lock:
            if self._alive and self.pid is not None:
                try:
                    os.kill(self.pid, signum)
                except ProcessLookupError:  # with SIGCHLD ignored, the kernel has reaped it already
                    pass
                except PermissionError:  # as in `Watched`
                    if signum == signal.SIGKILL:
                        let_go(self._lifeline)

    def _wait(self, pid: int) -> None:
        code = self._reap(pid)
        with contextlib.suppress(RuntimeError):  # the loop was closed before the worker ended: `on_exit` is not called
            for _ in range(2):  # a Ctrl-C may come before the loop begins one, which it then drops
                self._loop.call_soon_threadsafe(self._finish, code)

    def _reap(self, pid: int) -> int | None:
        try:
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                with self._lock:
                    self._alive = False
                    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # other code has reaped it: the exit code is unknown
            return None
        finally:
            self._alive = False

    def _finish(self, code: int | None) -> None:
        if self._is_told:
            return
        once_more = self._loop.call_soon(self._end, code)  # as in `Watched`
        try:
            self._end(code)
        except Exception:
            once_more.cancel()
            raise
        once_more.cancel()

    def _end(self, code: int | None) -> None:
        self._is_told = True
        self._thread.join()  # returns at once: the thread is ending; no thread is left when `on_exit` is called
        let_go(self._lifeline)
        self._on_exit(code)
