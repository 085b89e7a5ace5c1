"""Readings of usage: any thread asks for one and waits, and the executor's loop takes it.

Guarantee: each reading ends, even if the workers cannot be started, or the loop ends first.

The asking thread adds its future to a set and wakes the loop. If the loop is over by then, that thread ends the future itself. The
loop takes the readings that are in the set, and waits for them before it ends. The end of the loop's thread ends the rest.

Importing this module is cheap.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from percore._monitor.usage import Usage


class Readings:
    """The readings of one executor's usage that are not done. Unless noted, call methods only from the loop's thread."""

    def __init__(self) -> None:
        self._source: Callable[[], Coroutine[None, None, Usage]] | None = None
        """None until the first workers have been launched, and after the end."""
        self._asked: set[Future[Usage]] = set()
        self._begun: dict[asyncio.Task[None], Future[Usage]] = {}

    def add(self) -> Future[Usage]:
        """Ask for a reading. Any thread may call this; it must then wake the loop, which calls `take`."""
        asked: Future[Usage] = Future()
        self._asked.add(asked)
        return asked

    def open(self, source: Callable[[], Coroutine[None, None, Usage]]) -> None:
        """The workers have been launched: take the readings that were asked for, from now on by `source`."""
        self._source = source
        self.take()

    def take(self) -> None:
        """Begin all readings that were asked for, if the workers have been launched."""
        if self._source is None:
            return
        import asyncio

        while self._asked:
            asked = self._asked.pop()
            task = asyncio.get_running_loop().create_task(self._read(asked, self._source), name="percore-usage")
            self._begun[task] = asked
            task.add_done_callback(self._begun.pop)

    async def _read(self, asked: Future[Usage], source: Callable[[], Coroutine[None, None, Usage]]) -> None:
        try:
            usage = await source()
        except BaseException as error:
            if asked.done():  # `fail` has ended it
                raise
            asked.set_exception(error)
        else:
            asked.set_result(usage)

    async def settle(self) -> None:
        """Wait for the readings that have begun. They take some milliseconds."""
        import asyncio

        while self._begun:
            await asyncio.wait(self._begun)

    def fail(self, error: BaseException) -> None:
        """The loop is over: end the readings that are not done. Any thread may call this."""
        self._source = None
        while True:
            try:
                asked = self._asked.pop() if self._asked else self._begun.popitem()[1]
            except KeyError:
                return
            if not asked.done():
                asked.set_exception(error)
