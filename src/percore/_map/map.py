"""Map: the results of one function over many inputs, as a list or as a stream."""

import warnings
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable
from types import AsyncGeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar, cast

from percore._common.callables import is_coroutine_call, qualified_name
from percore._common.inputs import Inputs, check_map
from percore._map.progress import Counts
from percore._map.progress import check as check_progress
from percore._map.rows import Spec

T_co = TypeVar("T_co", covariant=True)


class Run(Protocol):
    """The run of a map: `percore._map.run.MapRun`."""

    def counts(self) -> Counts: ...
    async def collect(self) -> list[Any]: ...
    def stream(self) -> AsyncGenerator[Any]: ...
    async def close(self) -> None: ...


class Map(Generic[T_co]):
    """The results of `runner.map`: `await` it for a list, or iterate it with `async for`. Use it once, in one of these ways.

    It is lazy: it pulls nothing from the inputs before it is used. While it is iterated, at most `window` items are pulled whose
    results have not been returned yet. To stop early, leave an `async with` block around the map, call `aclose()`, or drop the last
    reference to the map. Each of these cancels the calls that are not done and closes the generators among the inputs.

    A map is an async iterator: `anext` returns the next result, and `async for` continues where `anext` or a `break` stopped. A
    `break` alone therefore does not end a map that a variable still refers to: use `async with` or `aclose()`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...],
        spec: Spec,
        check: Callable[[], None],
        make_run: Callable[[Inputs], Run],
    ) -> None:
        """Validate the arguments.

        `check` raises if the map cannot be used: from another event loop or thread, or after the runner was closed. `make_run`
        makes the run of this map, now.
        """
        is_coroutine_call(fn)
        check_map(iterables, spec.window, spec.key)
        check_progress(spec.progress)
        self._fn = fn
        self._check = check
        self._inputs = Inputs(iterables)
        self._run = make_run(self._inputs)
        self._stream: AsyncGeneratorType[T_co, None] | None = None
        self._is_used = self._is_closed = False

    # Using it

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        return self.collect().__await__()

    async def collect(self) -> list[T_co]:
        """Return all results as a list, in the order of the inputs. With `ordered=False`, in the order in which they came.

        If cancelled, it cancels the calls that are not done.

        Raises:
            RuntimeError: the map was used before, or this is not the runner's event loop and thread.
            RunnerClosed: the runner is closed, or was closed before all inputs were done.
            RunnerBroken: percore has given up starting workers.
            Exception: the first error that any call raises, unless `return_exceptions` is set; or the error of an input.
        """
        self._use()
        return await self._run.collect()

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Return the iterator over the results. It is always the same one.

        Raises:
            RuntimeError: the map has ended or was awaited, or this is not the runner's event loop and thread.
            RunnerClosed: the runner is closed.
            RunnerBroken: percore has given up starting workers.
        """
        stream = self._stream
        if stream is None or self._is_closed or stream.ag_frame is None:
            self._use()
            self._stream = stream = cast(AsyncGeneratorType[T_co, None], self._run.stream())
        return stream

    def __anext__(self) -> Awaitable[T_co]:
        """Return the next result.

        Raises:
            StopAsyncIteration: no results are left.
            RuntimeError, RunnerClosed, RunnerBroken: on the first use of the map, as in `__aiter__`.
            Exception: as in `collect`; with `ordered=True` an error is raised at the place of its result.
        """
        return anext(self._stream or aiter(self))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the calls that are not done, and close the generators among the inputs. Idempotent.

        Any iteration in progress stops, including one in another task.
        """
        self._is_used = self._is_closed = True
        await self._run.close()
        stream = self._stream
        if stream is not None and not stream.ag_running:  # a stream that is running in another task ends by itself
            await stream.aclose()  # now, to release the results it holds; the loop would do so later

    def __len__(self) -> int:
        return len(self._inputs)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        """Return the function's name, the state, and how many items are done, have failed, were pulled, and there are in all."""
        counts = self._run.counts()
        known = self._inputs.total()
        total = "" if known is None else f" total={known}"
        failed = f" failed={counts.failed}" if counts.failed else ""
        name = qualified_name(self._fn)
        return f"<percore.Map of {name} {counts.state} done={counts.done}{failed} pulled={counts.pulled}{total}>"

    if not TYPE_CHECKING:  # type checkers should not take a map for a sequence; at run time the error says how to use it

        def __getitem__(self, _: object) -> NoReturn:
            # `for` calls this, too. With an __iter__ the map would count as an Iterable, and it is not one.
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
