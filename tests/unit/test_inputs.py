"""The inputs of a map: pulled in step, errors told behind what came before, generators closed and nothing else."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._common.inputs import Inputs, Pulled


class Closing:
    """What is closed, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def sync(self, items: Iterable[Any], name: str = "sync", error: BaseException | None = None) -> Iterator[Any]:
        try:
            yield from items
            if error is not None:
                raise error
        finally:
            self.names.append(name)

    async def asynchronous(
        self, items: Iterable[Any], name: str = "async", error: BaseException | None = None
    ) -> AsyncIterator[Any]:
        try:
            for item in items:
                yield item
            if error is not None:
                raise error
        finally:
            self.names.append(name)


class Failing:
    """An iterator that raises anything, which a generator cannot."""

    def __init__(self, items: list[Any], error: BaseException) -> None:
        self.items, self.error = items, error

    def __iter__(self) -> "Failing":
        return self

    def __next__(self) -> Any:
        if self.items:
            return self.items.pop(0)
        raise self.error


def opened(*iterables: Any) -> Inputs:
    inputs = Inputs(iterables)
    inputs.open()
    return inputs


async def pull_all(inputs: Inputs) -> tuple[list[Any], Exception | None]:
    rows: list[Any] = []
    while True:
        pulled = await inputs.pull()
        assert len(pulled.rows) == (not pulled.is_end)
        rows += pulled.rows
        if pulled.is_end:
            return rows, pulled.error


# Pulling


@given(st.lists(st.lists(st.integers(), max_size=20), min_size=1, max_size=3), st.integers(1, 8))
def test_sync_inputs_come_in_step(lists: list[list[int]], most: int) -> None:
    inputs = opened(*lists)
    assert not inputs.is_async
    rows: list[Any] = []
    is_end = False
    while not is_end:
        pulled = inputs.pull_now(most)
        assert len(pulled.rows) <= most
        assert pulled.error is None
        rows += pulled.rows
        is_end = pulled.is_end
    assert rows == (lists[0] if len(lists) == 1 else list(zip(*lists, strict=False)))


async def test_async_inputs_come_in_step_with_others(subtests: pytest.Subtests) -> None:
    for lengths in [(3, 3, 3), (0, 3, 3), (3, 0, 3), (3, 5, 2), (2, 5, 9)]:
        for kinds in ["a", "aa", "as", "sa", "sas"]:
            with subtests.test(kinds=kinds, lengths=lengths):
                closing = Closing()
                lists = [list(range(length)) for length in lengths[: len(kinds)]]
                sources: list[Any] = [
                    closing.asynchronous(items) if kind == "a" else items for kind, items in zip(kinds, lists, strict=True)
                ]
                inputs = opened(*sources)
                assert inputs.is_async
                rows, error = await pull_all(inputs)
                assert error is None
                assert rows == (lists[0] if len(lists) == 1 else list(zip(*lists, strict=False)))
                await inputs.close()
                assert all(
                    source.ag_frame is None for source, kind in zip(sources, kinds, strict=True) if kind == "a"
                )  # begun or not


def test_nothing_is_pulled_before_it_is_asked_for() -> None:
    numbers = iter(range(10))
    inputs = opened(numbers)
    assert inputs.pull_now(3) == Pulled([0, 1, 2], False, None)
    assert next(numbers) == 3
    assert inputs.pull_now(2) == Pulled([4, 5], False, None)


async def test_one_row_is_one_item_of_an_endless_input() -> None:
    closing = Closing()

    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    inputs = opened(closing.asynchronous("abc"), endless())
    assert await inputs.pull() == Pulled([("a", 0)], False, None)
    assert await inputs.pull() == Pulled([("b", 1)], False, None)
    await inputs.close()
    assert closing.names == ["async"]


async def test_what_async_for_takes_is_taken() -> None:
    class Bare:
        """What an `__aiter__` gives needs no `__aiter__` itself."""

        def __init__(self) -> None:
            self.number = 0

        async def __anext__(self) -> int:
            self.number += 1
            if self.number > 2:
                raise StopAsyncIteration
            return self.number

    class Source:
        def __aiter__(self) -> Bare:
            return Bare()

    inputs = opened(Source())
    assert await pull_all(inputs) == ([1, 2], None)
    await inputs.close()


