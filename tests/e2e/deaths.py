"""What the tests of deaths do again and again, in the process whose workers die."""

import asyncio
import os
import signal
from typing import Any

import pytest

import percore
from tests.e2e import fault_calls as calls
from tests.faults import LIMIT
from tests.waiting import until

HARD = 2.0
"""Seconds within which a death must have ended its calls."""


async def died(future: asyncio.Future[Any], seconds: float = HARD) -> percore.WorkerDied:
    with pytest.raises(percore.WorkerDied) as caught:
        await asyncio.wait_for(future, seconds)
    return caught.value


async def ended(future: asyncio.Future[Any]) -> Any:
    return await asyncio.wait_for(future, LIMIT)


def pid_of(runner: percore.Runner, index: int = 0) -> int:
    pid = runner.statistics().workers[index].pid
    assert pid is not None
    return pid


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    os.kill(pid, signum)


async def serves(runner: percore.Runner, count: int = 40) -> None:
    """The runner works as before."""
    async with asyncio.timeout(LIMIT):
        assert await runner.map(calls.accept, range(count)) == [1] * count


async def all_ready(runner: percore.Runner, generation: int) -> None:
    """Every worker is of that generation and ready."""
    async with asyncio.timeout(LIMIT):
        await until(lambda: all((it.generation, it.state) == (generation, "ready") for it in runner.statistics().workers))
