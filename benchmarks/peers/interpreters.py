"""percore's worker core in interpreters of this process with GILs of their own, over the process engine's rings: an experiment.

Its verdict is in docs/threads.md. It needs Python 3.14. What a product would need is missing: an end without the program's
consent, logs, and a loop other than asyncio's.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

import percore
from percore._calls.worker_start import places_of, start_of
from percore._protocol.interfaces import Exit
from percore._transport.links import Links

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from percore._common.options import RunnerOptions
    from percore._protocol.worker_start import WorkerStart
    from percore._serialization.pickler import MainInfo

# faulthandler does not load in such an interpreter, and threads there are no daemons.
_CODE = """
import sys, threading, types
sys.path[:] = path
sys.modules["faulthandler"] = types.ModuleType("faulthandler")
import asyncio, pickle
from percore._serialization import reducers
from percore._transport.frames import Layout
from percore._transport.worker_side import WorkerEnd
from percore._worker import context, threads
from percore._worker.worker import WorkerCore

class Thread(threading.Thread):
    def __init__(self, *args, daemon=None, **more):
        super().__init__(*args, **more)

threads.threading = types.SimpleNamespace(**{**vars(threading), "Thread": Thread})
reducers.is_worker = True
start, end = pickle.loads(start), WorkerEnd(Layout(*layout), fds)
context.of_process = context.WorkerContext(context.CurrentWorker(start.index, start.generation, 0))
loop = asyncio.SelectorEventLoop()
channel = end.channel(loop, main_by_value=False)
core = WorkerCore(channel, end.marks, start, context.of_process)

async def serve():
    core.open(lambda error: loop.stop())
    return await core.serve(asyncio.all_tasks)

try:
    loop.run_until_complete(serve())
finally:
    core.server.stop()
    core.server.join()
    channel.close()
    loop.close()
    end.close()
"""


class _Worker:
    """A worker in an interpreter of its own."""

    pid = node = None
    thread_ids = ()

    def __init__(self, engine: _Engine, start: WorkerStart, on_exit: Callable[[Exit], None]) -> None:
        self._loop, self._on_exit = engine.loop, on_exit
        link = engine.links.link()
        self.channel, self.fate, self.close = link.channel, link.fate, link.close
        fds = tuple(map(os.dup, link.fds))
        link.close_fds()
        given = {"path": tuple(sys.path), "start": pickle.dumps(start), "layout": tuple(link.layout), "fds": fds}
        self._thread = threading.Thread(target=self._main, args=(given,), daemon=True)
        self._thread.start()

    def _main(self, given: dict[str, Any]) -> None:
        code = 1
        try:
            interpreter: Any = import_module("concurrent.interpreters").create()
            interpreter.prepare_main(given)
            interpreter.exec(_CODE)
            interpreter.close()
            code = 0
        finally:
            self._loop.call_soon_threadsafe(self._ended, code)

    def _ended(self, code: int) -> None:
        self._thread.join()
        self._on_exit(Exit(code))

    def ready(self, told: object) -> None: ...

    def kill(self, signum: int = 9) -> None:
        raise RuntimeError("an interpreter cannot be killed")

    def examine(self, told: object) -> None: ...


class _Engine:
    sees_starts = True

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> None:
        self.loop = loop
        self.links = Links(loop, options, places_of(options), main_by_value=main.by_value)
        self.store = self.links.store
        self._start = start_of(options, self.store)

    def rouse(self) -> None: ...

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[object]) -> _Worker:
        return _Worker(self, self._start._replace(index=index, generation=generation), on_exit)

    async def memory(self, workers: Sequence[object], enough: int) -> list[int | None]:
        return [None] * len(workers)

    async def aclose(self) -> None:
        self.links.close()


class InterpretersRunner(percore.Runner):
    """A runner whose workers are interpreters.

    Raises ModuleNotFoundError before Python 3.14.
    """

    _make_engine = _Engine  # type: ignore[assignment]

    def __init__(self, workers: int) -> None:
        import_module("concurrent.interpreters")
        super().__init__(workers)
