"""When a worker that drains is done: its threads and its loop look at each other's calls."""

import asyncio
from typing import Any, cast

from percore._worker.server import Server
from percore._worker.tasks import Tasks


class Threads:
    """Threads that hand their last call over, and end it, just before the loop looks whether they are idle."""

    def __init__(self, handed_over: dict[int, Any]) -> None:
        self._handed_over = handed_over

    def is_idle(self) -> bool:
        self._handed_over[1] = object()
        return True


class Post:
    is_open = True

    def flush(self) -> None: ...

    def is_flushed(self) -> bool:
        return True


async def test_a_call_that_a_thread_hands_over_just_now_is_waited_for() -> None:
    server = object.__new__(Server)
    server.finished = asyncio.get_running_loop().create_future()
    server.sampler = None
    server._channel = cast(Any, Post())
    tasks = server._tasks = object.__new__(Tasks)
    tasks.by_id, tasks.handed_over = {}, {}
    server._threads = cast(Any, Threads(tasks.handed_over))
    server._look_drained()
    assert not server.finished.done()
    server._threads = cast(Any, Threads({}))
    tasks.handed_over.clear()
    server._look_drained()
    assert server.finished.done()
