"""Runs a reading of the system in a thread of its own, because the system may take milliseconds for it.

Runners read their usage this way, engines the memory of workers, and the dashboard its pages. So it is a module of its own: most of
them read no usage.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(name: str, read: Callable[[], T]) -> T:
    """Call `read` in a new daemon thread and return its result. If this is cancelled, the thread finishes by itself.

    Raises:
        RuntimeError: no thread can be started.
        BaseException: an error that `read` raises.
    """
    reading: Future[T] = Future()
    # Do not use the loop's executor: the user may have filled it with calls that never end.
    threading.Thread(target=_read_into, args=(reading, read), name=name, daemon=True).start()
    return await asyncio.wrap_future(reading)


def _read_into(reading: "Future[T]", read: Callable[[], T]) -> None:
    if reading.set_running_or_notify_cancel():
        try:
            result = read()
        except BaseException as error:
            reading.set_exception(error)
        else:
            reading.set_result(result)
