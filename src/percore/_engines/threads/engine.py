"""The engine whose workers are threads of this process, each with its own event loop, lifespan and thread pool."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from percore._calls.worker_start import pickled_initializer, places_of, start_of
from percore._common.options import RunnerOptions
from percore._engines.threads.gil import GilWatch
from percore._engines.threads.references import Copies, References
from percore._engines.threads.worker import ThreadWorker
from percore._monitor.usage import ProcessUsage, Usage, UsageMeter
from percore._protocol.interfaces import Exit, Worker
from percore._protocol.worker_start import ExecutorSettings, Given


class ThreadEngine:
    """Implements `Engine`."""

    sees_starts = True
    on_place: Callable[[], None]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: RunnerOptions,
        *,
        copies: bool,
        executor: ExecutorSettings | None = None,
        given: Given | None = None,
    ) -> None:
        """Start nothing yet. `copies`: whether arguments and results are pickled as between processes.

        `given`: the initializer of an executor.
        """
        self.loop = loop
        self.store = (Copies if copies else References)(loop)
        self.places = places_of(options)
        self.loop_factory: Callable[[], Any] | None = options.loop_factory
        self.debug = loop.get_debug()
        # The lifespan and the like are the program's own objects in any case.
        own = References(loop)
        if executor is not None and given is not None and given[0] is not None:
            executor = executor._replace(initializer=pickled_initializer(given, own))
        self._start = start_of(options, own, executor)
        self._meter = UsageMeter()
        self._gil = GilWatch()
        self._workers: WeakSet[ThreadWorker] = WeakSet()

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]) -> ThreadWorker:
        worker = ThreadWorker(self, self._start._replace(index=index, generation=generation), on_exit, sockets)
        self._workers.add(worker)
        return worker

    def rouse(self) -> None:
        """Wake the threads of the workers' loops. Those of their pools end by themselves when they are idle."""
        self._gil.look()
        for worker in list(self._workers):
            worker.rouse()

    def look_gil(self) -> None:
        """Tell, once, that the GIL was turned on again, if it was."""
        self._gil.look()

    def renew(self) -> None:
        """Do nothing: there is one process, and it has its modules."""

    def resize(self, workers: int) -> None:
        """Do nothing: the workers share no resource by their number."""

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        return await self._meter.read({os.getpid(): "supervisor"})

    async def usage_elsewhere(self, workers: Sequence[tuple[str, Worker]]) -> Sequence[ProcessUsage]:
        """Return nothing: all workers are on this machine."""
        return ()

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        """Return nothing: all workers have the memory of this process."""
        return [None] * len(workers)

    async def aclose(self) -> None:
        """Look at the GIL for the last time: everything else belongs to the workers."""
        self._gil.look()
