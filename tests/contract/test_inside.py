"""Inside a worker: its lifespan, percore.state, percore.current_worker, and what calls leave behind."""

import asyncio
import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner, WorkerLog
from tests.contract.pipes import Gate, Log

pytestmark = pytest.mark.differs("fallbacks", because="without uvloop the worker's loop is asyncio's", on="fake")
in_fresh_interpreters = pytest.mark.differs("spawn", because="a worker's surroundings are inherited in another way")
in_processes = pytest.mark.differs("fallbacks", because="a worker that starts or ends is seen in another way")


@in_fresh_interpreters
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_current_worker(make: MakeRunner) -> None:
    async with make() as runner:
        workers = [await runner.run(jobs.where), await runner.run(jobs.awhere)]
        assert [(worker.index, worker.generation) for worker in workers] == [(0, 1), (0, 1)]
        assert {worker.pid for worker in workers} == {runner.statistics().workers[0].pid}
        assert workers[0].pid != os.getpid()


async def test_outside_a_worker_there_is_neither_worker_nor_state(make: MakeRunner) -> None:
    async with make(lifespan=jobs.counter) as runner:
        await runner.run(jobs.aecho)
        with pytest.raises(RuntimeError, match=r"percore\.state\(\) works only in a worker"):
            percore.state()
        with pytest.raises(RuntimeError, match=r"percore\.current_worker\(\) works only in a worker"):
            percore.current_worker()


@pytest.mark.parametrize("lifespan", [jobs.resource, jobs.plain_resource])
async def test_state_is_what_the_lifespan_yields(make: MakeRunner, log: Log, lifespan: Callable[..., Any]) -> None:
    async with make(lifespan=functools.partial(lifespan, log.path, "db")) as runner:
        assert await runner.run(jobs.state) == jobs.Resource("db")
        assert await runner.run(jobs.astate, jobs.Resource) == jobs.Resource("db")
        assert log.rest() == ["enter"]
    assert log.rest() == ["exit"]


async def test_state_is_checked(make: MakeRunner, log: Log) -> None:
    async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
        with pytest.raises(TypeError, match="the lifespan yields Resource, not Counter"):
            await runner.run(jobs.state, jobs.Counter)


