"""thread_initializer: called in each thread for plain functions before its first call there."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log


async def test_once_per_thread_before_its_first_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=2, thread_initializer=functools.partial(jobs.say_thread, log.path)) as runner:
        assert await runner.run(jobs.aecho, 1) == 1
        assert log.rest() == []  # no thread is needed yet
        calls = [runner.submit(jobs.wait_in_thread, log.path, gate.path) for _ in range(2)]
        said = await log.take(4)
        gate.open()
        names = await asyncio.gather(*calls)
        assert len({*names}) == 2
        for name in names:  # each says so before its call does
            assert [line for line in said if line.endswith(name)] == [f"initialized {name}", f"runs {name}"]
        for _ in range(10):
            assert await runner.run(jobs.echo, 1) == 1
        assert await runner.map(jobs.echo, range(500)) == list(range(500))
        assert log.rest() == []


async def test_what_it_does_is_seen_by_calls_of_its_thread(make: MakeRunner) -> None:
    async with make(2, threads=3, thread_initializer=jobs.open_connection) as runner:
        assert set(await runner.map(jobs.connection, range(200))) == {"open"}
        assert await runner.run(jobs.connection, 1) == "open"
        assert await runner.broadcast(jobs.connection, 1) == ["open", "open"]


async def test_in_every_worker_also_after_a_respawn(make: MakeRunner) -> None:
    async with make(thread_initializer=jobs.open_connection) as runner:
        assert await runner.run(jobs.connection, 1) == "open"
        worker_of(runner).kill()
        assert await runner.run(jobs.connection, 1) == "open"


@pytest.mark.parametrize("as_map", [False, True])
async def test_peers_6_a_failure_is_the_first_call_s_outcome_and_the_next_tries_again(
    make: MakeRunner, tmp_path: Path, as_map: bool
) -> None:
    initializer = functools.partial(jobs.fail_first, str(tmp_path), 2, LookupError, 0)
    async with make(threads=1, thread_initializer=initializer) as runner:
        if as_map:
            results = await runner.map(jobs.echo, range(20), return_exceptions=True)
            assert [str(result) for result in results[:2]] == ["attempt 1", "attempt 2"]
            assert [type(result) for result in results[:2]] == [LookupError] * 2
            assert results[2:] == list(range(2, 20))
        else:
            for attempt in ("attempt 1", "attempt 2"):
                with pytest.raises(LookupError, match=attempt):
                    await runner.run(jobs.echo, 1)
            assert await runner.run(jobs.echo, 1) == 1
        assert await runner.run(jobs.aecho, 1) == 1
        assert runner.statistics().failed == 2


async def test_coroutines_do_not_need_it(make: MakeRunner) -> None:
    async with make(thread_initializer=functools.partial(jobs.fail, LookupError)) as runner:
        assert await runner.run(jobs.aecho, 1) == 1
        with pytest.raises(LookupError):
            await runner.run(jobs.echo, 1)


async def test_an_initializer_that_ends_a_call_by_base_exception(make: MakeRunner) -> None:
    async with make(thread_initializer=functools.partial(jobs.fail, SystemExit)) as runner:
        for _ in range(2):
            with pytest.raises(percore.RemoteError, match="SystemExit"):
                await runner.run(jobs.echo, 1)


async def test_lambdas_and_closures(make: MakeRunner, log: Log) -> None:
    path = log.path
    async with make(threads=1, thread_initializer=lambda: jobs.say(path, "initialized")) as runner:
        assert await runner.run(jobs.echo, 1) == 1
        assert await runner.run(jobs.echo, 2) == 2
        assert log.rest() == ["initialized"]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_one_that_cannot_be_pickled(make: MakeRunner) -> None:
    refusing = jobs.RefusesPickle()
    runner = make(thread_initializer=lambda: refusing)
    with pytest.raises(ValueError, match="do not pickle me"):
        await runner.start()


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_one_that_cannot_be_read_fails_calls(make: MakeRunner) -> None:
    refusing = jobs.RefusesUnpickle()
    async with make(thread_initializer=lambda: refusing) as runner:
        with pytest.raises(ValueError, match="do not read me"):
            await runner.run(jobs.echo, 1)
        assert await runner.run(jobs.aecho, 1) == 1


@pytest.mark.parametrize("value", [5, "open"])
def test_what_cannot_be_called_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="thread_initializer must be callable"):
        percore.Runner(thread_initializer=value)
