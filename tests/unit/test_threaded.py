"""threaded: an iterable that blocks, pulled in a thread of its own."""

import asyncio
import io
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import AsyncGeneratorType
from typing import Any, cast

import pytest

from percore import threaded

pytestmark = pytest.mark.both_loops

NAME: ContextVar[str] = ContextVar("NAME", default="nobody")


def the_thread() -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == "percore-threaded"), None)


async def ended(thread: threading.Thread | None) -> None:
    if thread is not None:
        await asyncio.to_thread(thread.join)


class Source:
    """Numbers. Each but the first ones waits until it is let through."""

    def __init__(self, free: int = 1, count: int = 1_000_000) -> None:
        self.free, self.count, self.pulled = free, count, 0
        self.gate = threading.Semaphore(0)
        self.closed = threading.Event()
        self.threads: set[int] = set()
        self.on_block: Callable[[], object] = int

    def numbers(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.threads.add(threading.get_ident())
                if number >= self.free:
                    self.on_block()
                    self.gate.acquire()
                self.pulled += 1
                yield number
        finally:
            self.threads.add(threading.get_ident())
            self.closed.set()


async def test_the_loop_runs_while_the_input_blocks() -> None:
    source = Source(count=20)
    seen = []
    async for number in threaded(source.numbers()):
        seen.append(number)
        source.gate.release()  # the next one waits for that
    assert seen == list(range(20))
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads
    await ended(the_thread())


async def test_all_items_come_in_order(subtests: pytest.Subtests) -> None:
    for count in [0, 1, 1000]:
        for ahead in [1, 16]:
            with subtests.test(ahead=ahead, count=count):
                assert [item async for item in threaded(range(count), ahead=ahead)] == list(range(count))
                await ended(the_thread())


async def test_nothing_happens_before_the_first_item_is_asked_for() -> None:
    source = Source()
    items = threaded(source.numbers())
    assert the_thread() is None
    await items.aclose()
    assert (source.pulled, the_thread()) == (0, None)


async def test_it_pulls_so_many_ahead_and_no_more() -> None:
    source, reached = Source(free=1000), threading.Event()

    class Counted:
        def __iter__(self) -> Iterator[int]:
            for number in source.numbers():
                if number == 3:
                    reached.set()
                yield number

    items = threaded(Counted(), ahead=3)
    assert await anext(items) == 0
    await asyncio.to_thread(reached.wait)
    thread = the_thread()
    await items.aclose()
    await ended(thread)
    assert source.pulled <= 4  # one was handed over
    assert source.closed.is_set()


async def test_an_error_comes_behind_what_was_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 0
        yield 1
        raise LookupError("no more")

    seen = []
    with pytest.raises(LookupError, match="no more"):  # noqa: PT012
        async for number in threaded(failing()):
            seen.append(number)  # noqa: PERF401  # what came before the error is what matters
    assert seen == [0, 1]
    await ended(the_thread())


async def test_an_error_of_iter_itself() -> None:
    class Unopened:
        def __iter__(self) -> Iterator[int]:
            raise OSError("cannot be opened")

    with pytest.raises(OSError, match="cannot be opened"):
        await anext(threaded(Unopened()))
    await ended(the_thread())


@pytest.mark.parametrize("how", ["aclose", "cancel"])
async def test_left_early_it_waits_for_nobody_and_closes_the_generator_in_its_thread(how: str) -> None:
    source, blocked = Source(), asyncio.Event()
    loop = asyncio.get_running_loop()
    source.on_block = lambda: loop.call_soon_threadsafe(blocked.set)
    items = threaded(source.numbers())
    assert await anext(items) == 0
    await blocked.wait()
    if how == "cancel":
        task = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    else:
        await items.aclose()
    assert not source.closed.is_set()  # it still blocks
    thread = the_thread()
    source.gate.release()
    await ended(thread)
    assert source.closed.is_set()
    assert source.pulled == 2
    assert len(source.threads) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_woken_for_an_item_that_it_had_already_it_waits_on() -> None:
    source, blocked = Source(), asyncio.Event()
    loop = asyncio.get_running_loop()
    source.on_block = lambda: loop.call_soon_threadsafe(blocked.set)
    items = threaded(source.numbers())
    assert await anext(items) == 0
    await blocked.wait()
    task = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0)
    frame = cast(AsyncGeneratorType[int, None], items).ag_frame
    assert frame is not None
    frame.f_locals["puller"]._wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    source.gate.release()
    assert await task == 1
    thread = the_thread()
    await items.aclose()
    source.gate.release()
    await ended(thread)


async def test_files_stay_open_and_what_fails_to_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def refusing() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            raise ZeroDivisionError

    file = io.StringIO("a\nb\n")
    inputs: list[Any] = [file, refusing()]
    for source in inputs:
        items = threaded(source, ahead=1)
        await anext(items)
        thread = the_thread()
        await items.aclose()
        await ended(thread)
    assert not file.closed
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("percore: closing the input <generator object ")


async def test_the_thread_sees_the_context_variables() -> None:
    def names() -> Iterator[str]:
        yield NAME.get()

    NAME.set("somebody")
    assert [name async for name in threaded(names())] == ["somebody"]
    await ended(the_thread())


def test_a_loop_that_is_closed_ends_the_thread() -> None:
    source = Source()
    loop = asyncio.new_event_loop()
    items = threaded(source.numbers())
    assert loop.run_until_complete(anext(items)) == 0
    anext(items).send(None)  # as a task of that loop, which never goes on
    thread = the_thread()
    assert thread is not None
    loop.close()
    source.gate.release()
    thread.join()
    assert source.closed.is_set()


async def _asynchronous() -> Any:
    yield 1


def test_what_it_takes() -> None:
    with pytest.raises(
        TypeError, match=r"^threaded\(\) takes a sync iterable; an async one needs no thread: give the map <async_gen"
    ):
        threaded(_asynchronous())
    with pytest.raises(TypeError, match=r"^threaded\(\) takes an iterable, not 5$"):
        threaded(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^ahead must be at least 1, not 0$"):
        threaded([1], ahead=0)
    with pytest.raises(TypeError, match=r"^ahead must be a whole number, not 1\.5$"):
        threaded([1], ahead=1.5)  # type: ignore[arg-type]
