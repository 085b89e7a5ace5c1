"""A program that was stopped for long: when it goes on it kills nobody for the time in which it did not run itself.

What it then sees is a clock that has gone on without it.
"""

import asyncio
import functools
from collections.abc import Callable

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log

pytestmark = pytest.mark.asyncio_only  # uvloop's clock cannot be set; tests/e2e/test_interrupts.py stops real programs


@pytest.fixture
async def jump() -> Callable[[], None]:
    """Let the clock of the loop go on by itself, much further than anybody's patience."""
    loop = asyncio.get_running_loop()

    def jump() -> None:
        before = loop.time
        loop.time = lambda: before() + 1000  # type: ignore[method-assign]

    return jump


async def turns() -> None:
    for _ in range(5):  # turns of the loop: what is due by now is called
        await asyncio.sleep(0)


async def test_p7_a_worker_that_comes_up_meanwhile(make: MakeRunner, log: Log, gate: Gate, jump: Callable[[], None]) -> None:
    runner = make(lifespan=functools.partial(jobs.resource_behind, log.path, gate.path))
    starting = asyncio.create_task(runner.start())
    await log.next()
    jump()
    await turns()
    gate.open()
    await starting
    assert runner.statistics().workers[0].generation == 1
    await runner.aclose()


async def test_p7_once_is_enough(make: MakeRunner, log: Log, gate: Gate, jump: Callable[[], None]) -> None:
    runner = make(lifespan=functools.partial(jobs.resource_behind, log.path, gate.path))
    starting = asyncio.create_task(runner.start())
    await log.next()
    jump()
    await turns()
    jump()
    with pytest.raises(percore.StartupFailed, match="not ready within"):
        await starting


async def test_p7_a_call_that_ends_while_it_is_cut(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, jump: Callable[[], None]
) -> None:
    runner = make()
    await runner.start()
    future = runner.submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
    assert await log.next() == "began"
    closing = asyncio.create_task(runner.aclose(grace=0))
    assert await log.next() == "ignored"
    jump()
    await turns()
    other_gate.open()
    await closing
    assert future.exception() is None
