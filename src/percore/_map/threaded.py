"""threaded: iterate over a blocking iterable in a thread, as an input of a map."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from contextvars import copy_context
from inspect import isgenerator
from queue import SimpleQueue
from typing import Any, TypeVar

from percore._common.endings import wake
from percore._common.log import report
from percore._common.options import whole

T = TypeVar("T")


def threaded(iterable: Iterable[T], /, *, ahead: int = 16) -> AsyncGenerator[T]:
    """Return an async generator that pulls a blocking iterable in a thread: `runner.map(fetch, percore.threaded(rows))`.

    A map pulls its sync inputs in the event loop. A list, or a generator that only computes, is fine there. Use `threaded` for an
    iterable whose `next` blocks, such as a database cursor, a pipe, or a file on a slow disk.

    The generator starts one thread when its first item is requested. The thread runs in a copy of the context variables of that
    moment, and ends when the iterable ends.

    If the generator is closed, cancelled or dropped, the thread pulls no further items. A `next` in progress cannot be stopped, and
    percore does not wait for it: after it returns, the thread closes the iterable if that is a generator, and ends. It is a daemon
    thread, so it does not keep the program from ending.

    Args:
        iterable: a sync iterable. Other code must not use it meanwhile.
        ahead: how many items the thread may pull before they are requested. A map's `window` does not count them.

    Raises:
        TypeError, ValueError: `iterable` is not a sync iterable, or `ahead` is not a whole number of at least 1.
        Exception: the generator raises any error of the iterable, after the items that came before it.
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
            while not puller.ready:  # a wake-up for an earlier waiter may come late, when no item is ready
                await puller.wait()
            values, error = puller.ready.popleft()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame: a cycle
            if not values:
                return
            puller.allow()
            yield values[0]
    finally:
        puller.leave()


class _Puller:
    """The thread that pulls an iterable, and the two queues it shares with the event loop: items, and permissions to pull.

    The thread answers each permission with one item, the end, or an error. The loop's side starts with `ahead` permissions and adds
    one for each item it takes, so at most `ahead` items are pulled before they are requested.
    """

    def __init__(self, iterable: Iterable[Any], loop: asyncio.AbstractEventLoop, ahead: int) -> None:
        self.ready: deque[tuple[tuple[Any, ...], BaseException | None]] = deque()
        """Answers of the thread: one item and no error; no item at the end; or no item and an error."""
        self._iterable = iterable
        self._loop = loop
        self._permissions: SimpleQueue[None] = SimpleQueue()
        self._waiter: asyncio.Future[None] | None = None
        self._told: asyncio.Future[None] | None = None
        """The waiter that the thread has woken last."""
        self._is_left = False
        for _ in range(ahead):
            self.allow()
        threading.Thread(target=copy_context().run, args=(self._run,), name="percore-threaded", daemon=True).start()

    # The loop's side

    def allow(self) -> None:
        """Permit the thread to pull one more item."""
        self._permissions.put(None)

    async def wait(self) -> None:
        """Wait until something is ready."""
        self._waiter = self._loop.create_future()
        try:
            if not self.ready:  # `_put` appends first and then looks for a waiter, so no wake-up is lost
                await self._waiter
        finally:
            self._waiter = None

    def leave(self) -> None:
        """Stop pulling. The thread ends when its current `next` returns."""
        self._is_left = True
        self.allow()  # wakes the thread if it waits for a permission

    def _wake(self) -> None:
        wake(self._waiter)

    # The thread's side

    def _run(self) -> None:
        iterator: Iterator[Any] | None = None
        try:
            iterator = iter(self._iterable)
            while self._is_wanted():
                self._put((next(iterator),), None)
        except StopIteration:
            self._put((), None)
        except BaseException as error:  # of the iterable: `_calls.items` raises it in the place of the item
            self._put((), error)
        finally:
            if isgenerator(iterator):
                self._close(iterator)

    def _is_wanted(self) -> bool:
        self._permissions.get()
        return not self._is_left

    def _put(self, values: tuple[Any, ...], error: BaseException | None) -> None:
        self.ready.append((values, error))
        waiter = self._waiter
        if waiter is not None and waiter is not self._told:
            self._told = waiter
            try:
                for _ in range(2):  # a Ctrl-C may come before the loop begins one, which it then drops
                    self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                self._is_left = True  # the loop is closed, so no task waits for items

    def _close(self, generator: Any) -> None:
        try:
            generator.close()
        except Exception as error:
            report(logging.ERROR, "closing the input %r failed in its thread", generator, exc_info=error)
