"""Streams that a call consumes."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from percore._protocol.messages import CLOSE, GRANT
from percore._protocol.nested_calls import NestedRequest
from percore._worker.families import Family, StreamChild, unloadable
from percore._worker.walks import OVER, WAIT, Source, Walk, check_in_loop, check_in_thread

if TYPE_CHECKING:
    from percore._common.tracing import Span

T_co = TypeVar("T_co", covariant=True)


class StreamSource(Source):
    """The items of one stream."""

    def __init__(self, family: Family, span: "Span | None", prefetch: int, request: Callable[[], NestedRequest]) -> None:
        """`request` pickles the arguments."""
        super().__init__(family, span)
        self._request = request
        self._half = max(1, prefetch // 2)
        self._taken = 0
        """Items taken since the last GRANT."""
        self._ready: deque[tuple[Any, bool]] = deque()
        self._child: StreamChild | None = None
        self._is_answered = self._is_closing = False
        self._closers: list[None] = []
        """One for each task or thread that waits for the end of the generator."""

    def begin(self, *, is_async: bool) -> None:
        request = self._request()
        child = self.family.child(StreamChild, self._answered)
        child.arrived = self._arrived
        self.family.ask(request, child)
        self._child = child

    def _arrived(self, items: list[tuple[Any, bool]]) -> None:
        if not self._is_closing:
            self._ready += items
            self.wake()

    def _answered(self, _child: StreamChild) -> None:
        self._is_answered = True
        self.wake()

    def take(self) -> Any:
        child = self._child
        if child is not None and child.failure is not None:
            raise child.failure
        if self.is_closed or self._is_closing or child is None:
            return OVER
        if self._ready:
            return self._item(child, *self._ready.popleft())
        if not self._is_answered:
            return WAIT
        if self._ready:  # 1. they arrive  2. the end arrives  3. this thread goes on
            return self._item(child, *self._ready.popleft())
        self.families.unpack(child)  # raises the error of the generator
        return OVER

    def _item(self, child: StreamChild, value: Any, is_pickled: bool) -> Any:  # as it is kept
        self._taken += 1
        if self._taken >= self._half and not self._is_answered:
            taken, self._taken = self._taken, 0
            self.families.channel.send_from_thread(GRANT, child.number, taken)
        if not is_pickled:
            return value
        try:
            return self.families.channel.load(value).load()
        except Exception as error:
            raise unloadable("item", error) from error

    def abandon(self) -> None:
        if self._is_closing and not self._is_answered:
            return  # somebody waits for the end, which comes
        child, self._child = self._child, None
        self._ready.clear()
        if child is not None:
            self.family.drop_soon(child)

    # The end

    def is_open(self) -> bool:
        """Whether the end of the generator is still to come."""
        return self._child is not None and not self._is_answered

    def ask_for_end(self) -> None:
        """Have the generator closed, for one who waits for `end`."""
        self._closers.append(None)
        child = self._child
        if not self._is_closing and child is not None:
            self._is_closing = True
            self._ready.clear()
            self.wake()
            self.families.channel.send_from_thread(CLOSE, child.number, None)

    def end(self) -> Any:
        """Return `OVER` once the generator has ended, and `WAIT` before. Raises the error by which it has failed, once."""
        if not self._is_answered:
            return OVER if self._child is None else WAIT
        child, self._child = self._child, None
        self.is_closed = True
        if child is not None and child.failure is None:
            self.families.unpack(child)
        return OVER

    def waited(self) -> None:
        """Note that one who has asked for the end waits no longer. After the last one nothing waits for it any more."""
        self._closers.pop()
        if not self._closers:
            self._is_closing = False
            self.close()


class NestedStream(Walk[T_co]):
    """The items of `percore.current_runner().stream(...)`, in order: iterate it once, with `async for` or, on a thread, with `for`.

    It is lazy: percore pickles the arguments and sends the call when the first item is requested. From then on its worker runs
    ahead of the consumer by at most `prefetch` items. A generator that waits for its consumer gives its place back, so that calls
    which the consumer makes meanwhile find one.

    The stream ends when the generator returns or raises, and when the call ends that consumes it. To end it earlier, leave a `with`
    or `async with` block around it, call `close()` or `aclose()`, or drop the last reference to it. A `break` alone does not end a
    stream that a variable still refers to.
    """

    _noun = "stream"

    async def aclose(self) -> None:
        """Close the stream, and wait until the generator has ended in its worker. In a coroutine. Idempotent.

        A call that has not begun never runs. If cancelled, this returns at once, and the generator is closed all the same. If the
        worker dies meanwhile, this returns.

        Raises:
            Exception: an exception that the generator raises while it is closed.
        """
        source = cast(StreamSource, self._source)
        if source.is_open():
            check_in_loop(source.family, "aclose() is", "write `close()`")
            source.ask_for_end()
            try:
                await source.until(source.end)
            finally:
                source.waited()
        else:
            source.close()

    def close(self) -> None:
        """As `aclose`, in a plain function."""
        source = cast(StreamSource, self._source)
        if source.is_open():
            check_in_thread("close()", "write `await stream.aclose()`")
            source.ask_for_end()
            try:
                source.until_in_thread(source.end)
            finally:
                source.waited()
        else:
            source.close()
