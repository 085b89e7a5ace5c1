"""The inputs of a map, in the program or in a call: one or several iterables, pulled in step."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sized
from contextlib import AsyncExitStack, ExitStack
from inspect import isasyncgen, isgenerator
from itertools import islice
from typing import Any, NamedTuple

from percore._common.callables import check_plain
from percore._common.errors import shown


class Pulled(NamedTuple):
    """The result of a pull.

    Attributes:
        rows: the items of a single iterable; for several iterables, tuples with one item of each.
        is_end: whether the input has ended.
        error: the error that the input raised after these rows; None: it raised none.
    """

    rows: list[Any]
    is_end: bool
    error: Exception | None


def check_map(
    iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...], window: int | None, key: Callable[..., object] | None
) -> None:
    """Check the arguments of a map.

    Raises:
        TypeError, ValueError: one is invalid.
    """
    if not iterables:
        raise TypeError("map needs at least one iterable")
    for source in iterables:
        if not isinstance(source, Iterable | AsyncIterable) and not hasattr(source, "__getitem__"):
            raise TypeError(f"map needs iterables, not {source!r}")
    if key is not None:
        if not callable(key):
            raise TypeError(f"key must be a function of the arguments, such as key=host_of, not {key!r}")
        check_plain("key", key)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"window must be a whole number, not {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")


def unpacked(row: Any) -> tuple[Any, ...]:
    """Return the arguments of a call of `starmap`. Runs user code.

    Raises:
        TypeError: this is no iterable.
    """
    if not hasattr(type(row), "__iter__") and not hasattr(type(row), "__getitem__"):
        raise TypeError(f"starmap needs the arguments of each call as a tuple, not {row!r}")
    return tuple(row)


class Inputs:
    """One or several sync or async iterables, pulled in step until the shortest ends."""

    def __init__(self, iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...]) -> None:
        self._sources = iterables
        self._iterators: list[Iterator[Any] | AsyncIterator[Any]] = []
        self._rows: Iterator[Any] = iter(())
        self._asyncs = [isinstance(source, AsyncIterable) for source in iterables]
        self.is_async = any(self._asyncs)
        self.has_sync = not all(self._asyncs)
        self.is_single = len(iterables) == 1

    def prefer_sync(self) -> None:
        """Take those that are both as sync iterables. Call it before `open`."""
        self._asyncs = [isinstance(source, AsyncIterable) and not isinstance(source, Iterable) for source in self._sources]
        self.is_async = any(self._asyncs)
        self.has_sync = not all(self._asyncs)

    def open(self) -> None:
        """Make the iterators. This runs user code."""
        for source, is_async in zip(self._sources, self._asyncs, strict=True):
            self._iterators.append(aiter(source) if is_async else iter(source))  # type: ignore[arg-type]
        if not self.is_async:
            self._rows = self._iterators[0] if self.is_single else zip(*self._iterators, strict=False)  # type: ignore[assignment]

    def pull_now(self, most: int) -> Pulled:
        """Pull up to `most` rows from sync iterables."""
        rows: list[Any] = []
        try:
            rows.extend(islice(self._rows, most))  # if this raises, the list keeps the rows before the error
        except asyncio.CancelledError as error:
            return Pulled(rows, True, _disguised(error))
        except Exception as error:
            return Pulled(rows, True, _disguised(error) if isinstance(error, StopAsyncIteration) else error)
        return Pulled(rows, len(rows) < most, None)

    async def pull(self) -> Pulled:
        """Pull one row from iterables of any kind."""
        row = []
        try:
            for iterator in self._iterators:
                # Not isinstance(iterator, AsyncIterator): that requires an `__aiter__` of the iterator, which `async for` does not.
                is_async = hasattr(iterator, "__anext__")
                row.append(await anext(iterator) if is_async else next(iterator))  # type: ignore[arg-type]
        except (StopIteration, StopAsyncIteration):
            return Pulled([], True, None)
        except Exception as error:
            return Pulled([], True, error)
        return Pulled([row[0] if self.is_single else tuple(row)], False, None)

    async def close(self) -> None:
        """Close the generators among the inputs. Other inputs, such as files, stay open."""
        iterators, self._iterators, self._rows = self._iterators, [], iter(())
        async with AsyncExitStack() as stack:  # all are closed, even if closing one raises
            for iterator in reversed(iterators):
                if isasyncgen(iterator):
                    stack.push_async_callback(iterator.aclose)
                elif isgenerator(iterator):
                    stack.callback(iterator.close)

    def close_now(self) -> None:
        """As `close`, for sync iterables."""
        iterators, self._iterators, self._rows = self._iterators, [], iter(())
        with ExitStack() as stack:
            for iterator in reversed(iterators):
                if isgenerator(iterator):
                    stack.callback(iterator.close)

    def total(self) -> int | None:
        """Return how many rows there are. None: no input has a length, or the user's `__len__` failed."""
        try:
            return len(self)
        except Exception:
            return None

    def __len__(self) -> int:
        sizes = [len(source) for source in self._sources if isinstance(source, Sized)]
        if not sizes:
            raise TypeError("this map has no len(): none of its inputs has one")
        return min(sizes)


def _disguised(error: BaseException) -> Exception:
    """Return a RuntimeError for an error that would look like the end of the input, or like a cancellation of the map's user."""
    failure = RuntimeError(f"the input raised {shown(error)}")
    failure.__cause__ = error
    return failure
