"""percore.testing, as tests of a program use it: with fake workers and with processes."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import percore
import percore.testing
from tests import jobs
from tests.e2e import testing_calls as calls
from tests.waiting import until

pytestmark = pytest.mark.warm_fork_server

MakeRunner = Callable[[int], percore.Runner]
FAKE = percore.testing.FakeRunner
BOTH = pytest.mark.parametrize("make", [FAKE, percore.Runner], ids=["fake", "processes"])


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


LET_GO: dict[str, asyncio.Event] = {}


async def ignore_cancellations() -> None:
    LET_GO["begun"].set()
    while not LET_GO["end"].is_set():
        with suppress(asyncio.CancelledError):
            await LET_GO["end"].wait()
    LET_GO["ended"].set()


async def test_a_coroutine_that_ignores_its_cancellation_keeps_no_runner_open() -> None:
    LET_GO.update({name: asyncio.Event() for name in ("begun", "end", "ended")})
    try:
        async with FAKE(1, kill_after=0.01) as runner:
            call = runner.submit(ignore_cancellations)
            await LET_GO["begun"].wait()
            await asyncio.wait_for(runner.aclose(grace=0), 20)
        with pytest.raises(percore.RunnerClosed):
            await call
    finally:
        LET_GO["end"].set()
    await LET_GO["ended"].wait()


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
        before = await runner.run(calls.pid)
        call = runner.submit(calls.endless)
        await runner.run(jobs.aecho, 1)  # it has begun
        percore.testing.kill(runner)
        with pytest.raises(percore.WorkerDied) as died:
            await call
        assert died.value.exitcode == -9
        assert await runner.options(retries=2).run(calls.pid) != before


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
@pytest.mark.parametrize("function", [calls.lose, calls.alose])
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


SQUARES = pytest.mark.parametrize("square", [calls.square, calls.asquare])


@BOTH
@SQUARES
async def test_calls_fail_as_often_as_asked(make: MakeRunner, square: Callable[[int], Any]) -> None:
    async with make(2) as runner:
        assert await runner.run(square, 3) == 9
        with percore.testing.failing(runner, square, error=OSError("no route"), times=2):
            with pytest.raises(OSError, match="no route"):
                await runner.run(square, 3)
            assert await runner.run(jobs.echo, 3) == 3  # another function
            assert await runner.options(retries=1, retry_on=OSError).run(square, 3) == 9
            assert await runner.map(square, range(20)) == [number * number for number in range(20)]
        with percore.testing.failing(runner, error=KeyError):
            outcomes = await runner.map(square, range(5), return_exceptions=True)
            assert [type(one) for one in outcomes] == [KeyError] * 5
        assert await runner.map(square, range(3)) == [0, 1, 4]
        assert await runner.run(square, 3) == 9
        (figures,) = [one for one in runner.statistics().functions if one.name.endswith(square.__qualname__)]
        assert figures.name == f"{calls.__name__}.{square.__qualname__}"
        assert figures.ended == figures.begun == 32


@BOTH
@SQUARES
async def test_calls_are_delayed(make: MakeRunner, square: Callable[[int], Any]) -> None:
    async with make(1) as runner:
        with percore.testing.delayed(runner, square, seconds=0.05):
            assert await runner.run(square, 4) == 16
        await until(lambda: runner.statistics().functions[0].run)
        run = runner.statistics().functions[0].run
        assert run is not None
        assert run.p50 > 0.04
        with percore.testing.delayed(runner, calls.asquare, seconds=3600, times=1):
            with pytest.raises(TimeoutError):
                await runner.options(timeout=0.01).run(calls.asquare, 1)
            assert await runner.run(calls.asquare, 1) == 1


@BOTH
@pytest.mark.parametrize("work", [calls.write, calls.awrite])
async def test_a_lost_result_is_that_of_work_that_was_done(make: MakeRunner, work: Callable[[str], Any], tmp_path: Path) -> None:
    done = tmp_path / "done"
    async with make(1) as runner:
        with percore.testing.losing(runner, work):
            assert await runner.options(retries=1).run(work, str(done)) == str(done)
        with percore.testing.losing(runner, work), pytest.raises(percore.WorkerDied):
            await runner.run(work, str(done))
        assert await runner.run(work, str(done)) == str(done)
    assert done.read_text() == 4 * "done"


@BOTH
async def test_starts_fail_and_come_late(make: MakeRunner) -> None:
    runner = make(1)
    with percore.testing.failing_starts(runner), pytest.raises(percore.StartupFailed, match="failed on purpose"):
        await runner.start()
    runner = make(1)
    with percore.testing.delayed_starts(runner, seconds=0.01, times=1):
        await runner.start()
    async with asyncio.timeout(40):
        before = await runner.run(calls.pid)
        with percore.testing.delayed_starts(runner, seconds=3600):
            percore.testing.kill(runner)
            await until(lambda: runner.statistics().workers[0].state == "gone")
            call = runner.submit(calls.pid)
        assert await call != before  # the end of the block is the end of the delay
        with percore.testing.failing_starts(runner, times=1):
            percore.testing.kill(runner)
            assert await runner.options(retries=2).run(calls.pid) != before
        await runner.aclose()
    with pytest.raises(percore.RunnerClosed), percore.testing.delayed_starts(runner, seconds=1):
        pass


async def test_faults_that_are_none_are_told() -> None:
    async with FAKE(1) as runner:
        with pytest.raises(ValueError, match="times must be at least 1"):
            percore.testing.losing(runner, times=0)
        with pytest.raises(TypeError, match="times must be an int"):
            percore.testing.losing(runner, times=True)
        with pytest.raises(TypeError, match="error must be an exception"):
            percore.testing.failing(runner, error="no route")  # type: ignore[arg-type]
    with pytest.raises(percore.RunnerClosed):
        percore.testing.losing(runner)


PLUGGED = """
import asyncio, percore

async def main():
    async with percore.Runner(2) as runner:
        assert await runner.run(asyncio.sleep, 60, "slept") == "slept"
    assert next(numbers) != 3

numbers = iter(range(1000))

def test_fake(fake_runner):
    async def run():
        async with fake_runner as runner:
            assert await runner.map(abs, [-1]) == [1]
    asyncio.run(run())

def test_seeds(simulate):
    simulate(main, seeds=5)
"""


def test_the_plugin_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PLUGGED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "percore.pytest_plugin", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout
    assert "pytest test_it.py::test_seeds --percore-seed=3 runs it alone" in done.stdout
    alone = subprocess.run([*command, "--percore-seed=3"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in alone.stdout  # the first number is not the fourth
