"""What cannot be pickled, or cannot be read: it ends its own call, over and over, and leaves nothing behind.

Each case as a single call of either kind, directly and from a done-callback, and as items of maps: bare, in rows and pickled, in
batches and alone. Every other one has a slot in hand when it fails.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import psutil
import pytest

import percore
from percore import Runner
from tests import jobs
from tests.contract import serial_calls as calls
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.counts import times
from tests.internals import slots_used, supervisor_of
from tests.waiting import until

COUNT = times(100, 10_000)
"""Of each row, single calls and items each; its cases share it."""

AT_ONCE = 500
SLACK = (24 << 20) + (0 if sys.version_info < (3, 14) else 7 * (8 << 20))
"""Bytes. Since 3.14 a recursion ends where the stack does: its pages stay, of the loop's thread and of each of the others."""
"""Bytes by which a process may have grown, by its allocator's ways: what it holds is counted in blocks."""

# Real processes under one loop: what is repeated here is the same under any.
pytestmark = [pytest.mark.asyncio_only, pytest.mark.warm_fork_server]

Submit = Callable[[int], "asyncio.Future[Any]"]
Check = Callable[[BaseException | None], None]


# What is done over and over


def _from_callback(runner: Runner, submit: Submit, place: int) -> "asyncio.Future[Any]":
    """As `submit`, called in a done-callback of another call."""
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def forward(future: "asyncio.Future[Any]") -> None:
        error = future.exception()
        if error is None:
            made.set_result(future.result())
        else:
            made.set_exception(error)

    runner.submit(jobs.aecho).add_done_callback(lambda _: submit(place).add_done_callback(forward))
    return made


async def _repeat(runner: Runner, cases: Sequence[tuple[Submit, Check]]) -> None:
    """Make calls over and over, of all cases by turns, every tenth from a done-callback: each ends as it should."""

    async def some(places: range) -> None:
        futures = []
        for place in places:
            turn, case = divmod(place, len(cases))
            submit, check = cases[case]
            futures.append((submit(turn) if turn % 10 != 3 else _from_callback(runner, submit, turn), check))
        await asyncio.wait([future for future, _ in futures])
        for future, check in futures:
            check(future.exception())

    await _over_and_over(runner, some, COUNT)


async def _over_and_over(runner: Runner, some: Callable[[range], Awaitable[None]], count: int) -> None:
    half = (count + 1) // 2
    for start in range(0, half, AT_ONCE):
        await some(range(start, min(half, start + AT_ONCE)))
    await _nothing_is_left(runner)
    blocks_before, bytes_before = await _sizes(runner)
    for start in range(half, count, AT_ONCE):
        await some(range(start, min(count, start + AT_ONCE)))
    await _nothing_is_left(runner)
    for _ in range(100):  # without a GIL a thread frees what others have dropped of its objects when it runs again
        blocks, resident = await _sizes(runner)
        if all(now <= before + 4000 for now, before in zip(blocks, blocks_before, strict=True)):
            break
    for now, before in zip(blocks, blocks_before, strict=True):
        assert now <= before + 4000, f"a process holds {now - before} more blocks of memory"
    for now, before in zip(resident, bytes_before, strict=True):
        assert now <= before * 1.05 + SLACK, f"a process has grown from {before} to {now} bytes"


async def _sizes(runner: Runner) -> tuple[list[int], list[int]]:
    """Of this process and of each worker: blocks of memory that Python holds, and resident bytes."""
    gc.collect()
    await runner.broadcast(gc.collect)
    blocks = [sys.getallocatedblocks(), *await runner.broadcast(sys.getallocatedblocks)]
    pids = [os.getpid(), *(worker.pid for worker in runner.statistics().workers)]
    return blocks, [psutil.Process(pid).memory_info().rss for pid in pids]


async def _nothing_is_left(runner: Runner) -> None:
    """No slot, no call, on neither side; every worker lives, and good calls of every kind work."""
    nothing = [{"slots": 0, "calls": 0}] * len(runner.statistics().workers)
    for _ in range(100):  # a thread sends its last results, and then lets go of its batch
        if (left := await runner.broadcast(calls.left_behind)) == nothing:
            break
    assert left == nothing
    assert await runner.run(jobs.length, calls.LARGE) == await runner.run(jobs.alength, calls.LARGE) == len(calls.LARGE)
    assert await runner.map(jobs.echo, range(100)) == list(range(100))
    assert [value async for value in runner.map(jobs.aecho, [[1], [2]])] == [[1], [2]]
    supervisor = supervisor_of(runner)
    assert (supervisor.store.in_use, supervisor.dispatch.waiting(), supervisor.closing.unfinished()) == (0, 0, False)
    for member in supervisor.members:
        assert (member.calls, member.parked, member.load, member.items) == ({}, set(), [0, 0, 0], 0)
        assert len(member.free) == member.places
    statistics = runner.statistics()
    assert (statistics.running, statistics.queued, statistics.restarts) == (0, 0, 0)


