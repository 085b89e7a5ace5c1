"""The common part of nested maps and nested streams: results that a coroutine iterates with `async for`, a thread with `for`.

A `Source` tells what is next (`take`), and wakes those who wait when that may have changed. A `Walk` is what the user holds: loops
around these two. The calls under way refer to the source alone, so that a walk which the user drops is freed, and ends.
"""

import asyncio
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

from percore._common.endings import wake
from percore._worker.families import Family

if TYPE_CHECKING:
    from percore._common.tracing import Span

T_co = TypeVar("T_co", covariant=True)

WAIT: Final[Any] = object()
"""Nothing is ready yet."""

OVER: Final[Any] = object()
"""Nothing comes any more."""


def check_in_loop(family: Family, what: str, instead: str) -> None:
    """Check that this is the worker's event loop.

    Raises:
        RuntimeError: it is not: `what` is for coroutines. `instead` says what to write in a thread.
    """
    if asyncio._get_running_loop() is not family.families.channel.loop:
        raise RuntimeError(f"{what} for coroutines; in a plain function, which runs on a thread, {instead}")


def check_in_thread(what: str, instead: str) -> None:
    """Check that no event loop runs here.

    Raises:
        RuntimeError: one does, and `what` would block it. `instead` says what to write in a coroutine.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"{what} would block the event loop; in a coroutine {instead}")


class Source:
    """The results of nested calls that are under way, in the order in which they are due."""

    def __init__(self, family: Family, span: "Span | None") -> None:
        self.family = family
        self._span = span
        self.families = family.families
        self.loop: asyncio.AbstractEventLoop = family.families.channel.loop
        self.is_closed = False
        """Whether no results are wanted any more."""
        self._waiters: list[asyncio.Future[None] | SimpleQueue[None]] = []

    def begin(self, *, is_async: bool) -> None:
        """Begin, when the first result is requested. `is_async`: by a coroutine."""
        raise NotImplementedError

    def take(self) -> Any:
        """Return the next result, or `WAIT` or `OVER`. May raise any error, which ends the walk."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Withdraw everything that is under way, and wait for nothing. Idempotent; from any thread."""
        raise NotImplementedError

    def close(self, error: BaseException | None = None) -> None:
        """End, because no results are wanted any more, or by this error."""
        self.is_closed = True
        try:
            self.abandon()
        finally:  # it closes generators of the user, which may raise
            self.wake()
            if self._span is not None:
                self._span.ended(error)

    def wake(self) -> None:
        """Wake those who wait. From any thread; first change what they look at."""
        for waiter in list(self._waiters):
            if isinstance(waiter, SimpleQueue):
                waiter.put(None)
            elif asyncio._get_running_loop() is self.loop:
                wake(waiter)
            else:
                self.loop.call_soon_threadsafe(wake, waiter)

    async def until(self, look: Callable[[], Any]) -> Any:
        """Wait until `look` returns something else than `WAIT`, and return that."""
        while (value := look()) is WAIT:
            waiter = self.loop.create_future()
            self._waiters.append(waiter)
            try:
                if (value := look()) is not WAIT:  # no wake-up is lost: the waiter is there before this look
                    break
                await waiter
            finally:
                self._waiters.remove(waiter)
        return value

    def until_in_thread(self, look: Callable[[], Any]) -> Any:
        """As `until`, in a thread."""
        while (value := look()) is WAIT:
            tokens: SimpleQueue[None] = SimpleQueue()
            self._waiters.append(tokens)
            try:
                if (value := look()) is not WAIT:
                    break
                self.family.wait(tokens.get)
            finally:
                self._waiters.remove(tokens)
        return value


class Walk(Generic[T_co]):
    """Results, one after the other: iterate them once, by one task or thread at a time."""

    _noun: ClassVar[str]

    def __init__(self, source: Any) -> None:
        self._source: Source = source
        self._is_asked = self._is_begun = self._is_in_use = False

    def _use(self, *, is_async: bool) -> None:
        """Check a request for a result, and begin if it is the first.

        Raises:
            RuntimeError: of the wrong kind, or another task or thread waits for a result.
        """
        self._is_asked = True
        if is_async:
            check_in_loop(self._source.family, f"`async for` over a {self._noun} is", "write `for`")
        else:
            check_in_thread(f"`for` over a {self._noun}", "write `async for`")
        if self._is_in_use:
            raise RuntimeError(f"another task or thread waits for the next result of this {self._noun}")
        if not self._is_begun and not self._source.is_closed:
            self._is_begun = True
            try:
                self._source.begin(is_async=is_async)
            except BaseException:
                self._source.close()
                raise

    # In a coroutine

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        self._use(is_async=True)
        self._is_in_use = True
        try:
            value = await self._source.until(self._source.take)
        except BaseException as error:
            self._source.close(error)
            raise
        finally:
            self._is_in_use = False
        if value is OVER:
            self._source.close()
            raise StopAsyncIteration
        return value  # type: ignore[no-any-return]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End it, in a coroutine. Idempotent."""
        self._source.close()

    # In a thread

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        self._use(is_async=False)
        self._is_in_use = True
        try:
            value = self._source.until_in_thread(self._source.take)
        except BaseException as error:
            self._source.close(error)
            raise
        finally:
            self._is_in_use = False
        if value is OVER:
            self._source.close()
            raise StopIteration
        return value  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, in a plain function. Idempotent."""
        self._source.close()

    # Both

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is None or source.is_closed:
            return
        if not self._is_asked:
            warnings.warn(f"a {self._noun} was never used: iterate it", RuntimeWarning, stacklevel=2)
        source.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"a {self._noun} of a call cannot be pickled: it belongs to that call")
