"""Code of the user that cancels a call, or leaves a stream or a map, while percore is in the middle of a step with it.

A garbage collection runs such code anywhere: a `__del__` cancels a future, or, in a loop with eager tasks, closes a stream. Here it
runs where percore enters a function, at each seventh place. With `make long` it runs at each, and after each call, too.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import count
from types import FrameType
from typing import Any, Final, NoReturn, cast

import pytest

from percore import Rate, Runner, Stream
from percore._calls.items import Batch
from percore._scheduler.places import MOST_BROADCASTS
from tests import jobs
from tests.contract import stream_jobs as streams
from tests.counts import LONG, times
from tests.fakes import FakeRunner
from tests.internals import audit_of, members_of, sent_by, supervisor_of
from tests.waiting import until

pytestmark = pytest.mark.asyncio_only

ROOMS: Final = tuple(f"/percore/{room}/" for room in ("_calls", "_map", "_scheduler", "_supervisor"))

EVENTS: Final = ("call", "return", "c_return") if LONG else ("call",)
"""Where a collection may begin: from Python 3.12 on as a function begins, and after each call."""

Withdraw = Callable[[], object]


class Collection:
    """Runs code at one place, in the steps of percore that its block has taken."""

    def __init__(self, at: int, act: Withdraw) -> None:
        self._left = at
        self._act = act
        self.place = ""
        """The place that was hit; empty as long as none was."""

    def _passed(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if self.place or event not in EVENTS or not any(room in code.co_filename for room in ROOMS) or _is_check(frame):
            return
        if not self._left:
            self.place = f"{code.co_qualname}, line {frame.f_lineno}, {event}"
            self._act()
        self._left -= 1

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._passed)
        try:
            yield
        finally:
            sys.setprofile(before)


def _is_check(frame: FrameType | None) -> bool:
    """Whether the audit looks: at one thing after the other, so what happens meanwhile would count as a fault."""
    while frame is not None and not frame.f_code.co_filename.endswith("audit.py"):
        frame = frame.f_back
    return frame is not None


def now(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Begin it here, as a loop with eager tasks does; and leave it."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()


async def ends(awaitable: Any) -> None:
    """Wait for an end of any kind."""
    async with asyncio.timeout(20):
        await asyncio.gather(awaitable, return_exceptions=True)


# What is withdrawn, and the steps that it is in meanwhile


async def a_new_stream(runner: Runner, at: int) -> str:
    stream = runner.stream(streams.anumbers, 1_000_000)
    collection = Collection(at, lambda: now(stream.aclose()))
    with collection.on(), contextlib.suppress(StopAsyncIteration):
        await anext(stream)
    await ends(stream.aclose())
    return collection.place


async def a_new_stream_that_waits(runner: Runner, at: int) -> str:
    busy = [runner.submit(asyncio.sleep, 0.001) for _ in range(2)]
    place = await a_new_stream(runner, at)
    await asyncio.gather(*busy)
    return place


async def a_waiting_call(runner: Runner, at: int, **options: Any) -> str:
    view = runner.options(**options)
    busy = [view.submit(asyncio.sleep, 0) for _ in range(2)]
    waiting = [view.submit(jobs.aecho, number) for number in range(2)]
    collection = Collection(at, waiting[0].cancel)
    with collection.on():
        await asyncio.wait(busy)
        for future in waiting:
            await ends(future)
    return collection.place


async def a_waiting_call_with_a_key(runner: Runner, at: int) -> str:
    return await a_waiting_call(runner, at, key="key")


async def a_waiting_call_with_a_rate(runner: Runner, at: int) -> str:
    return await a_waiting_call(runner, at, key="rated", rate=Rate(10_000, per=1, burst=2))


async def a_call_that_is_tried_again(runner: Runner, at: int) -> str:
    future = runner.options(retries=1, retry_on=ValueError).submit(jobs.afail, ValueError)
    collection = Collection(at, future.cancel)
    with collection.on():
        await ends(future)
    return collection.place


async def a_map(runner: Runner, at: int) -> str:
    results = runner.map(jobs.aecho, range(5), key=str)
    collection = Collection(at, lambda: now(results.aclose()))
    with collection.on():
        await ends(results.collect())
    return collection.place


async def a_map_without_keys(runner: Runner, at: int) -> str:
    return await a_map_of(runner, at, jobs.aecho)


async def a_map_in_batches(runner: Runner, at: int) -> str:
    return await a_map_of(runner, at, jobs.echo)


async def a_map_of(runner: Runner, at: int, fn: Callable[..., Any]) -> str:
    results = runner.map(fn, range(5))
    collection = Collection(at, lambda: now(results.aclose()))
    with collection.on():
        await ends(results.collect())
    return collection.place


async def a_broadcast_that_waits(runner: Runner, at: int) -> str:
    """Its coroutine is closed, as that of a task that nobody refers to any more."""
    (member,) = members_of(runner)
    before = member.tickets
    busy = [asyncio.ensure_future(runner.broadcast(asyncio.sleep, 0)) for _ in range(MOST_BROADCASTS)]
    await asyncio.sleep(0)
    coroutine = cast("Coroutine[Any, Any, Any]", runner.broadcast(jobs.aecho, 1))
    coroutine.send(None)
    (call,) = supervisor_of(runner).calls.broadcasts.calls()
    collection = Collection(at, coroutine.close)
    with collection.on():
        await ends(asyncio.gather(*busy))
        await ends(call)
    coroutine.close()
    assert member.tickets == before, collection.place
    return collection.place


OPTIONS: Final[dict[Any, dict[str, Any]]] = {a_broadcast_that_waits: {"max_tasks_per_worker": 10_000}}

WAYS: Final = (
    a_new_stream,
    a_new_stream_that_waits,
    a_waiting_call,
    a_waiting_call_with_a_key,
    a_waiting_call_with_a_rate,
    a_call_that_is_tried_again,
    a_map,
    a_map_without_keys,
    a_map_in_batches,
    a_broadcast_that_waits,
)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
async def test_c1_a_withdrawal_in_the_middle_of_any_step_leaves_nothing(
    way: Callable[[Runner, int], Coroutine[Any, Any, str]],
) -> None:
    at = 0
    async with FakeRunner(1, concurrency=2, max_pending=100, **OPTIONS.get(way, {})) as runner:
        supervisor = supervisor_of(runner)
        while place := await way(runner, at):
            at += times(7, 1)
            async with asyncio.timeout(20):
                await until(lambda: not supervisor.closing.unfinished())
            admission: Any = supervisor.admission
            assert (supervisor.dispatch.waiting(), len(supervisor.closing.enders), admission._inside) == (0, 0, 0), place
            (member,) = supervisor.members
            assert (member.calls, member.load, len(member.free)) == ({}, [0, 0, 0], member.places), place
            assert runner.statistics().restarts == 0, place
            audit_of(runner).check()
    assert at > 10


async def test_c1_a_broadcast_that_is_withdrawn_as_its_worker_has_a_place_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it takes none of the calls that the worker may begin, and gives none back."""
    async with FakeRunner(1, max_tasks_per_worker=10) as runner:
        (member,) = members_of(runner)
        busy = [asyncio.ensure_future(runner.broadcast(asyncio.sleep, 0)) for _ in range(MOST_BROADCASTS)]
        await asyncio.sleep(0)
        coroutine = cast("Coroutine[Any, Any, Any]", runner.broadcast(jobs.aecho, 1))
        coroutine.send(None)
        broadcasts = supervisor_of(runner).calls.broadcasts
        fill = broadcasts.fill

        def struck(*args: Any) -> Iterator[Any]:
            for found in fill(*args):
                coroutine.close()
                yield found

        monkeypatch.setattr(broadcasts, "fill", struck)
        with sent_by(runner) as sent:
            await ends(asyncio.gather(*busy))
            async with asyncio.timeout(20):
                await until(lambda: not broadcasts.waiting)
            assert await runner.run(jobs.aecho, 2) == 2
        assert len(sent) == 1
        assert member.tickets == 9
        audit_of(runner).check()


