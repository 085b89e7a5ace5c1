"""Streams in a worker: they run generators, and send the items as far as the supervisor has granted credits.

An async generator runs in a task (`TaskStream`), a plain one on a thread of the pool for its whole life (`ThreadStream`). Both are
closed where they run: a stream that waits for credits or for room closes its generator at once, a running generator when it yields
next. A task is cancelled, too, so an async generator that awaits gets CancelledError there.

Small items are collected and sent together: when the stream has to wait, when half of the first credits are collected, and in any
case soon. A large item is sent alone. The stream goes on when the channel has taken it, because later messages could overtake it
before.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from percore._common.endings import wake
from percore._common.fault_points import POINTS, point
from percore._protocol.messages import ITEM, ITEMS, Payload
from percore._worker.answers import SMALL, Answers
from percore._worker.sampling import UNGAUGED

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel
    from percore._worker.threads import Threads

KEEP: Final = 0.002
"""Seconds that an item of a plain generator may wait for other items."""

_MOST: Final = 256
_MOST_BYTES: Final = 32_768
_LONG: Final = 0.00005
"""Seconds for half of the items that are sent together from which on the halves are sent singly. A message costs about as much."""
_TURN: Final = 0.003
"""Seconds after which an async generator that never awaits gives way to other tasks."""

_PLAIN: Final = frozenset({float, bool, type(None)})
_LARGE_INT: Final = 1 << 63
_HEAVIEST_INT: Final = 48
"""Bytes of the largest int that passes as it is, in a message. A reference takes less."""


class _Stream:
    """The items of one stream, on their way to the supervisor."""

    def __init__(self, channel: "WorkerChannel", answers: Answers, call_id: int, prefetch: int) -> None:
        self.is_closing = False
        """Whether the generator is to be closed."""
        self.gauges = UNGAUGED
        """Those of the generator function."""
        self._channel = channel
        self._answers = answers
        self._passes = answers.passes
        self._call_id = call_id
        self._credits = prefetch
        """How many more items may be sent."""
        self._most = min(_MOST, prefetch)
        """Items that are sent together."""
        self._half = (self._most + 1) // 2
        """Items that are sent together if producing them takes long, so that the consumer takes them while others are produced."""
        self._began = 0.0
        """When the first of the collected items was added."""
        self._values: list[Any] = []
        self._pickled: list[int] = []
        """Indexes of the values that are pickles."""
        self._size = 0
        self._is_blocked = False
        """Whether a large item waits until the channel takes it."""
        self._lock = threading.Lock()
        """Held while items are sent, so that they arrive in order. Meanwhile another thread may append scalars to `_values`."""

    def _add(self, item: Any) -> Payload | None:
        """Collect an item. Return its payload if it has to be sent alone, else None. Runs user code.

        Raises:
            ItemFailed: the item cannot be pickled.
        """
        self._credits -= 1
        if not self._values:
            self._began = time.perf_counter()
        kind = type(item)
        if kind in _PLAIN or (kind is int and -_LARGE_INT < item < _LARGE_INT):
            self._values.append(item)
            return None
        if self._passes(item):
            with self._lock:
                self._size += 4 * len(item) if kind is str or kind is bytes else _HEAVIEST_INT
                self._values.append(item)
            return None
        payload = self._answers.item(item, self.gauges)
        if type(payload) is not bytes or len(payload) > SMALL:
            return payload
        with self._lock:
            self._size += len(payload)
            self._pickled.append(len(self._values))
            self._values.append(payload)
        return None

    def _is_due(self) -> bool:
        count = len(self._values)
        if count == self._half and time.perf_counter() - self._began > _LONG:
            return True
        return count >= self._most or self._size > _MOST_BYTES

    def flush(self) -> None:
        """Send the collected items. From the stream's own thread."""
        with self._lock:
            self._send_all()

    def _send_all(self) -> None:
        """Send the collected items. The lock must be held."""
        values, pickled = self._values[:], self._pickled
        if not values:
            return
        if POINTS:
            point("worker.item.ready")
        body = self._channel.pack_values(0, -1.0, values, pickled)  # first: without memory for it no item may be lost
        assert body is not None, "items are counted by their largest sizes, so they fit"
        del self._values[: len(values)]
        self._pickled, self._size = [], 0
        self._channel.send_from_thread(ITEMS, self._call_id, body)

    def _flush_last(self) -> None:
        """Send the collected items before the outcome. If that fails, drop them: none may follow the outcome."""
        try:
            self.flush()
        except BaseException:
            with self._lock:
                self._values, self._pickled = [], []
            raise

    def _send(self, payload: Payload) -> None:
        """Send a large item, now or when there is room for it. `_is_blocked` is set until then."""
        self.flush()
        self._is_blocked = True
        if POINTS:
            point("worker.item.ready")
        self._channel.send_payload(ITEM, self._call_id, payload, self._channel.send_from_thread, self._sent)

    def _sent(self) -> None:
        """Note that the channel has taken a large item. From any thread."""
        raise NotImplementedError


