"""percore.testing, as tests of a program use it: with fake workers and with processes."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import percore
import percore.testing
from tests import jobs
from tests.waiting import until

MakeRunner = Callable[[int], percore.Runner]
FAKE = percore.testing.FakeRunner
BOTH = pytest.mark.parametrize("make", [FAKE, percore.Runner], ids=["fake", "processes"])


def lose(path: str) -> None:
    """Do the work, and die before the result arrives."""
    with open(path, "a") as file:
        file.write("done")
    if os.path.getsize(path) == 4:
        percore.testing.die()


async def alose(path: str) -> None:
    lose(path)


async def endless() -> None:
    await asyncio.Event().wait()


async def pid() -> int:
    return percore.current_worker().pid


def thread() -> int:
    return threading.get_ident()


VALUE = "the module's"


async def value() -> str:
    return VALUE


async def test_a_fake_runner_makes_no_process_and_patches_reach_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FAKE(workers=2, lifespan=None, concurrency=3) as runner:
        assert await runner.map(jobs.echo, range(20)) == list(range(20))
        assert await runner.run(os.getpid) == os.getpid()
        assert await runner.run(thread) != threading.get_ident()
        monkeypatch.setitem(globals(), "VALUE", "patched")
        assert await runner.run(value) == "patched"
        assert len(await runner.broadcast(jobs.echo)) == 2


async def test_the_loop_makes_tasks_as_before_when_the_last_fake_runner_has_closed() -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    async with FAKE(1), FAKE(1) as runner:
        assert await runner.run(jobs.echo, 1) == 1
        assert loop.get_task_factory() is not before
    assert loop.get_task_factory() is before


async def test_a_task_factory_of_the_program_goes_on_making_tasks() -> None:
    loop = asyncio.get_running_loop()
    made: list[object] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(factory)
    try:
        async with FAKE(1) as runner:
            assert await runner.run(jobs.aecho, 1) == 1
        assert made
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)


@BOTH
async def test_a_killed_worker_fails_its_call_and_is_replaced(make: MakeRunner) -> None:
    async with make(1) as runner:
        before = await runner.run(pid)
        call = runner.submit(endless)
        await runner.run(jobs.aecho, 1)  # it has begun
        percore.testing.kill(runner)
        with pytest.raises(percore.WorkerDied) as died:
            await call
        assert died.value.exitcode == -9
        assert await runner.options(retries=2).run(pid) != before


@BOTH
async def test_a_stopped_worker_answers_when_it_goes_on(make: MakeRunner) -> None:
    async with make(1) as runner:
        await runner.run(jobs.echo, 1)
        with percore.testing.stopped(runner, worker=0):
            call = runner.submit(jobs.aecho, 2)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not call.done()
        assert await call == 2


@BOTH
@pytest.mark.parametrize("function", [lose, alose])
async def test_a_result_is_lost_when_its_worker_dies_first(
    make: MakeRunner, function: Callable[[str], None], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    async with make(1) as runner:
        with pytest.raises(percore.WorkerDied) as died:
            await runner.run(function, str(done))
        assert died.value.started
        await runner.run(function, str(done))
    assert done.read_text() == "donedone"


async def test_strikes_that_cannot_hit_are_told() -> None:
    runner = FAKE(1)
    with pytest.raises(percore.RunnerClosed):
        percore.testing.kill(runner)
    async with runner:
        with pytest.raises(IndexError, match="workers 0 to 0, and no worker 3"):
            percore.testing.kill(runner, worker=3)
        percore.testing.kill(runner)
        await until(lambda: runner.statistics().workers[0].state == "gone")
        with pytest.raises(ProcessLookupError, match="worker 0 has died"):
            percore.testing.kill(runner)
    with pytest.raises(RuntimeError):
        percore.testing.die()
