"""Stream: the items of one generator that runs in a worker."""

import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import AsyncGeneratorType, TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

T_co = TypeVar("T_co", covariant=True)


class Call(Protocol):
    """The call of a stream: `percore._calls.streams.StreamCall`."""

    credits: Any

    @property
    def state(self) -> str: ...
    def items(self, begin: Callable[[Any], Awaitable[None]], /) -> AsyncGenerator[Any]: ...
    def close(self) -> None: ...
    async def gone(self) -> None: ...


class Stream(Generic[T_co]):
    """The items of `runner.stream`, in order: iterate it once, with `async for`.

    It is lazy: percore pickles the arguments and sends the call when the first item is requested. From then on the worker runs
    ahead of the consumer by at most `prefetch` items. The stream ends when the generator returns or raises. To end it earlier,
    leave an `async with` block around the stream, call `aclose()`, or drop the last reference to the stream. A task that is
    cancelled while it waits for an item ends the stream, too. The generator is then closed in its worker, by the task or thread
    that runs it: one that is suspended at a `yield` gets GeneratorExit there, and an async generator that awaits something gets
    CancelledError there.

    A stream is an async iterator: `anext` returns the next item, and `async for` continues where `anext` or a `break` stopped. A
    `break` alone therefore does not end a stream that a variable still refers to: use `async with` or `aclose()`. One task at a
    time may wait for an item; a second one gets RuntimeError.
    """

    def __init__(self, name: str, call: Call, check: Callable[[], None], begin: Callable[[Any], Awaitable[None]]) -> None:
        """Make a stream. `name` is that of the generator function.

        `check` raises if the stream cannot be used: from another event loop or thread, or after the runner was closed. `begin`
        submits the call.
        """
        self._name = name
        self._call = call
        self._check = check
        self._begin = begin
        self._items: AsyncGeneratorType[T_co, None] | None = None
        self._is_used = self._is_closed = False

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Return the iterator over the items. It is always the same one.

        Raises:
            RuntimeError: the stream has ended, or this is not the runner's event loop and thread.
            RunnerClosed: the runner is closed.
            RunnerBroken: percore has given up starting workers.
        """
        items = self._items
        if items is None or self._is_closed or items.ag_frame is None:
            if self._is_used:
                raise RuntimeError("a stream is used once; call runner.stream(...) again for another round")
            self._is_used = True
            self._check()
            self._items = items = cast(AsyncGeneratorType[T_co, None], self._call.items(self._begin))
        return items

    def __anext__(self) -> Awaitable[T_co]:
        """Return the next item.

        If cancelled, it closes the stream and returns at once. The generator's `finally` blocks run to their end.

        Raises:
            StopAsyncIteration: the generator has returned, or the stream was closed.
            WorkerDied: the worker has died, after all items that it had sent. Nothing is retried.
            RunnerClosed: the runner was closed before the generator returned.
            RemoteError: an item cannot be pickled or unpickled, or the generator raised something that cannot be sent back as
                itself.
            PayloadTooLarge: the pickled arguments, or a pickled item, are larger than `max_message`.
            Exception: any exception of the generator. Its `__cause__` chain ends with the worker's traceback.
            RuntimeError: another task waits for the next item; or as in `__aiter__`.
        """
        return anext(self._items or aiter(self))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the stream, and wait until the generator has ended in its worker. Idempotent; every caller waits.

        A call that has not begun never runs. Any iteration in progress stops, including one in another task. If cancelled, this
        returns at once, and the generator is closed all the same. If the worker dies meanwhile, this returns.

        Raises:
            Exception: an exception that the generator raises while it is closed. One caller gets it. If there is none, the event
                loop's exception handler does.
        """
        self._is_used = self._is_closed = True
        self._call.close()
        items = self._items
        if items is not None and not items.ag_running:  # one that runs in another task ends by itself
            await items.aclose()
        await self._call.gone()

    def __repr__(self) -> str:
        """Return the function's name, the state, and how many items the consumer has taken and the worker has sent."""
        counts = self._call.credits
        return f"<percore.Stream of {self._name} {self._call.state} taken={counts.taken} arrived={counts.arrived}>"

    def __del__(self) -> None:
        if not getattr(self, "_is_used", True):
            warnings.warn("a stream was never used: iterate it with `async for`", RuntimeWarning, stacklevel=2)
