"""The assembly: the engine and the supervisor of one runner, made together and closed together.

Runner and LoopPoolExecutor each make one. The caller may choose the engine; the default is processes.

Importing this module is cheap. `import_modules` imports what an assembly needs, so that a runner can start the fork server first,
and the two processes import at the same time on two CPUs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, Self

import percore
from percore._runner.early import MODULES

if TYPE_CHECKING:
    from percore._common.options import RunnerOptions
    from percore._monitor.usage import Usage
    from percore._protocol.interfaces import Engine
    from percore._serialization.pickler import MainInfo
    from percore._supervisor.burials import WorkerObserver
    from percore._supervisor.closing import Closing
    from percore._supervisor.supervisor import Supervisor

running_loop: Final = asyncio._get_running_loop  # returns None if no loop runs, and does not raise

if running_loop() is None or threading.current_thread() is not threading.main_thread():
    # percore._common.worker_errors imports concurrent.futures, which Python refuses once the main thread has ended. `start` may run
    # after that, so import it here. If a loop of the main thread imports this module, that thread is alive and `start` imports it
    # in time.
    import_module("percore._common.worker_errors")


async def import_modules() -> None:
    """Import MODULES one by one. Importing them all at once would block the event loop for too long."""
    for name in MODULES:
        if name not in sys.modules:
            percore._import_uncollected(name)
            await asyncio.sleep(0)


class EngineFactory(Protocol):
    """Makes the engine of an assembly."""

    def __call__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo, /) -> Engine:
        """Return an engine that has started nothing yet. The start of the runner raises the errors of this call."""


class Assembly:
    """The parts of one runner. They belong to the process, the thread and the event loop that made them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: RunnerOptions,
        make_engine: EngineFactory | None = None,
        main: MainInfo | None = None,
        observer: WorkerObserver | None = None,
    ) -> None:
        """Make the engine; `supervise` makes the supervisor. No worker starts before `supervisor.pool.start()`.

        Args:
            loop: the running event loop.
            options: the options of the runner.
            make_engine: makes the engine. None: processes, by the start method of the options.
            main: how workers get `__main__`. None: as it was started.
            observer: is told of new workers, and of each death of a worker that nobody asked for.

        Raises:
            OSError: there is not enough memory for even one message of `max_message` bytes.
            Exception: an error from pickling what the options contain.
        """
        from percore._engines.processes.engine import ProcessEngine
        from percore._serialization.pickler import alias_main, main_info

        alias_main()
        if main is None:
            main = main_info()
        self._loop = loop
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._options = options
        self._observer = observer
        self.supervisor: Supervisor
        self.closing: Closing
        self.engine = (ProcessEngine if make_engine is None else make_engine)(loop, options, main)

    async def supervise(self) -> Self:
        """Make the supervisor. This waits for nothing, unless that fails: then the engine is closed, which nobody else would close.

        Raises:
            Exception: as of an import for which no descriptor is left.
        """
        from percore._supervisor.supervisor import Supervisor

        try:
            self.supervisor = Supervisor(self._loop, self._options, self.engine, self._observer)
        except BaseException:
            await self.engine.aclose()
            raise
        self.closing = self.supervisor.closing
        return self

    async def usage(self) -> Usage:
        """Return what this process, the engine and the workers use."""
        return await self.engine.usage(self.supervisor.roles())

    @property
    def is_here(self) -> bool:
        """Whether the caller's thread is that of the parts."""
        return threading.get_ident() == self._thread

    def check_process(self) -> None:
        """Check that the caller is in the process of the parts.

        Raises:
            RuntimeError: it is in a fork of that process.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this runner was started before a fork and works only in the process that started it")

    def check_caller(self) -> None:
        """Check that the caller is in the process, the thread and the event loop of the parts.

        Raises:
            RuntimeError: it is not; the message says which of them differs.
        """
        self.check_process()
        if not self.is_here:
            raise RuntimeError(
                "this runner was started in another thread; call it there, for example with asyncio.run_coroutine_threadsafe"
            )
        running = running_loop()
        if running is not None and running is not self._loop:
            raise RuntimeError("this runner was started in another event loop, and its futures can only be awaited there")
        if self._loop.is_closed():
            raise RuntimeError("the event loop that this runner was started in is closed; close the runner before its loop")
