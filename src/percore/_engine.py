"""The seam between the supervisor and whatever runs workers: protocols, nothing else.

An engine starts workers and tells when one has ended; it decides nothing. Two exist: real processes (`_engines.process`) and, for
tests, workers inside the supervisor's own loop.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from percore._ipc.channel import Channel


class Process(Protocol):
    """One OS process."""

    pid: int | None
    """None until known: a fork server answers a moment later."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal, never by a remembered number. Once the process is gone: nothing. Before the pid is known: on arrival."""

    def spoke(self) -> None:
        """It has said something through its memory: no other process may be given that."""


class Launcher(Protocol):
    """A way to start processes."""

    def launch(self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]) -> Process:
        """Start `percore._worker.main.run(boot, fds)` in a new process, without blocking the loop.

        `fds` stay the caller's. `on_exit` is called once, from the loop and never from inside this call, when the system has
        reported the process dead, with its exit code as subprocess gives it, or None where unknown.

        Raises:
            OSError: nothing could be started; nothing is left behind.
        """

    def helpers(self) -> dict[int, str]:
        """The processes that it needs beside those it starts, by pid: the role of each."""

    async def aclose(self) -> None:
        """Let go of what is shared between launches. All processes must have ended."""


class Worker(Protocol):
    """A running worker, as the supervisor sees it."""

    channel: Channel

    @property
    def pid(self) -> int | None: ...

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """As Process.kill."""

    def spoke(self) -> None:
        """As Process.spoke: it has told that it is ready."""

    def began(self, place: int, call_id: int) -> tuple[float, int] | None:
        """When this call had begun, by `time.monotonic`, and how many items of it, if it is a batch; None: it had not.

        Asked before `close`. Of a worker that lives the answer may be out of date: it is good for a figure, not for a decision.
        """

    def close(self) -> None:
        """Let go of the channel, the memory and every fd. Idempotent."""


class Engine(Protocol):
    """Starts workers."""

    def start(self, index: int, generation: int, on_exit: Callable[[int | None], None]) -> Worker:
        """Start a worker. Returns at once; readiness arrives as a message. `on_exit` as in Launcher.launch.

        Raises:
            OSError: it could not be started; nothing is left behind.
        """

    def helpers(self) -> dict[int, str]:
        """As Launcher.helpers."""

    async def aclose(self) -> None:
        """Let go of everything that workers shared. All workers must have ended and been closed."""
