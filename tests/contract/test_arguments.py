"""What cannot be an argument, or arrives as something else: the error names the function and the argument."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import percore
from percore import Runner
from percore._common.errors import with_article
from tests.contract import argument_jobs as jobs
from tests.contract.conftest import MakeRunner
from tests.internals import supervisor_of

# What is raised is decided before anything is sent: the same under any loop.
pytestmark = [
    pytest.mark.apart(because="each side has objects of its own, made by pickling"),
    pytest.mark.asyncio_only,
]


async def refusal(runner: Runner, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises((TypeError, AttributeError)) as caught:
        await runner.run(fn, *args, **kwargs)
    return str(caught.value)


async def test_the_function_and_the_argument_are_named(make: MakeRunner) -> None:
    lock = threading.Lock()
    async with make() as runner:
        for args, kwargs, place in [
            ((lock,), {}, "the argument 'first' is"),
            ((1, [{"a": lock}]), {}, "the argument 'second' contains"),
            ((1, 2, 3, lock), {}, "argument 4 is"),
            ((1,), {"named": lock}, "the argument 'named' is"),
        ]:
            text = await refusal(runner, jobs.take, *args, **kwargs)
            assert text.startswith(f"take(): {place} a lock, which cannot be pickled (TypeError: cannot pickle '_thread.lock'")
            assert "make one in each worker, in the lifespan" in text


async def test_one_that_is_not_known_is_found_by_trying(make: MakeRunner) -> None:
    async with make() as runner:
        assert (await refusal(runner, jobs.take, 1, jobs.Own())).startswith("take(): the argument 'second' is an Own, which cannot")
        text = await refusal(runner, jobs.take, 1, jobs.BadlyReduced())
        assert "'second' is a BadlyReduced" in text
        assert "words of the user's" in text


async def test_a_function_that_cannot_be_pickled_is_named(make: MakeRunner) -> None:
    lock = threading.Lock()

    def closure(_: int) -> bool:
        return lock.locked()

    own = jobs.Own()
    async with make() as runner:
        assert "the function Own.method" in await refusal(runner, own.method)
        assert "use a function of a module, and give what it needs as arguments" in await refusal(runner, closure, 1)
        with pytest.raises(TypeError, match=r"the function .*closure"):
            await runner.map(closure, [1, 2])


async def test_an_item_of_a_map_is_named(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match=r"atake\(\): the argument 'first' is a lock"):
            await runner.map(jobs.atake, [1, threading.Lock()])


async def test_what_is_shared_is_named(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match=r"share\(\): the object contains a lock"):
            await runner.share([threading.Lock()])


async def test_trying_leaves_shared_objects_as_they_were(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share([1])
        await refusal(runner, jobs.take, shared, jobs.Own())
        assert supervisor_of(runner).shares.held == {}
        assert await runner.run(jobs.take, shared) == "Shared"


async def test_open_files_are_refused(make: MakeRunner, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    async with make() as runner:
        for mode in ("r", "w", "rb", "wb", "r+b"):
            with path.open(mode) as file:
                text = await refusal(runner, jobs.take, file)
                assert "give its path, or its content" in text
                await refusal(runner, jobs.take, (lambda: 0, file))
        with pytest.raises(percore.RemoteError, match="return its content or its path"):
            await runner.run(jobs.open_here)


@pytest.mark.parametrize(
    ("made", "instead"),
    [
        (asyncio.Lock, "Runner(per_key=1)"),
        (asyncio.Semaphore, "Runner(concurrency=...)"),
        (asyncio.BoundedSemaphore, "Runner(concurrency=...)"),
        (asyncio.Event, "cancel it"),
        (asyncio.Condition, "cancel it"),
        (lambda: asyncio.Barrier(2), "gather them"),
        (asyncio.Queue, "runner.map(fn, items)"),
        (asyncio.PriorityQueue, "runner.map(fn, items)"),
        (jobs.OwnQueue, "runner.map(fn, items)"),
    ],
)
async def test_what_belongs_to_a_loop_is_no_argument(made: Callable[[], Any], instead: str, make: MakeRunner) -> None:
    thing = made()
    async with make() as runner:
        for args in ((thing,), ([thing],), ({"a": jobs.take, "b": thing},), ((lambda: 0, thing),)):
            text = await refusal(runner, jobs.take, *args)
            assert text.startswith("take(): the argument 'first' ")
            assert f" {with_article(type(thing).__name__)}: " in text
            assert "independent copy" in text
            assert instead in text


async def test_what_belongs_to_a_loop_is_no_result(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(percore.RemoteError, match="the result contains a Lock: Lock of asyncio works within one event loop"):
            await runner.run(jobs.lock_here)


async def test_a_runner_or_an_executor_is_no_argument(make: MakeRunner) -> None:
    async with make() as runner:
        assert "make the calls here" in await refusal(runner, jobs.take, runner)
        assert "make the calls here" in await refusal(runner, jobs.take, runner.options(timeout=1))
        with percore.LoopPoolExecutor(1) as executor:
            assert "make the calls here" in await refusal(runner, jobs.take, executor)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert "make one in each worker" in await refusal(runner, jobs.take, pool)


async def test_a_call_or_a_task_is_awaited_first(make: MakeRunner) -> None:
    async with make() as runner:
        call = runner.submit(jobs.take, 1)
        assert "await it, and give its result" in await refusal(runner, jobs.take, call)
        await call