async def test_c1_a_batch_whose_map_is_closed_as_it_is_taken_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeRunner(1) as runner:
        results = runner.map(jobs.echo, range(5))
        dispatch = supervisor_of(runner).dispatch
        fill = dispatch.fill
        taken: list[Any] = []

        def struck(kind: int) -> Iterator[Any]:
            for found in fill(kind):
                taken.append(found[0])
                now(results.aclose())
                yield found

        monkeypatch.setattr(dispatch, "fill", struck)
        with sent_by(runner) as sent:
            await ends(results.collect())
        assert [type(call) for call in taken] == [Batch]
        assert sent == []
        assert await runner.run(jobs.aecho, 2) == 2
        audit_of(runner).check()


class Closes:
    """Closes a stream when it is pickled, and then fails."""

    def __init__(self, closed: list[Stream[Any]]) -> None:
        self.closed = closed

    def __reduce__(self) -> NoReturn:
        now(self.closed[0].aclose())
        raise ValueError("not to be pickled")


async def test_s6_a_stream_that_its_argument_closes_gives_its_admission_back_once() -> None:
    async with FakeRunner(1, max_pending=2) as runner:
        admission: Any = supervisor_of(runner).admission
        admission.enter_now()  # for another call
        closed: list[Stream[Any]] = []
        closed.append(runner.stream(streams.anumbers, cast("Any", Closes(closed))))
        assert [item async for item in closed[0]] == []
        assert admission._inside == 1
        admission.leave()


