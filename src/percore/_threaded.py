"""threaded: an iterable whose `next` blocks, pulled in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterable, Iterable
from contextvars import copy_context
from inspect import isgenerator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from percore._options import whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

T = TypeVar("T")

logger: Final = logging.getLogger("percore")


def threaded(iterable: Iterable[T], /, *, ahead: int = 16) -> AsyncGenerator[T]:
    """Iterate over something whose `next` blocks, in a thread, as an input of a map: `runner.map(fetch, percore.threaded(rows))`.

    A map pulls a sync input in the event loop, which waits for it: right for a list or a generator that computes, wrong for a
    database cursor, a pipe, or a file on a slow disk. This is an async generator over the same items. Its one thread is made when
    the first item is asked for, sees the context variables of that moment, and ends with the iterable.

    Left early (closed, cancelled, or dropped): no further item is pulled. A `next` in progress cannot be stopped and nothing waits
    for it: the thread ends when it returns, and closes the iterable if that is a generator. The thread does not keep the program
    from ending.

    Args:
        iterable: nothing but the thread may use it meanwhile.
        ahead: items that the thread pulls at most before they are asked for. A map's `window` does not count them.

    Raises:
        TypeError, ValueError: not a sync iterable, or `ahead` is no whole number from 1.
        Exception: while iterating, whatever the iterable raises, behind the items before it.
    """
    if isinstance(iterable, AsyncIterable):
        raise TypeError(f"threaded() takes a sync iterable; an async one needs no thread: give the map {iterable!r} itself")
    if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"threaded() takes an iterable, not {iterable!r}")
    return _items(iterable, whole("ahead", ahead, 1))


async def _items(iterable: Iterable[T], ahead: int) -> AsyncGenerator[T]:
    puller = _Puller(iterable, asyncio.get_running_loop(), ahead)
    try:
        while True:
            while not puller.ready:  # 1. the thread sees a waiter  2. that is woken, and waits again  3. the thread wakes this one
                await puller.wait()
            values, error = puller.ready.popleft()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame: a cycle
            if not values:
                return
            puller.allow()
            yield values[0]
    finally:
        puller.leave()


class _Puller:
    """The thread, and what both sides share: items on their way here, permissions to pull one on their way there.

    Every permission becomes one item, the end or an error; so many items are ahead as permissions were given at first.
    """

    def __init__(self, iterable: Iterable[Any], loop: asyncio.AbstractEventLoop, ahead: int) -> None:
        self.ready: deque[tuple[tuple[Any, ...], BaseException | None]] = deque()
        """An item, or nothing at the end; or an error."""
        self._iterable = iterable
        self._loop = loop
        self._permissions: SimpleQueue[None] = SimpleQueue()
        self._waiter: asyncio.Future[None] | None = None
        self._is_left = False
        for _ in range(ahead):
            self.allow()
        threading.Thread(target=copy_context().run, args=(self._run,), name="percore-threaded", daemon=True).start()

    # The loop's side

    def allow(self) -> None:
        """Pull one item more."""
        self._permissions.put(None)

    async def wait(self) -> None:
        """Wait until something is ready."""
        self._waiter = self._loop.create_future()
        try:
            if not self.ready:  # it looks for a waiter after it has put something there: one of us sees the other
                await self._waiter
        finally:
            self._waiter = None

    def leave(self) -> None:
        """Nobody wants more: the thread ends as soon as it can."""
        self._is_left = True
        self.allow()  # it may wait for one

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The thread's side

    def _run(self) -> None:
        iterator: Iterator[Any] | None = None
        try:
            iterator = iter(self._iterable)
            while self._is_wanted():
                self._put((next(iterator),), None)
        except StopIteration:
            self._put((), None)
        except BaseException as error:  # of the iterable: it is raised where the item would have come
            self._put((), error)
        finally:
            if isgenerator(iterator):
                self._close(iterator)

    def _is_wanted(self) -> bool:
        self._permissions.get()
        return not self._is_left

    def _put(self, values: tuple[Any, ...], error: BaseException | None) -> None:
        self.ready.append((values, error))
        if self._waiter is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                self._is_left = True  # with the loop whoever waited is gone

    def _close(self, generator: Any) -> None:
        try:
            generator.close()
        except Exception:
            logger.exception("percore: closing the input %r failed in its thread", generator)
