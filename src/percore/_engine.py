"""The interface between the supervisor and the engines that run workers. Only protocols live here.

An engine starts workers and reports when one has ended; it makes no decisions. There are two engines: real processes
(`_engines.process`) and, for tests, workers inside the supervisor's own loop.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from percore._ipc.channel import Channel


class Process(Protocol):
    """One OS process."""

    pid: int | None
    """The process id. None until known: a fork server answers a moment after the launch."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal, and never to a pid that another process may have got.

        Once the process is gone, do nothing. Before the pid is known, send the signal as soon as the pid arrives.
        """

    def spoke(self) -> None:
        """Record that the process has sent a message through its shared memory. No other process may get that memory now."""


class Launcher(Protocol):
    """A way to start processes."""

    def launch(self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]) -> Process:
        """Start `percore._worker.main.run(boot, fds)` in a new process, without blocking the loop.

        The caller still owns `fds` and closes them. The launcher calls `on_exit` once, from the loop and never during this call,
        when the system has reported the process dead. Its argument is the exit code, as subprocess defines it, or None if unknown.

        Raises:
            OSError: the process could not be started; nothing is left behind.
        """

    def helpers(self) -> dict[int, str]:
        """The processes that the launcher needs beside those it launches: role by pid."""

    async def aclose(self) -> None:
        """Release the resources that launches share. All launched processes must have ended."""


class Worker(Protocol):
    """A running worker, as the supervisor sees it."""

    channel: Channel

    @property
    def pid(self) -> int | None: ...

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """As Process.kill."""

    def spoke(self) -> None:
        """As Process.spoke. The supervisor calls this when the worker has reported that it is ready."""

    def began(self, place: int, call_id: int) -> tuple[float, int] | None:
        """Return when this call began, by `time.monotonic`, and for a batch how many of its items have begun. None: it has not.

        Call it before `close`. While the worker lives, the answer may be out of date: use it for statistics, not for decisions.
        """

    def close(self) -> None:
        """Release the channel, the memory and every fd. Idempotent."""


class Engine(Protocol):
    """Starts workers."""

    def start(self, index: int, generation: int, on_exit: Callable[[int | None], None]) -> Worker:
        """Start a worker and return at once. The worker reports that it is ready by a message. `on_exit` as in Launcher.launch.

        Raises:
            OSError: the worker could not be started; nothing is left behind.
        """

    def helpers(self) -> dict[int, str]:
        """As Launcher.helpers."""

    async def aclose(self) -> None:
        """Release everything that the workers shared. All workers must have ended and been closed."""