async def test_p6_a_stream_whose_submission_is_interrupted_after_it_was_sent_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeRunner(1) as runner:
        supervisor = supervisor_of(runner)
        submit: Any = supervisor.submission.stream

        def interrupted(*args: Any) -> None:
            submit(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(supervisor.submission, "stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await anext(runner.stream(streams.anumbers, 1_000_000))
        async with asyncio.timeout(20):
            await until(lambda: not supervisor.closing.unfinished())


# A signal's handler that cancels the task which waits: asyncio.run has one for Ctrl-C


class Question(Collection):
    """Runs code after percore has asked a future whether it is done, and before it acts on that."""

    def _passed(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_question = event == "c_return" and getattr(argument, "__name__", "") == "done"
        if self.place or not is_question or "/percore/" not in code.co_filename or _is_check(frame):
            return
        if not self._left:
            self.place = f"{code.co_qualname}, line {frame.f_lineno}"
            self._act()
        self._left -= 1


async def all_of(results: Any) -> list[Any]:
    return [result async for result in results]


async def started(_: Runner) -> None:
    async with FakeRunner(1):
        pass


async def shared(runner: Runner) -> None:
    (await runner.share([1])).close()


AWAITED: Final[dict[str, Callable[[Runner], Awaitable[object]]]] = {
    "a scalar": lambda runner: runner.run(jobs.aecho, 1),
    "a pickle": lambda runner: runner.run(jobs.aecho, [1]),
    "a large result": lambda runner: runner.run(jobs.aecho, b"x" * 100_000),
    "an error": lambda runner: runner.run(jobs.fail, ValueError("no")),
    "with retries": lambda runner: runner.options(retries=1, retry_on=OSError).run(jobs.aecho, [1]),
    "a future": lambda runner: runner.submit(jobs.aecho, 1),
    "a future of a pickle": lambda runner: runner.submit(jobs.aecho, [1]),
    "a future of an error": lambda runner: runner.submit(jobs.fail, ValueError("no")),
    "a map": lambda runner: runner.map(jobs.echo, range(3)).collect(),
    "a map as a stream": lambda runner: all_of(runner.map(jobs.aecho, range(3))),
    "a stream": lambda runner: all_of(runner.stream(streams.anumbers, 3)),
    "a broadcast": lambda runner: runner.broadcast(jobs.aecho, 1),
    "a shared object": shared,
    "a start": started,
}


async def cancelled_at(awaited: Callable[[Runner], Awaitable[object]], runner: Runner, at: int) -> str:
    async def wait() -> object:
        return await awaited(runner)

    task = asyncio.create_task(wait())
    question = Question(at, task.cancel)
    with question.on():
        await ends(task)
    return question.place


@pytest.mark.parametrize("what", AWAITED)
@pytest.mark.parametrize("is_full", [False, True], ids=["", "full"])
async def test_p6_a_task_that_is_cancelled_after_percore_has_asked_whether_it_waits(
    what: str, is_full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cancelled and nothing else: no error is logged, no worker is lost, and no place is kept."""
    async with FakeRunner(1, max_pending=1) as runner:
        admission: Any = supervisor_of(runner).admission
        worker = await runner.run(jobs.awhere)
        await ends(asyncio.ensure_future(AWAITED[what](runner)))  # with all imports
        for at in count():
            if is_full:
                admission.enter_now()
                asyncio.get_running_loop().call_soon(admission.leave)
            place = await cancelled_at(AWAITED[what], runner, at)
            async with asyncio.timeout(5):
                await until(lambda: not admission._inside)
            assert not caplog.records, place
            if not place:
                break
        assert at > 0
        assert await runner.run(jobs.awhere) == worker