def _is(kind: type[BaseException] | str, text: str = "") -> Check:
    def check(error: BaseException | None) -> None:
        assert error is not None
        name = type.__dict__["__qualname__"].__get__(type(error))
        assert name == (kind if isinstance(kind, str) else kind.__qualname__), name
        assert text in _words(error)

    return check


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except RuntimeError:
        return "(no words)"


def _behind_large(make: Callable[[], Any], place: int) -> Any:
    """What is made, every other time behind large data."""
    thing = make()
    return [calls.LARGE, thing] if place % 2 else [thing]


def _either(plain: Callable[..., Any], coroutine: Callable[..., Any], place: int) -> Callable[..., Any]:
    return plain if place % 4 < 2 else coroutine


# S1: arguments that do not pickle

_S1: dict[str, tuple[type[Exception], str]] = {
    "lock": (TypeError, "lock"),
    "raises": (ValueError, "not to be pickled"),
    "exits": (RuntimeError, "pickling raised SystemExit('not to be pickled')"),
    "stops": (RuntimeError, "pickling raised StopIteration('not to be pickled')"),
    "recurses": (RecursionError, "not to be pickled"),
    "lacks memory": (MemoryError, "not to be pickled"),
    "cannot be told": (calls.BadWords, "(no words)"),
    "cannot be told at all": (RuntimeError, "whose repr() failed"),
    "deep": (RecursionError, "recursion" if sys.version_info < (3, 14) else "Stack overflow"),
}


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s1_arguments_that_do_not_pickle_fail_before_a_byte_is_sent() -> None:
    async with Runner(1) as runner:

        def submit(name: str, place: int) -> "asyncio.Future[Any]":
            return runner.submit(_either(calls.take, calls.atake, place), _behind_large(calls.UNPICKLABLE[name], place))

        cases = [(partial(submit, name), _is(*_S1[name])) for name in _S1]
        before = runner.statistics().workers[0].bytes_in
        for one, check in cases:
            future = one(1)
            assert future.done()
            check(future.exception())
        assert runner.statistics().workers[0].bytes_in == before
        await _repeat(runner, cases)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s1_items_that_do_not_pickle_fail_alone() -> None:
    made = [(make, *_S1[name]) for name, make in calls.UNPICKLABLE.items()]

    def things(places: range) -> list[Any]:
        return [[place] if place % 3 else _behind_large(made[place // 3 % len(made)][0], place) for place in places]

    def check(places: range, results: Sequence[Any]) -> None:
        for place, result in zip(places, results, strict=True):
            if place % 3:
                assert result in (0, place)
            else:
                _is(*made[place // 3 % len(made)][1:])(result)

    await _repeat_maps(things, check)


async def _repeat_maps(things: Callable[[range], list[Any]], check: Callable[[range, Sequence[Any]], None]) -> None:
    """Maps over these arguments, in every way that items travel."""
    async with Runner(1) as runner:

        async def some(places: range) -> None:
            for fn in (calls.take, calls.atake):
                check(places, await runner.map(fn, things(places), places, return_exceptions=True))
            check(places, await runner.map(calls.take, things(places), return_exceptions=True))
            stream = runner.map(calls.take, things(places), return_exceptions=True, window=len(places))
            check(places, [result async for result in stream])

        await _over_and_over(runner, some, COUNT // 2)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s1_a_row_that_does_not_pickle_ends_a_map_and_what_is_behind_it_does_not_run(make: MakeRunner, log: Log) -> None:
    items: list[Any] = [jobs.Place(place) for place in range(300)]
    items[150] = calls.Raises(ValueError)
    async with make() as runner:
        for fn in (jobs.tell, jobs.atell):
            stream = aiter(runner.map(partial(fn, log.path), items, window=300))
            assert await anext(stream) == 0
            said = sorted(map(int, await log.take(150)))
            # Nobody reads the stream, so nothing else ends what is behind the failure.
            await runner.run(jobs.echo)
            await runner.run(jobs.aecho)
            await until(lambda: not ((statistics := runner.statistics()).running or statistics.queued))
            assert (said, log.rest()) == ([*range(150)], [])
            assert [await anext(stream) for _ in range(149)] == [*range(1, 150)]
            with pytest.raises(ValueError, match="not to be pickled"):
                await anext(stream)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s1_a_cancellation_raised_by_an_item_is_that_items_failure(make: MakeRunner) -> None:
    items = [1, calls.Raises(asyncio.CancelledError), 3]
    async with make() as runner:
        results = await runner.map(jobs.echo, items, return_exceptions=True)
    assert (results[0], results[2]) == (1, 3)
    assert "pickling raised CancelledError" in str(results[1])


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s1_a_class_that_refuses_to_be_pickled_fails_its_future(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    import copyreg

    def refuse(_: type) -> Any:
        raise ValueError("not this class")

    monkeypatch.setitem(copyreg.dispatch_table, _Meta, refuse)
    async with make() as runner:
        with pytest.raises(ValueError, match="not this class"):
            await runner.submit(_OfMeta)
        with pytest.raises(ValueError, match="not this class"):
            await runner.map(_OfMeta, [1, 2])  # type: ignore[arg-type]
        assert await runner.run(jobs.echo, 1) == 1


class _Meta(type):
    pass


class _OfMeta(metaclass=_Meta):
    pass


# S2: arguments that cannot be read

_S2: dict[str, tuple[str, str]] = {
    "raises": ("ValueError", "not to be read"),
    "exits": ("RemoteError", "SystemExit: not to be read"),
    "stops": ("RuntimeError", "the call raised StopIteration"),
    "cannot be told": ("BadWords", "(no words)"),
    "cannot be told at all": ("RemoteError", "BadWordsAtAll"),
    "is of no module": ("ModuleNotFoundError", "made_in_"),
}


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s2_arguments_that_cannot_be_read_fail_their_call() -> None:
    async with Runner(1) as runner:

        def submit(name: str, place: int) -> "asyncio.Future[Any]":
            return runner.submit(_either(calls.take, calls.atake, place), _behind_large(calls.UNREADABLE[name], place))

        await _repeat(runner, [(partial(submit, name), _is(*_S2[name])) for name in _S2])


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s2_items_that_cannot_be_read_fail_alone() -> None:
    made = [(make, *_S2[name]) for name, make in calls.UNREADABLE.items()]

    def things(places: range) -> list[Any]:
        return [[place] if place % 3 else _behind_large(made[place // 3 % len(made)][0], place) for place in places]

    def check(places: range, results: Sequence[Any]) -> None:
        for place, result in zip(places, results, strict=True):
            if place % 3:
                assert result in (0, place)
            else:
                _is(*made[place // 3 % len(made)][1:])(result)

    await _repeat_maps(things, check)


@pytest.mark.parametrize("how", calls.DEADLY)
@pytest.mark.parametrize("fn", [calls.take, calls.atake])
async def test_s2_arguments_that_kill_when_read_are_a_begun_call_of_a_dead_worker(fn: Callable[..., Any], how: str) -> None:
    async with Runner(2) as runner:
        for payload in ([], [calls.LARGE]):
            good = [runner.submit(jobs.aecho, place) for place in range(50)]
            assert await asyncio.gather(*good) == list(range(50))
            with pytest.raises(percore.WorkerDied) as caught:
                await runner.run(fn, [*payload, calls.Reads(calls.DEADLY[how])])
            assert caught.value.started
            assert caught.value.exitcode == {"exits": 3, "crashes": -11}[how]
        assert await runner.map(jobs.echo, range(100)) == list(range(100))
        assert slots_used(runner) == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s2_arguments_of_a_plain_function_that_take_their_time_hold_up_nobody(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, threads=2) as runner:
        future = runner.submit(calls.take, calls.Reads(jobs.wait, log.path, gate.path))
        await log.next()
        assert await runner.map(jobs.aecho, range(20)) == list(range(20))
        assert await runner.map(jobs.echo, range(20)) == list(range(20))
        gate.open()
        assert await future == 0


# S3: results that do not pickle

_S3 = {name: kind.__qualname__ if kind is not RuntimeError else "" for name, (kind, _) in _S1.items()}
_S3 |= {"exits": "SystemExit", "stops": "StopIteration", "cannot be told at all": "BadWordsAtAll"}


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s3_results_that_do_not_pickle_are_remote_errors() -> None:
    async with Runner(1) as runner:

        def submit(name: str, place: int) -> "asyncio.Future[Any]":
            return runner.submit(_either(calls.give, calls.agive, place), "unpicklable", name, place)

        for name, kind in _S3.items():
            with pytest.raises(percore.RemoteError) as caught:
                await submit(name, 1)
            assert caught.value.type_name.rpartition(".")[2] == kind
            assert "Traceback" in caught.value.remote_traceback
        await _repeat(runner, [(partial(submit, name), _is(percore.RemoteError, "cannot be pickled")) for name in _S3])


@pytest.mark.parametrize("how", calls.DEADLY)
@pytest.mark.parametrize("fn", [calls.give_kills, calls.agive_kills])
async def test_s3_results_that_kill_when_pickled_leave_no_half_of_one(fn: Callable[..., Any], how: str) -> None:
    async with Runner(2) as runner:
        for place in range(2):
            good = [runner.submit(jobs.pattern, 200_000) for _ in range(10)]
            await asyncio.wait(good)
            with pytest.raises(percore.WorkerDied) as caught:
                await runner.run(fn, how, place)
            assert caught.value.started
            assert {future.result() for future in good} == {jobs.pattern(200_000)}
        assert await runner.map(jobs.pattern, [200_000] * 10) == [jobs.pattern(200_000)] * 10


# S4: results that cannot be read

_S4 = _S2 | dict.fromkeys(_S2, ("RemoteError", "the result could not be unpickled here"))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s4_results_that_cannot_be_read_are_remote_errors() -> None:
    async with Runner(1) as runner:

        def submit(name: str, place: int) -> "asyncio.Future[Any]":
            return runner.submit(_either(calls.give, calls.agive, place), "unreadable", name, place)

        await _repeat(runner, [(partial(submit, name), _is(*_S4[name])) for name in _S4])


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s4_a_result_that_cannot_be_read_costs_none_of_the_999_others(make: MakeRunner) -> None:
    async with make(2) as runner:
        for name in set(_S4) - {"is of no module"}:  # with a fake worker it is of this process
            good = [runner.submit(_either(jobs.echo, jobs.aecho, place), [place]) for place in range(500)]
            bad = runner.submit(calls.give, "unreadable", name, 0)
            good += [runner.submit(_either(jobs.echo, jobs.aecho, place), [place]) for place in range(500, 999)]
            assert await asyncio.gather(*good) == [[place] for place in range(999)]
            with pytest.raises(percore.RemoteError, match="could not be unpickled here"):
                await bad
        assert runner.statistics().restarts == 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["unpicklable", "unreadable", "exception"])
async def test_s5_s4_and_s3_of_items_fail_alone(kind: str) -> None:
    names = {"unpicklable": [*_S3], "unreadable": [*_S4], "exception": [*calls.EXCEPTIONS]}[kind]
    fn = partial(calls.mixed, "|".join(names), kind)

    def check(places: range, results: Sequence[Any]) -> None:
        for place, result in zip(places, results, strict=True):
            if place % 3:
                assert result == place
            else:
                name = names[place // 3 % len(names)]
                _is(calls.EXCEPTIONS[name][1] if kind == "exception" else "RemoteError")(result)

    async with Runner(1) as runner:

        async def some(places: range) -> None:
            check(places, await runner.map(fn, places, return_exceptions=True))
            check(places, await runner.map(partial(fn), map(jobs.Place, places), return_exceptions=True))
            rows = runner.starmap(fn, [(place,) for place in places], return_exceptions=True, window=len(places))
            check(places, [result async for result in rows])

        await _over_and_over(runner, some, COUNT // 2)


# S5: exceptions


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_s5_exceptions_arrive_as_themselves_or_tell_what_they_were() -> None:
    async with Runner(1) as runner:

        def submit(name: str, place: int) -> "asyncio.Future[Any]":
            return runner.submit(_either(calls.fail_as, calls.afail_as, place), name)

        cases = []
        for name, (_, kind) in calls.EXCEPTIONS.items():
            check = _is(kind, "" if name in ("without words", "stops") else "the message")
            first = submit(name, 0)
            await asyncio.wait([first])
            check(first.exception())
            assert "in fail_as" in _remote_traceback(first.exception()), name
            cases.append((partial(submit, name), check))
        await _repeat(runner, cases)


def _remote_traceback(error: BaseException | None) -> str:
    assert error is not None
    if isinstance(error, percore.RemoteError):
        return error.remote_traceback
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


@pytest.mark.long
async def test_s5_a_huge_exception_arrives(make_real: MakeRunner) -> None:
    size = times(5_000_000, 100_000_000)
    async with make_real() as runner:
        with pytest.raises(ValueError) as caught:  # its text is what is huge
            await runner.run(jobs.fail_large, size)
        assert len(caught.value.args[0]) == size
        del caught
        await _nothing_is_left(runner)
