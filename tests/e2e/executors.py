"""What the tests of executors share."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

from percore import LoopPoolExecutor
from percore._supervisor.pool_worker import PoolWorker
from tests.contract.pipes import Log
from tests.rows import repeats

CONTEXTS = ("fork", *repeats("forkserver"), "spawn")
"""Contexts of multiprocessing. Its fork server differs from fork and spawn only before a worker runs percore."""
METHODS = ("percore", *CONTEXTS)


@pytest.fixture(params=METHODS)
def context(request: pytest.FixtureRequest) -> Iterator[Any]:
    """None, and contexts of multiprocessing, whose own processes are ended afterwards."""
    yield None if request.param == "percore" else multiprocessing.get_context(request.param)
    end_helpers()


@pytest.fixture(params=CONTEXTS)
def mp_context(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Contexts of multiprocessing."""
    yield multiprocessing.get_context(request.param)
    end_helpers()


def members_of(executor: LoopPoolExecutor) -> list[PoolWorker]:
    """The workers of an executor."""
    portal_jobs = executor._portal.jobs
    return [] if portal_jobs is None else list(portal_jobs.supervisor.members)


def lines(log: Log, count: int) -> list[str]:
    """The next lines of a log."""

    async def read() -> list[str]:
        return [await log.next() for _ in range(count)]

    return asyncio.run(read())


def end_helpers() -> None:
    """End the fork server and the resource tracker of multiprocessing, which otherwise live as long as this process."""
    server: Any = forkserver._forkserver
    server._stop()
    tracker: Any = resource_tracker._resource_tracker
    tracker._stop()
