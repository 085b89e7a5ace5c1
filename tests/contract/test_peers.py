"""Bugs that bit other pools, by their numbers in the list of them. Those that other tests are about are there."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import percore
from percore import Runner
from percore._scheduler.windows import Cost
from percore._transport.slots import SlotWriter
from tests import jobs
from tests.contract import serial_calls as calls
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import nodes_of, supervisor_of

# Under one loop: what bit others is the same under any.
pytestmark = pytest.mark.asyncio_only

BOTH = pytest.mark.parametrize("fn", [jobs.fail, jobs.afail])


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_peers_3_after_every_bad_payload_a_hundred_good_calls_get_their_own_results(make: MakeRunner) -> None:
    async with make(2) as runner:
        bad = [
            runner.submit(jobs.echo, calls.Raises(ValueError)),  # an argument that does not pickle
            runner.submit(jobs.echo, calls.Reads(calls.throw, ValueError)),  # one that cannot be read
            runner.submit(calls.give, "unpicklable", "lock", 1),  # a result that does not pickle
            runner.submit(calls.give, "unreadable", "raises", 1),  # one that cannot be read
            runner.submit(calls.fail_as, "two arguments"),  # exceptions of either kind
            runner.submit(calls.fail_as, "unreadable"),
        ]
        await asyncio.wait(bad)
        assert all(future.exception() is not None for future in bad)
        futures = [runner.submit(jobs.echo if place % 2 else jobs.aecho, [place]) for place in range(100)]
        assert await asyncio.gather(*futures) == [[place] for place in range(100)]
        assert runner.statistics().restarts == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_peers_4_an_exception_that_cannot_be_read_does_not_hold_up_the_good_calls_beside_it(
    make: MakeRunner, log: Log, gate: Gate
) -> None:
    async with make(2) as runner:
        waiting = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(20)]
        await log.take(20)
        for name in ("two arguments", "unreadable", "reduces to a number"):
            with pytest.raises((calls.TwoArguments, percore.RemoteError), match="the message"):
                await runner.run(calls.fail_as, name)
        gate.open()
        assert await asyncio.gather(*waiting) == list(range(20))
        assert await runner.run(jobs.echo, 1) == 1


@pytest.mark.parametrize("fn", [calls.give, calls.agive])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_peers_5_a_result_that_does_not_pickle_is_an_error_and_a_lambda_is_a_result(
    make: MakeRunner, fn: Callable[..., Any]
) -> None:
    async with make() as runner:
        with pytest.raises(percore.RemoteError, match="lock"):
            await runner.run(fn, "unpicklable", "lock", 0)
        with pytest.raises(percore.RemoteError, match="return a list"):
            await runner.run(jobs.give, "generator")
        assert (await runner.run(calls.give_lambda, 5))(1) == 6


# 10: one exception object for many futures


async def _errors(*futures: "asyncio.Future[Any]") -> list[BaseException]:
    await asyncio.wait(futures)
    errors = [future.exception() for future in futures]
    assert None not in errors
    return [error for error in errors if error is not None]


def _check_own(errors: list[BaseException], kind: type[BaseException]) -> None:
    assert {type(error) for error in errors} == {kind}
    assert len({id(error) for error in errors}) == len(errors) > 1
    try:
        raise errors[0]
    except kind:
        assert errors[0].__traceback__ is not None
    assert all(error.__traceback__ is None for error in errors[1:])


async def test_peers_10_calls_that_a_death_has_ended_have_errors_of_their_own(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(5)]
        await log.take(5)
        worker_of(runner).kill()
        _check_own(await _errors(*futures), percore.WorkerDied)


async def test_peers_10_calls_that_closing_has_ended_have_errors_of_their_own(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=2)
    await runner.start()
    futures = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(5)]
    await log.take(2)
    await runner.aclose(grace=0)
    _check_own(await _errors(*futures), percore.RunnerClosed)


async def test_peers_10_items_of_a_batch_that_died_have_errors_of_their_own(
    make_real: MakeRunner, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cost, "batch", lambda *_: 16)
    async with make_real(threads=1) as runner:
        results: list[Any] = await runner.map(partial(jobs.die_at, log.path, 20), range(64), return_exceptions=True)
        died = [result for result in results if isinstance(result, BaseException)]
    assert {type(error) for error in died} == {percore.WorkerDied}
    assert len({id(error) for error in died}) == len(died)


async def test_peers_10_items_that_no_worker_will_run_have_errors_of_their_own(
    make: MakeRunner, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cost, "batch", lambda *_: 16)
    all_pulled = asyncio.Event()

    def places() -> Iterator[int]:
        yield from range(64)
        all_pulled.set()

    async with make(threads=1) as runner:
        busy = runner.submit(jobs.wait, log.path, gate.path)
        await log.next()
        items = asyncio.create_task(runner.map(jobs.echo, places(), window=100, return_exceptions=True).collect())
        await all_pulled.wait()
        await runner.run(jobs.aecho)  # some of the batches are queued ahead in the worker, and come back from there
        supervisor_of(runner).fail(percore.RunnerBroken(10, 3, "on purpose"))
        worker = worker_of(runner)
        worker.kill()
        errors: list[Any] = await items
        _check_own(errors, percore.RunnerBroken)
        assert isinstance((await _errors(busy))[0], percore.WorkerDied)
        gate.open()
        await threads_ended(worker)


# 11, 12, 13: what is raised, and what is returned


@BOTH
@pytest.mark.parametrize("raised", [StopIteration, StopAsyncIteration])
async def test_peers_11_stop_iteration_ends_neither_the_waiting_nor_a_map(
    make: MakeRunner, fn: Callable[..., Any], raised: type[Exception]
) -> None:
    async with make() as runner:
        with pytest.raises(RuntimeError, match="Stop"):
            await runner.run(fn, raised(5))
        results = await runner.map(fn, [raised, KeyError], return_exceptions=True)
        assert [type(result) for result in results] == [RuntimeError, KeyError]
        with pytest.raises(RuntimeError, match="Stop"):
            _ = [result async for result in runner.map(fn, [raised])]


@BOTH
async def test_peers_12_what_is_no_exception_ends_its_call_and_its_item_and_nothing_else(
    make: MakeRunner, fn: Callable[..., Any]
) -> None:
    kinds = [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException, asyncio.CancelledError]
    async with make() as runner:
        for kind in kinds:
            with pytest.raises(percore.RemoteError, match=kind.__name__):
                await runner.run(fn, kind)
        results: list[Any] = await runner.map(fn, kinds, return_exceptions=True)
        assert [result.type_name.rpartition(".")[2] for result in results] == [kind.__name__ for kind in kinds]
        assert await runner.map(jobs.echo, range(10)) == list(range(10))
        assert runner.statistics().restarts == 0


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_peers_13_an_exception_that_is_returned_is_a_result(make: MakeRunner, fn: Callable[..., Any]) -> None:
    values = [ValueError("returned"), KeyboardInterrupt(), StopIteration(1), asyncio.CancelledError(), percore.RunnerClosed("no")]
    async with make() as runner:
        for value in values:
            assert type(await runner.run(fn, value)) is type(value)
        assert list(map(type, await runner.map(fn, values))) == list(map(type, values))
        assert [type(value) async for value in runner.map(fn, values)] == list(map(type, values))
        assert runner.statistics().failed == 0


# 36: a bound method that drags its object along


@pytest.mark.parametrize("name", ["add", "aadd"])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_peers_36_a_heavy_object_travels_once_with_a_thousand_calls_of_its_method(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    heavy = calls.Heavy()
    in_slots = 0
    give = SlotWriter.give

    def count(writer: SlotWriter, slot: int, used: int) -> None:
        nonlocal in_slots
        in_slots += used * (writer._holders[slot] == 1)
        give(writer, slot, used)

    monkeypatch.setattr(SlotWriter, "give", count)
    async with make(2) as runner:
        await runner.map(getattr(heavy, name), range(1))  # whatever is imported for it has been
        before, heavy.times_pickled, in_slots = _bytes_to_workers(runner), 0, 0
        assert await runner.map(getattr(heavy, name), range(1000)) == list(range(1, 1001))
        sent = _bytes_to_workers(runner) - before + in_slots
        assert heavy.times_pickled == 1
        arenas = 1 + len(nodes_of(runner))  # each node has a copy
        assert len(calls.LARGE) <= sent < (arenas + 1) * len(calls.LARGE)


def _bytes_to_workers(runner: Runner) -> int:
    return sum(worker.bytes_in for worker in runner.statistics().workers)