class TaskStream(_Stream):
    """A stream of an async generator. The loop calls the methods."""

    def __init__(self, channel: "WorkerChannel", answers: Answers, call_id: int, prefetch: int) -> None:
        super().__init__(channel, answers, call_id, prefetch)
        self._loop = channel.loop
        self._waiter: asyncio.Future[None] | None = None
        """Set while the stream itself waits, and not the generator."""
        self._is_ending = self._is_flushing = False

    async def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Run the generator to its end, or until it is closed.

        Raises:
            ItemFailed: an item could not be pickled.
            BaseException: what the generator raises.
        """
        generator = fn(*args, **kwargs) if kwargs else fn(*args)
        began = self._loop.time()
        try:
            async for item in generator:
                payload = self._add(item)
                if payload is not None:
                    self._send(payload)
                    await self._unblocked()
                elif self._is_due():
                    self.flush()
                    if self._loop.time() - began > _TURN:
                        self._loop.call_soon(self._wake)
                        await self._pause()
                        began = self._loop.time()
                elif not self._is_flushing:
                    self._loop.call_soon(self._flush_soon)
                    self._is_flushing = True
                if not self._credits:
                    await self._wait_for_credit()
                if self.is_closing:
                    break
        finally:
            self._is_ending = True
            try:
                self._flush_last()
            finally:
                await generator.aclose()

    def credit(self, count: int) -> None:
        """Allow `count` more items."""
        self._credits += count
        self._wake()

    def close(self, task: "asyncio.Task[None] | None" = None) -> None:
        """Close the generator: at once if the stream waits, else by cancelling the task in which it runs. Idempotent."""
        if self.is_closing or self._is_ending:
            return
        self.is_closing = True
        if self._waiter is not None:
            self._wake()
        elif task is not None:
            task.cancel()

    def abandon(self) -> None:
        """Wait for nothing any more, because the worker ends. Its task is cancelled."""
        self.is_closing = True
        self._sent()

    async def _wait_for_credit(self) -> None:
        self.flush()
        while not (self._credits or self.is_closing):
            await self._pause()

    async def _pause(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _unblocked(self) -> None:
        """Wait until the channel has taken the large item, also if this task is cancelled: the outcome must not overtake the item.

        No wake-up is lost: this first makes the waiter and then looks, `_sent` first sets what this looks at, then looks for the
        waiter.
        """
        cancelled: BaseException | None = None
        while self._is_blocked:
            self._waiter = self._loop.create_future()
            try:
                if self._is_blocked:
                    await self._waiter
            except asyncio.CancelledError as error:
                cancelled = error
            finally:
                self._waiter = None
        if cancelled is not None:
            raise cancelled

    def _sent(self) -> None:
        self._is_blocked = False
        if self._waiter is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        wake(self._waiter)

    def _flush_soon(self) -> None:
        self._is_flushing = False
        try:
            self.flush()
        except BaseException:  # such as MemoryError: the generator may yield nothing for long
            if not self._is_flushing:
                self._loop.call_later(KEEP, self._flush_soon)
                self._is_flushing = True
            raise


class ThreadStream(_Stream):
    """A stream of a plain generator. Its thread calls `run`, the loop the other methods."""

    def __init__(
        self,
        channel: "WorkerChannel",
        answers: Answers,
        call_id: int,
        prefetch: int,
        threads: "Threads",
        patience: float,
    ) -> None:
        """`threads`: its pool. Another thread runs in its place once it has waited for credits for `patience` seconds."""
        super().__init__(channel, answers, call_id, prefetch)
        self._threads = threads
        self._patience = patience
        self._has_stepped_aside = False
        self.is_abandoned = False
        """Whether nobody waits for the outcome, because the worker ends."""
        self._loop = channel.loop
        self._grants: SimpleQueue[int] = SimpleQueue()
        """Credits for the thread; 0 only wakes it."""
        self._since = 0.0
        """When items were last sent."""
        self._is_watched = False

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """As `TaskStream.run`."""
        generator = fn(*args, **kwargs) if kwargs else fn(*args)
        try:
            while not self.is_closing:  # not `for`: a stream may be closed before its first item
                try:
                    item = next(generator)
                except StopIteration:
                    break
                payload = self._add(item)
                if payload is not None:
                    self._send(payload)
                    while self._is_blocked:
                        self._credits += self._grants.get()
                elif self._is_due() or time.perf_counter() - self._since > KEEP:
                    self.flush()
                    self._threads.give_way()  # the loop needs the GIL
                    self._since = time.perf_counter()
                elif not self._is_watched:
                    self._is_watched = True
                    self._loop.call_soon_threadsafe(self._watch)
                while not self._credits and not self.is_closing:
                    self._credits += self._granted()
        finally:
            try:
                self._flush_last()
            finally:
                if self._has_stepped_aside:  # before the outcome, with which the loop may end
                    self._loop.call_soon_threadsafe(self._threads.trim)
                generator.close()

    def _granted(self) -> int:
        """Wait for credits, or for the end. Return how many they are."""
        if not self._grants.empty():
            return self._grants.get()
        self.flush()
        if self._patience:
            with suppress(Empty):
                return self._grants.get(timeout=self._patience)
        self._has_stepped_aside = True
        try:
            self._threads.step_aside(self._call_id)
        except RuntimeError:  # no thread can be started for the calls that wait
            if not self._patience:  # its consumer may be waiting for such a call
                raise
            return self._grants.get()
        try:
            return self._grants.get()
        finally:
            self._threads.come_back(self._call_id)

    def credit(self, count: int) -> None:
        """Allow `count` more items."""
        self._grants.put(count)

    def close(self, _task: "asyncio.Task[None] | None" = None) -> None:
        """Close the generator when it yields next, or now if the stream waits. Idempotent."""
        self.is_closing = True
        self._grants.put(0)

    def abandon(self) -> None:
        """Wait for nothing any more, because the worker ends."""
        self.is_abandoned = True
        self._is_blocked = False
        self.close()

    def _sent(self) -> None:
        self._is_blocked = False
        self._grants.put(0)  # also in its own thread: a finalizer may call this when `run` is about to wait

    def _watch(self) -> None:
        self._loop.call_later(KEEP, self._flush_kept)

    def _flush_kept(self) -> None:
        """Send items that wait behind a slow one. Their thread is busy with that, so the loop does this.

        The loop never waits for the lock: a garbage collection in the thread that holds it may run a `__del__` that waits for the
        loop. No item is left: that thread is sending them, or it is adding one, and then looks at `_is_watched`.
        """
        self._is_watched = False  # first: an item that is added from now on sets the timer again
        if self._lock.acquire(blocking=False):
            try:
                self._send_all()
            except BaseException:  # such as MemoryError
                self._is_watched = True
                self._watch()
                raise
            finally:
                self._lock.release()
