"""submit and run: what is called, with what, where, and how many at once."""

import asyncio
import functools
import gc
import operator
from collections.abc import Callable
from typing import Any

import pytest

from percore._protocol.messages import ID_MASK
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.internals import members_of, supervisor_of

pytestmark = pytest.mark.differs("fallbacks", because="without uvloop the worker's loop is asyncio's", on="fake")
in_fresh_interpreters = pytest.mark.differs("spawn", because="a fresh interpreter has imported nothing")
in_processes = pytest.mark.differs("fallbacks", because="that loop is another process's, and so is the other end of a bell")


@pytest.mark.parametrize("fn", [jobs.add, jobs.aadd])
@in_fresh_interpreters
async def test_run_gives_the_result(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        assert await runner.run(fn, 1) == 1
        assert await runner.run(fn, 1, 2) == 3
        assert await runner.run(fn, 1, right=2, scale=10) == 30
        assert await runner.run(fn, [1], [2]) == [1, 2]


async def test_submit_gives_a_future_of_this_loop(make: MakeRunner) -> None:
    async with make() as runner:
        future = runner.submit(jobs.aecho, "x")
        assert asyncio.isfuture(future)
        assert future.get_loop() is asyncio.get_running_loop()
        assert not future.done()
        assert await future == "x"


@pytest.mark.parametrize("fn", [jobs.append, jobs.aappend])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_arguments_are_those_of_the_moment_of_submit(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        items = [1]
        first = runner.submit(fn, items, 2)
        second = runner.submit(fn, items, 3)
        items.append(9)
        assert (await first, await second, items) == ([1, 2], [1, 3], [1, 9])


@in_processes
async def test_each_future_gets_its_own_result(make: MakeRunner) -> None:
    async with make(2) as runner:
        futures = [runner.submit(jobs.aecho if i % 2 else jobs.echo, (i, str(i))) for i in range(300)]
        assert await asyncio.gather(*futures) == [(i, str(i)) for i in range(300)]


async def test_scalars_arrive_with_value_and_type(make: MakeRunner) -> None:
    values = [None, True, 0, -1, 2**70, 2**300, 1.5, float("inf"), "", "ü€😀", b"", b"\x00\xff", "x" * 5000, 1j, ...]
    async with make() as runner:
        for value in values:
            result = await runner.run(jobs.aecho, value)
            assert result == value
            assert type(result) is type(value)


class Text(str):
    """Not to be taken for a str."""


class Number(int):
    """Not to be taken for an int."""


async def test_a_subclass_of_a_scalar_stays_one(make: MakeRunner) -> None:
    async with make() as runner:
        for value in (Text("a"), Number(5), bytearray(b"ab")):
            result = await runner.run(jobs.aecho, value)
            assert result == value
            assert type(result) is type(value)


async def test_a_forgotten_call_runs(make: MakeRunner, log: Log) -> None:
    async with make() as runner:
        _ = runner.submit(jobs.say, log.path, "plain")
        del _
        gc.collect()
        assert await log.next() == "plain"


async def test_a_failure_that_nobody_reads_is_reported_as_asyncio_does(make: MakeRunner) -> None:
    reports: list[dict[str, Any]] = []
    async with make() as runner:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
        future: asyncio.Future[Any] = runner.submit(jobs.fail, ValueError("unread"))
        await asyncio.wait([future])
        del future
        gc.collect()
    assert [type(report["exception"]) for report in reports] == [ValueError]


async def test_a_plain_function_may_return_an_awaitable(make: MakeRunner) -> None:
    async with make() as runner:
        assert await runner.run(jobs.later, 5) == 5
        assert await runner.run(lambda: jobs.aecho(6)) == 6
        assert await runner.map(jobs.later, range(5)) == list(range(5))


async def test_an_awaitable_of_a_plain_function_is_awaited_in_the_loop(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        future = runner.submit(functools.partial(lambda *args: jobs.await_(*args), log.path, gate.path, 7))
        assert await log.next() == "7"
        assert await runner.run(jobs.echo, "the thread is free") == "the thread is free"
        gate.open()
        assert await future == 7


# What can be called


def _closure(base: int) -> Callable[[int], int]:
    def add(value: int) -> int:
        return base + value

    return add


def _async_closure(base: int) -> Callable[[int], Any]:
    async def add(value: int) -> int:
        return base + int(await jobs.aecho(value))

    return add


CALLABLES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "partial": (functools.partial(jobs.add, 1), (2,), 3),
    "partial of a coroutine function": (functools.partial(jobs.aadd, 1, scale=2), (2,), 6),
    "partial of a partial": (functools.partial(functools.partial(jobs.aadd, 1), 2), (), 3),
    "bound method": (jobs.Adder(1).add, (2,), 3),
    "bound coroutine method": (jobs.Adder(1).aadd, (2,), 3),
    "class method": (jobs.Adder.make, (2,), 2),
    "static method": (jobs.Adder.double, (2,), 4),
    "callable object": (jobs.Adder(1), (2,), 3),
    "async callable object": (jobs.AsyncAdder(1), (2,), 3),
    "class": (jobs.Adder, (2,), jobs.Adder(2)),
    "builtin": (len, ([1, 2],), 2),
    "builtin method": ([3, 4].index, (4,), 1),
    "C callable object": (operator.itemgetter(1), ([5, 6],), 6),
    "lambda": (lambda value: value + 1, (2,), 3),
    "closure": (_closure(1), (2,), 3),
    "coroutine closure": (_async_closure(1), (2,), 3),
}


@in_processes
@in_fresh_interpreters
async def test_callables(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for name, (fn, args, expected) in CALLABLES.items():
            with subtests.test(name=name):
                assert await runner.run(fn, *args) == expected
                assert await runner.run(fn, *args) == expected
                if args:
                    assert await runner.map(fn, [args[0]] * 3) == [expected] * 3


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_function_changed_between_two_calls_travels_as_it_is_then(make: MakeRunner) -> None:
    adder = jobs.Adder(1)
    async with make() as runner:
        first = runner.submit(adder.add, 1)
        adder.base = 10
        assert (await first, await runner.run(adder.add, 1)) == (2, 11)


# How many at once


async def test_concurrency_holds(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=3, lifespan=jobs.counter) as runner:
        futures = [runner.submit(jobs.acount, log.path, gate.path) for _ in range(10)]
        await log.take(3)
        gate.open()
        assert max(await asyncio.gather(*futures)) == 3


@in_processes
async def test_threads_hold(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=3, lifespan=jobs.counter) as runner:
        futures = [runner.submit(jobs.count, log.path, gate.path) for _ in range(10)]
        await log.take(3)
        gate.open()
        assert max(await asyncio.gather(*futures)) == 3


async def test_both_limits_are_a_worker_s(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=2, threads=1, lifespan=jobs.counter) as runner:
        coroutines = [runner.submit(jobs.acount, log.path, gate.path) for _ in range(6)]
        await log.take(4)
        plain = [runner.submit(jobs.count, log.path, gate.path) for _ in range(4)]
        await log.take(2)
        gate.open()
        assert max(await asyncio.gather(*coroutines, *plain)) == 3


async def test_coroutines_do_not_wait_behind_plain_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        blocked = [runner.submit(jobs.wait, log.path, gate.path) for _ in range(20)]
        await log.next()
        assert await runner.run(jobs.aecho, 1) == 1
        gate.open()
        await asyncio.gather(*blocked)


async def test_plain_calls_do_not_wait_behind_coroutines(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1) as runner:
        blocked = [runner.submit(jobs.await_, log.path, gate.path) for _ in range(20)]
        await log.next()
        assert await runner.run(jobs.echo, 1) == 1
        gate.open()
        await asyncio.gather(*blocked)


async def test_calls_begin_in_the_order_of_submit(make: MakeRunner, log: Log) -> None:
    async with make(concurrency=1, threads=1) as runner:
        futures = [runner.submit(jobs.say, log.path, i) for i in range(30)]
        await asyncio.gather(*futures)
        assert log.rest() == [str(i) for i in range(30)]


# Ids


async def test_an_id_of_a_call_is_never_taken_for_one_of_an_item(make: MakeRunner) -> None:
    """Ids begin anew below the bits that number the items of a batch: with short calls 2**48 is a matter of weeks."""
    async with make(threads=2, concurrency=4) as runner:
        (member,) = members_of(runner)
        last = (ID_MASK + 1) // member.stride - 1
        member.free[:] = [(last - 1) * member.stride + call_id % member.stride for call_id in member.free]
        seen: set[int] = set()
        for _ in range(4):
            calls = [runner.submit(fn, i) for i in range(6) for fn in (jobs.echo, jobs.aecho)]
            seen |= set(member.calls)
            assert await asyncio.gather(*calls) == [i for i in range(6) for _ in range(2)]
            assert await runner.map(jobs.echo, range(300)) == list(range(300))
            with pytest.raises(ValueError, match="of the user"):
                await runner.run(jobs.afail, ValueError("of the user"))
        assert member.stride <= min(seen) < member.stride * 2
        assert ID_MASK - 2 * member.stride < max(seen) <= ID_MASK
        assert runner.statistics().restarts == 0


# Functions that are known by number


async def test_a_class_method_is_one_function_however_often_it_is_looked_up(make: MakeRunner) -> None:
    async with make(1) as runner:
        for value in range(20):
            assert await runner.run(jobs.Adder.make, value) == value
            assert await runner.map(jobs.Adder.make, [value]) == [value]
        assert await runner.run(jobs.OtherAdder.make, 3) == 4  # the same function of another class
        functions = supervisor_of(runner).functions
        assert len(functions.known) == 2
        assert [len(member.defined) for member in members_of(runner)] == [2]


async def test_many_functions_are_known_for_a_time(make: MakeRunner, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose calls wait or run meanwhile go on."""
    monkeypatch.setattr("percore._calls.functions._REMEMBERED", 4)
    functions: list[Callable[..., Any]] = [jobs.echo, jobs.aecho, jobs.Adder.double, jobs.Adder.make, int, float, abs, str]
    async with make(1, concurrency=1, threads=1) as runner:
        supervisor = supervisor_of(runner)
        running = runner.submit(jobs.await_, log.path, gate.path, "running")
        waiting = [runner.submit(jobs.aecho, value) for value in range(3)]
        mapped = asyncio.ensure_future(runner.map(jobs.aecho, range(100)).collect())
        held = asyncio.ensure_future(runner.map(lambda value: value + 1, range(100)).collect())
        await log.next()
        for _ in range(3):
            for function in functions:
                if function is not jobs.aecho:
                    await runner.run(function, 3)
                assert len(supervisor.known) <= 4
                assert all(len(member.defined) <= 4 + 4 for member in supervisor.members)
        gate.open()
        assert await running == "running"
        assert await asyncio.gather(*waiting) == [0, 1, 2]
        assert await mapped == list(range(100))
        assert await held == list(range(1, 101))
