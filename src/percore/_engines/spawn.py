"""Start a worker as a fresh interpreter: slower than a fork server, and the way of systems without pidfds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
from typing import TYPE_CHECKING

from percore._engines.fds import Fd, duplicate, let_go, pipe
from percore._engines.launch import ENTRY, Watched, interpreter, open_child, start_python, world_for_exec
from percore._platform import HAS_PIDFD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SPAWNED = "percore._worker.world:spawned"


class SpawnLauncher:
    """Starts workers as children of this process. Nothing is shared between launches."""

    def __init__(self, entry: str = ENTRY) -> None:
        """Raises RuntimeError where there is no interpreter to start workers with."""
        interpreter()
        self._entry = entry

    def launch(
        self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]
    ) -> SpawnedProcess | ThreadWatchedProcess:
        """Start a worker with the surroundings of this moment, from the running loop. See `percore._engine.Launcher`.

        Raises:
            OSError: nothing could be started; nothing is left behind.
        """
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
            loop = asyncio.get_running_loop()
            watched = SpawnedProcess if HAS_PIDFD else ThreadWatchedProcess
            process = watched(loop, pid, lifeline, on_exit)
            cleanup.pop_all()
        return process

    def helpers(self) -> dict[int, str]:
        """None: every process that it starts is a worker."""
        return {}

    async def aclose(self) -> None:
        """Nothing to let go of."""


class SpawnedProcess(Watched):
    """A child of this process, watched by its pidfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int, lifeline: Fd, on_exit: Callable[[int | None], None]) -> None:
        super().__init__(loop, on_exit)
        self._lifeline = lifeline
        self._watch(pid, open_child(pid))

    def _release(self) -> None:
        super()._release()
        let_go(self._lifeline)


class ThreadWatchedProcess:
    """A child of this process, watched by a thread that blocks until it ends.

    A signal must not reach a process that got the number of a child reaped before. So the thread waits without reaping,
    and reaps and forgets the number under the lock that `kill` takes. (Where the system has no waitid, the number is
    free for the moment between the two; only a system that reuses it at once could be hit.)
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int, lifeline: Fd, on_exit: Callable[[int | None], None]) -> None:
        self.pid: int | None = pid
        self._loop = loop
        self._lifeline = lifeline
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._alive = True
        self._thread = threading.Thread(target=self._wait, args=(pid,), name=f"percore-wait-{pid}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.kill(pid, signal.SIGKILL)
            self._reap(pid)
            raise OSError(errno.EAGAIN, "could not start the thread that waits for a worker") from error

    def spoke(self) -> None:
        """As Process.spoke. A process that was started once is not started again."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone: nothing."""
        with self._lock:
            if self._alive and self.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # SIGCHLD ignored: the kernel was the first to reap
                    os.kill(self.pid, signum)

    def _wait(self, pid: int) -> None:
        code = self._reap(pid)
        with contextlib.suppress(RuntimeError):  # the loop was closed before its worker ended: nobody wants to know
            self._loop.call_soon_threadsafe(self._finish, code)

    def _reap(self, pid: int) -> int | None:
        try:
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                with self._lock:
                    self._alive = False
                    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # reaped by somebody else: unknown
            return None
        finally:
            self._alive = False

    def _finish(self, code: int | None) -> None:
        self._thread.join()  # it has nothing left to do; so no thread is left once the end has been told
        let_go(self._lifeline)
        self._on_exit(code)