@pytest.mark.parametrize("wrong", [7, None, object()])
def test_what_cannot_be_iterated_fails_when_it_is_opened(wrong: Any) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        opened([1], wrong)


# Errors


def test_what_came_before_an_error_is_kept() -> None:
    error = ValueError("in the middle")
    pulled = opened(Closing().sync([1, 2], error=error)).pull_now(10)
    assert pulled == Pulled([1, 2], True, error)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StopAsyncIteration()], ids=lambda error: type(error).__name__)
def test_what_might_be_taken_for_something_else_is_disguised(error: BaseException) -> None:
    rows, is_end, failure = opened(Failing([1], error)).pull_now(10)
    assert (rows, is_end) == ([1], True)
    assert type(failure) is RuntimeError
    assert str(failure) == f"the input raised {error!r}"
    assert failure.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=lambda error: type(error).__name__)
async def test_what_ends_a_program_is_let_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        opened(Failing([], error)).pull_now(10)
    closing = Closing()
    inputs = opened(closing.asynchronous([1]), Failing([], error))
    with pytest.raises(type(error)):
        await inputs.pull()
    await inputs.close()
    assert closing.names == ["async"]


async def test_an_async_input_fails() -> None:
    error = ValueError("in the middle")
    inputs = opened(Closing().asynchronous([1, 2], error=error))
    assert await pull_all(inputs) == ([1, 2], error)
    await inputs.close()


async def test_a_sync_input_fails_beside_an_async_one() -> None:
    closing = Closing()
    error = ValueError("in the middle")
    inputs = opened(closing.asynchronous("abc"), Failing([1], error))
    assert await pull_all(inputs) == ([("a", 1)], error)
    await inputs.close()
    assert closing.names == ["async"]


async def test_a_pull_that_is_cancelled_is_cancelled() -> None:
    async def never() -> AsyncIterator[int]:
        await asyncio.get_running_loop().create_future()
        yield 1

    inputs = opened(never())
    task = asyncio.ensure_future(inputs.pull())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await inputs.close()


# Closing


async def test_generators_are_closed_and_nothing_else() -> None:
    closing = Closing()
    file = io.StringIO("one\ntwo\nthree\n")
    inputs = opened(closing.sync("abc"), file, closing.asynchronous("abc"), iter("abc"))
    assert await inputs.pull() == Pulled([("a", "one\n", "a", "a")], False, None)
    await inputs.close()
    assert closing.names == ["sync", "async"]
    assert file.readline() == "two\n"


async def test_nothing_comes_of_closed_inputs() -> None:
    inputs = opened(iter(range(10)))
    await inputs.close()
    await inputs.close()
    assert inputs.pull_now(10) == Pulled([], True, None)


async def test_one_that_fails_to_close_does_not_keep_the_others_open() -> None:
    closing = Closing()

    def refusing() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise ZeroDivisionError

    inputs = opened(refusing(), closing.sync([1]), closing.asynchronous([1]))
    await inputs.pull()
    with pytest.raises(ZeroDivisionError):
        await inputs.close()
    assert closing.names == ["sync", "async"]
    await inputs.close()


async def test_inputs_that_were_never_opened_are_left_alone() -> None:
    generator = Closing().sync([1])
    await Inputs((generator,)).close()
    assert next(generator) == 1


# How many


@pytest.mark.parametrize(
    ("iterables", "length"),
    [(([1, 2, 3],), 3), (([1, 2, 3], range(2)), 2), (([1, 2, 3], iter([])), 3), (("abcd", {1: 2}, (1, 2)), 1), (([],), 0)],
)
def test_its_length_is_that_of_the_shortest_that_has_one(iterables: tuple[Any, ...], length: int) -> None:
    assert len(Inputs(iterables)) == length


def test_without_any_length_there_is_none() -> None:
    with pytest.raises(TypeError, match=r"^this map has no len\(\): none of its inputs has one$"):
        len(Inputs((iter([1]), Closing().sync([1]))))
