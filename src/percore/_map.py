"""Map: one function over many inputs, as a list or as a stream."""

import warnings
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable
from types import AsyncGeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

from percore._calls import kind_of
from percore._flow import Flow
from percore._inputs import Inputs
from percore._options import check_plain
from percore._rows import Spec
from percore._supervisor import Supervisor

T_co = TypeVar("T_co", covariant=True)


class Map(Generic[T_co]):
    """What `runner.map` gives: `await` it for a list, or iterate it. One or the other, once.

    It is lazy: nothing is pulled from the inputs before it is used. Iterating holds at most the window's items, pulled and not yet
    handed over. Leaving `async with`, `aclose()`, and dropping it cancel what is under way and close generators among the inputs.

    It is an async iterator: `anext` gives the next result, and an `async for` goes on where `anext` or a `break` has stopped. So
    a map that is kept in a variable goes on after a `break`: use `async with`, or `aclose()`, to leave it early.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        fn: Callable[..., Any],
        iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...],
        spec: Spec,
        check: Callable[[], None],
    ) -> None:
        """`check` raises where the map may not be used: in another loop or thread, after the runner was closed."""
        kind_of(fn)
        if not iterables:
            raise TypeError("map needs at least one iterable")
        for source in iterables:
            if not isinstance(source, Iterable | AsyncIterable) and not hasattr(source, "__getitem__"):
                raise TypeError(f"map needs iterables, not {source!r}")
        if spec.key is not None:
            if not callable(spec.key):
                raise TypeError(f"key must be a function of the arguments, such as key=host_of, not {spec.key!r}")
            check_plain("key", spec.key)
        if spec.window is not None and (isinstance(spec.window, bool) or not isinstance(spec.window, int)):
            raise TypeError(f"window must be a whole number, not {spec.window!r}")
        if spec.window is not None and spec.window < 1:
            raise ValueError(f"window must be at least 1, not {spec.window}")
        self._supervisor = supervisor
        self._check = check
        self._fn = fn
        self._inputs = Inputs(iterables)
        self._spec = spec
        self._context = None if supervisor.contexts is None else supervisor.contexts.capture()
        self._flow: Flow | None = None
        self._stream: AsyncGeneratorType[T_co, None] | None = None
        self._is_used = self._is_closed = False

    # Using it

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        return self.collect().__await__()

    async def collect(self) -> list[T_co]:
        """All results as a list, in the order of the inputs (with ordered=False: as they came).

        Cancelled: what is under way is cancelled too.

        Raises:
            RuntimeError: the map was used before, or this is another loop or thread than the runner's.
            RunnerClosed: the runner is closed, or was while inputs were left.
            Exception: the first error of a call that happens, unless return_exceptions; or that of an input.
        """
        self._use()
        return await self._start().collect()

    def __aiter__(self) -> AsyncIterator[T_co]:
        """The iterator over the results, always the same one; after its end there is none.

        Raises:
            RuntimeError: the map has ended, or this is another loop or thread than the runner's.
            RunnerClosed: the runner is closed.
        """
        stream = self._stream
        if stream is None or self._is_closed or stream.ag_frame is None:
            self._use()
            self._stream = stream = cast(AsyncGeneratorType[T_co, None], self._start().stream())
        return stream

    def __anext__(self) -> Awaitable[T_co]:
        """The next result.

        Raises:
            StopAsyncIteration: there is none.
            RuntimeError, RunnerClosed: before the first one, as iterating.
            Exception: as `collect`.
        """
        return anext(self._stream or aiter(self))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is under way, close generators among the inputs, and give nothing more. Idempotent.

        Any iteration in progress stops, also one in another task.
        """
        self._is_used = self._is_closed = True
        if self._flow is not None:
            await self._flow.close()
        stream = self._stream
        if stream is not None and not stream.ag_running:  # if it runs, in another task, it ends by itself
            await stream.aclose()  # else the results that it holds would stay until a later turn of the loop

    def __len__(self) -> int:
        return len(self._inputs)

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # for checkers it is no sequence; at run time they are told what to write

        def __getitem__(self, _: object) -> NoReturn:
            # Called by `for`, too. An __iter__ would make it an Iterable, which it is not.
            raise TypeError("a map is asynchronous: iterate it with `async for`, or `await` it for a list")

    def __del__(self) -> None:
        if not getattr(self, "_is_used", True):
            warnings.warn(
                "a map was never used: `await` it, or iterate it with `async for`",
                RuntimeWarning,
                stacklevel=2,
            )

    def _use(self) -> None:
        if self._is_used:
            raise RuntimeError("a map is used once; call runner.map(...) again for another round")
        self._is_used = True
        self._check()

    def _start(self) -> Flow:
        self._flow = Flow(self._supervisor, self._fn, self._inputs, self._spec, self._context)
        return self._flow