@pytest.mark.parametrize("fn", [jobs.state, jobs.astate])
async def test_without_a_lifespan_there_is_no_state(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        with pytest.raises(RuntimeError, match="has no lifespan"):
            await runner.run(fn)


@in_fresh_interpreters
async def test_each_worker_has_a_lifespan_of_its_own(make: MakeRunner, log: Log) -> None:
    async with make(2, lifespan=functools.partial(jobs.resource, log.path)):
        assert log.rest() == ["enter", "enter"]
    assert log.rest() == ["exit", "exit"]


@in_processes
@in_fresh_interpreters
async def test_the_lifespan_is_left_after_the_last_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
        future = runner.submit(jobs.await_, log.path, gate.path, "call")
        assert await log.take(2) == ["enter", "call"]
        closing = asyncio.create_task(runner.aclose())
        await asyncio.sleep(0)
        gate.open()
        await closing
        assert log.rest() == ["exit"]
        assert await future == "call"


async def test_the_lifespan_is_left_when_the_body_fails(make: MakeRunner, log: Log, gate: Gate) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
            _ = runner.submit(jobs.await_, log.path, gate.path, "call")
            await log.take(2)
            raise KeyError
    assert log.rest() == ["cancelled call", "exit"]


async def test_the_lifespan_is_left_when_the_runner_is_cancelled(make: MakeRunner, log: Log, gate: Gate) -> None:
    async def body() -> None:
        async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
            await runner.run(jobs.await_, log.path, gate.path, "call")

    task = asyncio.create_task(body())
    await log.take(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log.rest() == ["cancelled call", "exit"]


@in_fresh_interpreters
async def test_b1_a_lifespan_that_cannot_be_entered_fails_the_start(make: MakeRunner) -> None:
    runner = make(2, lifespan=jobs.no_resource)
    with pytest.raises(percore.StartupFailed, match="there is no database") as caught:
        await runner.start()
    text = "".join(traceback.format_exception(caught.value))
    assert "LookupError: there is no database" in text
    assert "jobs.py" in text
    assert "in no_resource" in text
    with pytest.raises(percore.RunnerClosed):
        _ = runner.submit(jobs.echo)


async def test_a_lifespan_that_fails_to_exit_is_logged_and_fails_nothing(make: MakeRunner, worker_log: WorkerLog) -> None:
    async with make(lifespan=jobs.no_exit) as runner:
        assert await runner.run(jobs.aecho, 1) == 1
    text = worker_log.text()
    assert "the database does not let go" in text
    assert "Traceback" in text


async def test_a_lifespan_has_to_give_a_context_manager(make: MakeRunner) -> None:
    with pytest.raises(percore.StartupFailed, match=r"context manager, not int.*asynccontextmanager"):
        await make(lifespan=jobs.no_manager).start()


async def test_a_lifespan_that_is_a_coroutine_function_gets_the_same_sentence(make: MakeRunner) -> None:
    with pytest.raises(percore.StartupFailed, match="context manager, not coroutine"):
        await make(lifespan=jobs.aecho).start()


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_lifespan_that_cannot_travel_fails_the_start_and_leaves_nothing(make: MakeRunner) -> None:
    refusing = jobs.RefusesPickle()
    runner = make(lifespan=lambda: refusing)
    with pytest.raises(ValueError, match="do not pickle me"):
        await runner.start()
    await runner.aclose()


@in_processes
@in_fresh_interpreters
async def test_b1_a_worker_that_dies_at_its_start_fails_it(make_real: MakeRunner) -> None:
    with pytest.raises(percore.StartupFailed, match="worker 0 died with exit code 3 before it was ready"):
        await make_real(lifespan=jobs.deadly).start()


@in_fresh_interpreters
async def test_a_worker_that_is_late_fails_the_start(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(lifespan=functools.partial(jobs.resource_behind, log.path, gate.path), start_timeout=0.3)
    with pytest.raises(percore.StartupFailed, match="not ready"):
        await runner.start()


@in_processes
@in_fresh_interpreters
async def test_a_cancelled_start_leaves_nothing(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, lifespan=functools.partial(jobs.resource_behind, log.path, gate.path))
    task = asyncio.create_task(runner.start())
    await log.take(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(percore.RunnerClosed):
        _ = runner.submit(jobs.echo)


async def test_a_task_left_behind_runs_on_and_is_cancelled_before_the_lifespan_is_left(
    make: MakeRunner, log: Log, gate: Gate
) -> None:
    async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
        await runner.run(jobs.leave_task, log.path, gate.path)
        assert await log.take(2) == ["enter", "left"]
        await runner.run(jobs.aecho)
        assert log.rest() == []
    assert log.rest() == ["cancelled left", "exit"]


@in_processes
async def test_the_error_of_a_task_left_behind_is_logged(make: MakeRunner, log: Log, gate: Gate, worker_log: WorkerLog) -> None:
    async with make() as runner:
        await runner.run(jobs.leave_failing_task, log.path, gate.path)
        assert await log.next() == "began"
    assert "ValueError: raised instead" in worker_log.text()


@in_processes
@in_fresh_interpreters
async def test_a_loop_factory_makes_the_worker_s_loop(make_real: MakeRunner) -> None:
    async with make_real(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert await runner.run(_loop_name) == "_UnixSelectorEventLoop"


async def _loop_name() -> str:
    return type(asyncio.get_running_loop()).__name__


async def test_peers_35_what_a_lifespan_makes_belongs_to_the_loop_of_the_calls(make: MakeRunner) -> None:
    async with make(2, lifespan=jobs.loop_of_its_own) as runner:
        assert await runner.map(jobs.is_in_the_loop_of_the_lifespan, range(20)) == [True] * 20
