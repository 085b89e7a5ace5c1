"""map, map_items and starmap: the methods that make many calls, with their overloads for type checkers."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import percore
from percore._common.call_options import MAP_ADVICE
from percore._common.options import advising

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from typing import Generic, ParamSpec, Required, TypedDict, TypeVar, Unpack, overload

    from percore._calls.policy import Policy
    from percore._map.map import Map
    from percore._supervisor.supervisor import Supervisor

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
        """Options of a map. `P`: the parameters of its function, or `...` if they are unknown."""

        ordered: bool
        window: int | None
        key: Callable[P, Hashable] | None
        progress: bool | Literal["text"] | Callable[[percore.Progress], object] | None

    class Raise(Typed[P], total=False):
        """The first error is raised."""

        return_exceptions: Literal[False]

    class Keep(Typed[P], total=False):
        """Errors are among the results."""

        return_exceptions: Required[bool]


AnyItems: TypeAlias = Iterable[Any] | AsyncIterable[Any]


class MapVerbs:
    """Run a function over many inputs.

    The overloads are for type checkers only. They differ by the number of iterables (up to five are checked against the function's
    parameters), by whether the function is awaited, and by whether errors are raised or returned. At run time, and for `help`, each
    method has the one signature below its overloads.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _supervisor: Supervisor
        _policy: Policy | None
    _policy = None

    def _check_open(self) -> None:
        """Check that the runner accepts calls, and accepts them from this caller.

        Raises:
            RunnerClosed, RunnerBroken, RuntimeError: it does not; the message says why.
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
                *more: AnyItems, **o: Unpack[Raise[...]]) -> Map[T]: ...
        @overload
        def map(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[Raise[...]]) -> Map[T]: ...
        @overload
        def map(self, fn: Async[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[Keep[...]]) -> Map[T | BaseException]: ...
        @overload
        def map(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                *more: AnyItems, **o: Unpack[Keep[...]]) -> Map[T | BaseException]: ...
        # fmt: on

    @advising("Runner.map", MAP_ADVICE)
    def map(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
        progress: bool | Literal["text"] | Callable[[percore.Progress], object] | None = None,
    ) -> percore.Map[Any]:
        """Return a Map that calls `fn` with one item of each iterable at a time, until the shortest iterable ends.

        The map is lazy and can be used once: `await` it for a list, or iterate it with `async for` in bounded memory. It pulls
        nothing from the iterables before that. To stop early, leave an `async with` block around the map or call its `aclose()`:
        both cancel the calls that are not done. percore measures how long calls take, and sends short calls of plain functions in
        batches of about one millisecond of work.

        Args:
            fn: a coroutine function or a plain function.
            *iterables: sync or async iterables; they may be endless. The event loop pulls sync ones. If their `next` blocks, pass
                `percore.threaded(iterable)`.
            ordered: return results in the order of the inputs. False: return each result as soon as it is there.
            window: how many items may be pulled whose results have not been returned yet. Default: percore adapts it to the
                duration of the calls, up to 16,384 items per worker and 131,072 in all, within 64 MiB of pickled arguments and
                64 MiB of results (those that wait and those that it expects).
            key: a plain function that takes the arguments of a call and returns its key. Calls with equal keys are never on two
                workers at once.
            return_exceptions: return an error in the place of its result instead of raising it.
            progress: True: show how far the map is, on standard error: by rich at a terminal, by tqdm in a notebook (percore's
                extra `progress` installs both), and elsewhere as "text". "text": write a line each minute, and one at the end. A
                function: the event loop calls it with a `percore.Progress` ten times a second while the map runs, and once at its
                end. If showing raises, percore logs that, and the map goes on.

        Raises:
            TypeError, ValueError: `fn` is not callable, an iterable is not iterable, or an option is invalid.
            RunnerClosed, RunnerBroken, RuntimeError: as in `submit`.
        """
        return self._map(fn, iterables, ordered, window, key, return_exceptions, progress)

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
                      *more: AnyItems, **o: Unpack[Raise[...]]) -> Map[tuple[tuple[Any, ...], T]]: ...
        @overload
        def map_items(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[Raise[...]]) -> Map[tuple[tuple[Any, ...], T]]: ...
        @overload
        def map_items(self, fn: Async[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[Keep[...]]) -> Map[tuple[tuple[Any, ...], T | BaseException]]: ...
        @overload
        def map_items(self, fn: Plain[..., T], a: AnyItems, b: AnyItems, c: AnyItems, d: AnyItems, e: AnyItems, f: AnyItems, /,
                      *more: AnyItems, **o: Unpack[Keep[...]]) -> Map[tuple[tuple[Any, ...], T | BaseException]]: ...
        # fmt: on

    @advising("Runner.map_items", MAP_ADVICE)
    def map_items(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
        progress: bool | Literal["text"] | Callable[[percore.Progress], object] | None = None,
    ) -> percore.Map[tuple[Any, Any]]:
        """Like `map`, but return pairs of item and result. With several iterables the item is a tuple.

        With `return_exceptions`, a pair shows which item failed, and with which error.
        """
        return self._map(fn, iterables, ordered, window, key, return_exceptions, progress, pairs=True)

    if TYPE_CHECKING:
        # fmt: off

        @overload
        def starmap(self, fn: Async[..., T], rows: In[Iterable[Any]], /, **o: Unpack[Raise[...]]) -> Map[T]: ...
        @overload
        def starmap(self, fn: Plain[..., T], rows: In[Iterable[Any]], /, **o: Unpack[Raise[...]]) -> Map[T]: ...
        @overload
        def starmap(self, fn: Async[..., T], rows: In[Iterable[Any]], /, **o: Unpack[Keep[...]]) -> Map[T | BaseException]: ...
        @overload
        def starmap(self, fn: Plain[..., T], rows: In[Iterable[Any]], /, **o: Unpack[Keep[...]]) -> Map[T | BaseException]: ...
        # fmt: on

    @advising("Runner.starmap", MAP_ADVICE)
    def starmap(  # noqa: PLR0913  # each is a documented option
        self,
        fn: Callable[..., Any],
        iterable: AnyItems,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
        progress: bool | Literal["text"] | Callable[[percore.Progress], object] | None = None,
    ) -> percore.Map[Any]:
        """Like `map`, but the iterable yields tuples of arguments: each call is `fn(*row)`."""
        return self._map(fn, (iterable,), ordered, window, key, return_exceptions, progress, star=True)

    def _map(  # noqa: PLR0913, PLR0917  # the common part of map, map_items and starmap
        self,
        fn: Callable[..., Any],
        iterables: tuple[AnyItems, ...],
        ordered: bool,
        window: int | None,
        key: Callable[..., Hashable] | None,
        return_exceptions: bool,
        progress: bool | Literal["text"] | Callable[[percore.Progress], object] | None,
        *,
        pairs: bool = False,
        star: bool = False,
    ) -> percore.Map[Any]:
        if self._policy is not None and self._policy.key is not None:
            raise TypeError(
                "options(key=...) is for one call; a map takes a function that gives each call's key: map(..., key=host_of)"
            )
        if key is None and self._policy is not None and self._policy.rate is not None:
            raise TypeError(
                "a rate counts the calls of one key: give the map a function that returns each call's key, as in "
                "runner.options(rate=percore.Rate(10, per=1)).map(fetch, urls, key=host_of)"
            )
        self._check_open()
        from percore._map.map import Map
        from percore._map.rows import Spec
        from percore._map.run import MapRun

        spec, supervisor = Spec(ordered, window, key, return_exceptions, pairs, star, self._policy, progress), self._supervisor
        return Map(fn, iterables, spec, self._check_open, lambda inputs: MapRun(supervisor, fn, inputs, spec))
