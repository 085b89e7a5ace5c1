"""The verbs that make many calls: map, map_items and starmap, with what type checkers are told of them."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from percore._options import advising

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from typing import Generic, Literal, ParamSpec, Required, TypedDict, TypeVar, Unpack, overload

    from percore._map import Map
    from percore._policy import Policy
    from percore._supervisor import Supervisor

    A = TypeVar("A")
    B = TypeVar("B")
    C = TypeVar("C")
    D = TypeVar("D")
    E = TypeVar("E")
    T = TypeVar("T")
    P = ParamSpec("P")

    In: TypeAlias = Iterable[A] | AsyncIterable[A]
    Async: TypeAlias = Callable[P, Awaitable[T]]
    Plain: TypeAlias = Callable[P, T]

    class Typed(TypedDict, Generic[P], total=False):
        """Options of a map. `P`: what its function takes."""

        ordered: bool
        window: int | None
        key: Callable[P, Hashable] | None

    class Untyped(TypedDict, total=False):
        """The same where that is not known."""

        ordered: bool
        window: int | None
        key: Callable[..., Hashable] | None

    class Raise(Typed[P], total=False):
        """The first error is raised."""

        return_exceptions: Literal[False]

    class RaiseAny(Untyped, total=False):
        """The first error is raised."""

        return_exceptions: Literal[False]

    class Keep(Typed[P], total=False):
        """Errors are among the results."""

        return_exceptions: Required[bool]

    class KeepAny(Untyped, total=False):
        """Errors are among the results."""

        return_exceptions: Required[bool]


AnyItems: TypeAlias = Iterable[Any] | AsyncIterable[Any]

_OF_THE_VIEW: Final = "it is an option of the calls, as in runner.options({0}=...).map(...)"
_OF_THE_RUNNER: Final = "the runner has a fixed number of workers, as in percore.Runner(workers=4)"
_NO_CHUNKS: Final = "there is no chunk size to tune, percore batches short calls by how long they take"
_ADVICE: Final = {
    "chunksize": _NO_CHUNKS,
    "batch_size": _NO_CHUNKS,
    "timeout": "for each call write runner.options(timeout=...).map(...), for the map as a whole asyncio.timeout(...) around it",
    "buffersize": "window=... says how many items may be pulled and not yet handed over",
    "max_workers": _OF_THE_RUNNER,
    "workers": _OF_THE_RUNNER,
} | {name: _OF_THE_VIEW.format(name) for name in ("retries", "retry_on", "backoff")}
"""For keywords of the maps of other libraries, and of other methods."""


class MapVerbs:
    """Runs a function over many inputs.

    The overloads are for type checkers alone: by the number of iterables (five, then anything goes), by whether the function is
    awaited, and by whether errors are raised or kept. At run time, and for `help`, each verb has the one signature below them.
    """

    __slots__ = ()

    _supervisor: Supervisor
    _policy: Policy | None = None

    def _check_open(self) -> None:
        """That calls are taken, from here.

        Raises:
            RunnerClosed, RunnerBroken, RuntimeError: they are not; the text says why.
        """
        raise NotImplementedError

    if TYPE_CHECKING:
        # fmt: off

        @overload
        def map(self, fn: Async[[A], T], a: In[A], /, **o: Unpack[Raise[[A]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[[A], T], a: In[A], /, **o: Unpack[Raise[[A]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[[A], T], a: In[A], /, **o: Unpack[Keep[[A]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[[A], T], a: In[A], /, **o: Unpack[Keep[[A]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Async[[A, B], T], a: In[A], b: In[B], /, **o: Unpack[Raise[[A, B]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[[A, B], T], a: In[A], b: In[B], /, **o: Unpack[Raise[[A, B]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[[A, B], T], a: In[A], b: In[B], /, **o: Unpack[Keep[[A, B]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[[A, B], T], a: In[A], b: In[B], /, **o: Unpack[Keep[[A, B]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Async[[A, B, C], T], a: In[A], b: In[B], c: In[C], /, **o: Unpack[Raise[[A, B, C]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[[A, B, C], T], a: In[A], b: In[B], c: In[C], /, **o: Unpack[Raise[[A, B, C]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[[A, B, C], T], a: In[A], b: In[B], c: In[C], /,
                **o: Unpack[Keep[[A, B, C]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[[A, B, C], T], a: In[A], b: In[B], c: In[C], /,
                **o: Unpack[Keep[[A, B, C]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Async[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                **o: Unpack[Raise[[A, B, C, D]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                **o: Unpack[Raise[[A, B, C, D]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                **o: Unpack[Keep[[A, B, C, D]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                **o: Unpack[Keep[[A, B, C, D]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Async[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                **o: Unpack[Raise[[A, B, C, D, E]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                **o: Unpack[Raise[[A, B, C, D, E]]]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                **o: Unpack[Keep[[A, B, C, D, E]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                **o: Unpack[Keep[[A, B, C, D, E]]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Async[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[RaiseAny]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[RaiseAny]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[KeepAny]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[KeepAny]) -> Map[T | BaseException]: ...
        # fmt: on

    @advising("Runner.map", _ADVICE)
    def map(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[Any]:
        """Call `fn` with the items of the iterables, one of each at a time, until the shortest ends.

        Nothing is pulled before the map is used, once: `await` it for a list, or iterate it with `async for` in bounded memory.
        Left early, inside `async with` or by `aclose()`, what is under way is cancelled. Tiny plain functions travel in batches
        of about a millisecond's work, as measured.

        Args:
            fn: a coroutine function or a plain one.
            *iterables: sync, async, or endless. Sync ones are pulled in the event loop: where `next` blocks, give
                `percore.threaded(iterable)`.
            ordered: give results in the order of the inputs, or as they come.
            window: exactly this many items are pulled and not yet handed over. Default: as many as the calls' duration asks for,
                at most 16,384 a worker and 131,072 in all, within 64 MiB of pickled arguments and 64 MiB of results that wait or
                are expected.
            key: a plain function that gives the key of a call, from its arguments: calls of equal keys are never on two workers
                at once.
            return_exceptions: give errors in place of results instead of raising them.

        Raises:
            TypeError, ValueError: something that cannot be called or iterated, or a bad window.
            RunnerClosed, RuntimeError: as `submit`.
        """
        return self._map(fn, iterables, ordered, window, key, return_exceptions)

    if TYPE_CHECKING:
        # fmt: off

        @overload
        def map_items(self, fn: Async[[A], T], a: In[A], /, **o: Unpack[Raise[[A]]]) -> Map[tuple[A, T]]: ...
        @overload
        def map_items(self, fn: Plain[[A], T], a: In[A], /, **o: Unpack[Raise[[A]]]) -> Map[tuple[A, T]]: ...
        @overload
        def map_items(self, fn: Async[[A], T], a: In[A], /, **o: Unpack[Keep[[A]]]) -> Map[tuple[A, T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[[A], T], a: In[A], /, **o: Unpack[Keep[[A]]]) -> Map[tuple[A, T | BaseException]]: ...
        @overload
        def map_items(self, fn: Async[[A, B], T], a: In[A], b: In[B], /,
                      **o: Unpack[Raise[[A, B]]]) -> Map[tuple[tuple[A, B], T]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B], T], a: In[A], b: In[B], /,
                      **o: Unpack[Raise[[A, B]]]) -> Map[tuple[tuple[A, B], T]]: ...
        @overload
        def map_items(self, fn: Async[[A, B], T], a: In[A], b: In[B], /,
                      **o: Unpack[Keep[[A, B]]]) -> Map[tuple[tuple[A, B], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B], T], a: In[A], b: In[B], /,
                      **o: Unpack[Keep[[A, B]]]) -> Map[tuple[tuple[A, B], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Async[[A, B, C], T], a: In[A], b: In[B], c: In[C], /,
                      **o: Unpack[Raise[[A, B, C]]]) -> Map[tuple[tuple[A, B, C], T]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B, C], T], a: In[A], b: In[B], c: In[C], /,
                      **o: Unpack[Raise[[A, B, C]]]) -> Map[tuple[tuple[A, B, C], T]]: ...
        @overload
        def map_items(self, fn: Async[[A, B, C], T], a: In[A], b: In[B], c: In[C], /,
                      **o: Unpack[Keep[[A, B, C]]]) -> Map[tuple[tuple[A, B, C], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B, C], T], a: In[A], b: In[B], c: In[C], /,
                      **o: Unpack[Keep[[A, B, C]]]) -> Map[tuple[tuple[A, B, C], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Async[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                      **o: Unpack[Raise[[A, B, C, D]]]) -> Map[tuple[tuple[A, B, C, D], T]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                      **o: Unpack[Raise[[A, B, C, D]]]) -> Map[tuple[tuple[A, B, C, D], T]]: ...
        @overload
        def map_items(self, fn: Async[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                      **o: Unpack[Keep[[A, B, C, D]]]) -> Map[tuple[tuple[A, B, C, D], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B, C, D], T], a: In[A], b: In[B], c: In[C], d: In[D], /,
                      **o: Unpack[Keep[[A, B, C, D]]]) -> Map[tuple[tuple[A, B, C, D], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Async[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                      **o: Unpack[Raise[[A, B, C, D, E]]]) -> Map[tuple[tuple[A, B, C, D, E], T]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                      **o: Unpack[Raise[[A, B, C, D, E]]]) -> Map[tuple[tuple[A, B, C, D, E], T]]: ...
        @overload
        def map_items(self, fn: Async[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                      **o: Unpack[Keep[[A, B, C, D, E]]]) -> Map[tuple[tuple[A, B, C, D, E], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[[A, B, C, D, E], T], a: In[A], b: In[B], c: In[C], d: In[D], e: In[E], /,
                      **o: Unpack[Keep[[A, B, C, D, E]]]) -> Map[tuple[tuple[A, B, C, D, E], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Async[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[RaiseAny]) -> Map[tuple[tuple[Any, ...], T]]: ...
        @overload
        def map_items(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[RaiseAny]) -> Map[tuple[tuple[Any, ...], T]]: ...
        @overload
        def map_items(self, fn: Async[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[KeepAny]) -> Map[tuple[tuple[Any, ...], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[KeepAny]) -> Map[tuple[tuple[Any, ...], T | BaseException]]: ...
        # fmt: on

    @advising("Runner.map_items", _ADVICE)
    def map_items(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[tuple[Any, Any]]:
        """As `map`, giving pairs of item and result; of several iterables the item is a tuple.

        With return_exceptions a pair says which item has failed, and how.
        """
        return self._map(fn, iterables, ordered, window, key, return_exceptions, pairs=True)

    if TYPE_CHECKING:
        # fmt: off

        @overload
        def starmap(self, fn: Async[..., T], rows: In[Iterable[Any]], /, **o: Unpack[RaiseAny]) -> Map[T]: ...
        @overload
        def starmap(self, fn: Plain[..., T], rows: In[Iterable[Any]], /, **o: Unpack[RaiseAny]) -> Map[T]: ...
        @overload
        def starmap(self, fn: Async[..., T], rows: In[Iterable[Any]], /, **o: Unpack[KeepAny]) -> Map[T | BaseException]: ...
        @overload
        def starmap(self, fn: Plain[..., T], rows: In[Iterable[Any]], /, **o: Unpack[KeepAny]) -> Map[T | BaseException]: ...
        # fmt: on

    @advising("Runner.starmap", _ADVICE)
    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: AnyItems,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[Any]:
        """As `map`, over tuples of arguments."""
        return self._map(fn, (iterable,), ordered, window, key, return_exceptions, star=True)

    def _map(  # noqa: PLR0913  # what three verbs have in common
        self,
        fn: Callable[..., Any],
        iterables: tuple[AnyItems, ...],
        ordered: bool,
        window: int | None,
        key: Callable[..., Hashable] | None,
        return_exceptions: bool,
        *,
        pairs: bool = False,
        star: bool = False,
    ) -> Map[Any]:
        if self._policy is not None and self._policy.key is not None:
            raise TypeError(
                "options(key=...) is for one call; a map takes a function that gives each call's key: map(..., key=host_of)"
            )
        self._check_open()
        from percore._map import Map
        from percore._rows import Spec

        spec = Spec(ordered, window, key, return_exceptions, pairs, star, self._policy)
        return Map(self._supervisor, fn, iterables, spec, self._check_open)
