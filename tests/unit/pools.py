"""Pools of threads of a worker, and calls that tests let begin and end."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any

from percore._worker.threads import Threads

Run = Callable[[int, Any], None]


@contextmanager
def pool(limit: int, run: Run, context: Context | None = None) -> Iterator[Threads]:
    threads = Threads(limit, run, context or copy_context())
    try:
        yield threads
    finally:
        threads.stop()
        threads.join()


def void(_value: object) -> None:
    return


class Recorder:
    """Notes each call that runs; `expect` waits for so many."""

    def __init__(self) -> None:
        self.ran: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def __call__(self, call_id: int, item: Any) -> None:
        self.ran.put((call_id, item))

    def expect(self, count: int) -> list[tuple[int, Any]]:
        return [self.ran.get() for _ in range(count)]


class Gate:
    """Holds every call until it is opened, and tells which have begun."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.opened = threading.Event()

    def __call__(self, call_id: int, item: Any) -> None:
        self.begun.put(call_id)
        self.opened.wait()
