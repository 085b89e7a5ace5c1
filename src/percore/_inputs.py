"""What a map is made of: its inputs, pulled in step."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from contextlib import AsyncExitStack
from inspect import isasyncgen, isgenerator
from itertools import islice
from typing import Any, NamedTuple

from percore._errors import shown


class Pulled(NamedTuple):
    """What came of a pull.

    Attributes:
        rows: the items of the only iterable, or tuples of one of each.
        is_end: whether there is no more.
        error: what the input raised behind these rows.
    """

    rows: list[Any]
    is_end: bool
    error: Exception | None


class Inputs:
    """Several sync or async iterables, pulled in step until the shortest ends."""

    def __init__(self, iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...]) -> None:
        self._sources = iterables
        self._iterators: list[Iterator[Any] | AsyncIterator[Any]] = []
        self._rows: Iterator[Any] = iter(())
        self.is_async = any(isinstance(source, AsyncIterable) for source in iterables)
        self.has_sync = not all(isinstance(source, AsyncIterable) for source in iterables)
        self.is_single = len(iterables) == 1

    def open(self) -> None:
        """Begin to iterate: user code."""
        for source in self._sources:
            self._iterators.append(aiter(source) if isinstance(source, AsyncIterable) else iter(source))
        if not self.is_async:
            self._rows = self._iterators[0] if self.is_single else zip(*self._iterators, strict=False)  # type: ignore[assignment]

    def pull_now(self, most: int) -> Pulled:
        """Up to `most` rows of sync iterables."""
        rows: list[Any] = []
        try:
            rows.extend(islice(self._rows, most))  # where that raises, the list keeps what came before
        except asyncio.CancelledError as error:
            return Pulled(rows, True, _disguised(error))
        except Exception as error:
            return Pulled(rows, True, _disguised(error) if isinstance(error, StopAsyncIteration) else error)
        return Pulled(rows, len(rows) < most, None)

    async def pull(self) -> Pulled:
        """One row."""
        row = []
        try:
            for iterator in self._iterators:
                # `async for` does not ask for an __aiter__ of what an __aiter__ gave, as AsyncIterator does.
                is_async = hasattr(iterator, "__anext__")
                row.append(await anext(iterator) if is_async else next(iterator))  # type: ignore[arg-type]
        except (StopIteration, StopAsyncIteration):
            return Pulled([], True, None)
        except Exception as error:
            return Pulled([], True, error)
        return Pulled([row[0] if self.is_single else tuple(row)], False, None)

    async def close(self) -> None:
        """Close the generators among the inputs; never a file or a list of the user's."""
        iterators, self._iterators, self._rows = self._iterators, [], iter(())
        async with AsyncExitStack() as stack:  # each is closed, whatever another raises
            for iterator in reversed(iterators):
                if isasyncgen(iterator):
                    stack.push_async_callback(iterator.aclose)
                elif isgenerator(iterator):
                    stack.callback(iterator.close)

    def __len__(self) -> int:
        sizes = [len(source) for source in self._sources if isinstance(source, Sized)]
        if not sizes:
            raise TypeError("this map has no len(): none of its inputs has one")
        return min(sizes)


def _disguised(error: BaseException) -> Exception:
    """Not to be taken for the end of the input, nor for a cancellation of whoever uses the map."""
    failure = RuntimeError(f"the input raised {shown(error)}")
    failure.__cause__ = error
    return failure
