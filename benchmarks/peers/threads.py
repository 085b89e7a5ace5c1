"""Loops on threads as one writes them by hand: a call goes there by `call_soon_threadsafe`, and its result comes back so."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from percore._common.system import new_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, Function


@asynccontextmanager
async def calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Calls of a coroutine function, in turn on so many loops."""
    ours = asyncio.get_running_loop()
    loops = [new_loop() for _ in range(workers)]
    threads = [threading.Thread(target=loop.run_forever, name="bare-loop") for loop in loops]
    for thread in threads:
        thread.start()
    turns = cycle(loops)

    async def answer(argument: Any, future: asyncio.Future[Any]) -> None:
        ours.call_soon_threadsafe(future.set_result, await function(argument))

    def call(argument: Any) -> asyncio.Future[Any]:
        theirs, future = next(turns), ours.create_future()
        theirs.call_soon_threadsafe(partial(theirs.create_task, answer(argument, future)))
        return future

    try:
        yield call
    finally:
        for loop in loops:
            loop.call_soon_threadsafe(loop.stop)
        for thread in threads:
            thread.join()
        for loop in loops:
            loop.close()
