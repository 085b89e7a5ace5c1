"""An engine that does not always have a place for a worker: the slot stays empty until there is one. A lost place is told."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing

import pytest

from percore import RunnerBroken, RunnerClosed, StartupFailed, WorkerDied
from percore._protocol.interfaces import Exit
from tests import jobs
from tests.contract.conftest import worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeEngine, FakeRunner, FakeWorker
from tests.waiting import until

LOST = "its node was lost"


class FewPlaces(FakeEngine):
    """An engine with as many places as the test says. There is one at a time."""

    made: "FewPlaces"
    places: int
    loses = False
    """Whether workers that end have lost their places."""

    refused: asyncio.Queue[int]

    def start(  # type: ignore[override]
        self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> FakeWorker | None:
        FewPlaces.made = self
        if not self.places:
            self.refused.put_nowait(index)
            return None

        def exited(end: Exit) -> None:
            if not self.loses:
                self.loop.call_soon(self.add)
            on_exit(Exit(None, LOST, place_lost=True) if self.loses else end)

        self.places -= 1
        return super().start(index, generation, exited, sockets)

    def add(self) -> None:
        self.places += 1
        self.on_place()


class FewPlacesRunner(FakeRunner):
    _make_engine = FewPlaces


@pytest.fixture(autouse=True)
def one_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FewPlaces, "places", 1, raising=False)
    monkeypatch.setattr(FewPlaces, "refused", asyncio.Queue(), raising=False)
    yield
    del FewPlaces.made


async def started(workers: int = 2) -> tuple[FewPlacesRunner, FewPlaces]:
    """Start a runner whose last workers find no place at first."""
    runner = FewPlacesRunner(workers, concurrency=1)
    start = asyncio.create_task(runner.start())
    for index in range(1, workers):
        assert await FewPlaces.refused.get() == index
    for _ in range(1, workers):
        FewPlaces.made.add()
    await start
    return runner, FewPlaces.made


async def test_a_start_waits_for_the_places_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "percore")
    runner, _ = await started(3)
    async with aclosing(runner):
        assert caplog.messages[-2] == "percore: there is no place for worker 2 yet"
        assert [worker.generation for worker in runner.statistics().workers] == [1, 1, 1]
        assert await runner.broadcast(jobs.echo, 4) == [4, 4, 4]


async def test_closing_ends_a_start_that_waits_for_a_place() -> None:
    FewPlaces.places = 0
    runner = FewPlacesRunner(1)
    start = asyncio.create_task(runner.start())
    await FewPlaces.refused.get()
    await runner.aclose()
    with pytest.raises(RunnerClosed, match="closed while it started"):
        await start
    FewPlaces.made.add()
    assert FewPlaces.made.places == 1


async def test_a_start_that_finds_no_place_in_time_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The time counts while some worker waits for a place: another worker that found one, late, does not prolong it."""
    FewPlaces.places = 1
    runner = FewPlacesRunner(3, start_timeout=0.2)
    start = asyncio.create_task(runner.start())
    assert [await FewPlaces.refused.get() for _ in range(2)] == [1, 2]
    FewPlaces.made.add()
    assert await FewPlaces.refused.get() == 2
    with pytest.raises(StartupFailed, match=r"^there was no place for worker 2 within start_timeout=0\.2 s$"):
        await start
    assert FewPlaces.made.places == 2  # both workers have ended
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_lost_place_is_told_and_its_slot_is_filled_when_there_is_another(gate: Gate, log: Log) -> None:
    runner, engine = await started()
    async with aclosing(runner):
        calls = [runner.submit(jobs.await_, log.path, gate.path, number) for number in range(2)]
        await log.take(2)
        engine.loses = True
        worker_of(runner).kill()
        assert await engine.refused.get() == 0
        (lost,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        error = lost.exception()
        assert isinstance(error, WorkerDied)
        assert (error.exitcode, error.detail) == (None, LOST)
        assert f" died ({LOST}) while it ran await_" in str(error)
        assert runner.statistics().workers[0].pid is None
        engine.loses = False
        calls.append(runner.submit(jobs.await_, log.path, gate.path, 2))  # it waits: the other worker is full
        engine.add()
        await log.next()
        assert [worker.generation for worker in runner.statistics().workers] == [2, 1]
        gate.open()
        await asyncio.wait(calls)


async def test_without_a_place_for_its_replacement_a_worker_at_its_limit_ends_first() -> None:
    async with FewPlacesRunner(1, max_tasks_per_worker=3) as runner:
        assert await runner.map(jobs.echo, range(10)) == [*range(10)]
        assert runner.statistics().workers[0].generation == 4
        assert FewPlaces.made.refused.qsize() == 3


async def test_closing_waits_for_the_place_of_a_worker_at_its_limit() -> None:
    async with FewPlacesRunner(1, max_tasks_per_worker=3) as runner:
        calls = [runner.submit(jobs.echo, number) for number in range(10)]
    assert [call.result() for call in calls] == [*range(10)]


async def test_a_reload_without_a_place_for_a_further_worker_fails_and_the_old_one_goes_on(gate: Gate, log: Log) -> None:
    async with FewPlacesRunner(1, start_timeout=0.2) as runner:
        engine = FewPlaces.made
        engine.no_place = "the cluster is full"
        with pytest.raises(
            StartupFailed,
            match=r"^the reload stopped, and the workers in service go on: there was no place for worker 0 within "
            r"start_timeout=0\.2 s: the cluster is full\. A new worker needs a place beside those that serve",
        ):
            await runner.reload()
        assert engine.refused.qsize() == 1
        with pytest.raises(StartupFailed, match=r"^the resize stopped, .* no place for worker 1 within"):
            await runner.resize(2)
        engine.add()  # too late: nobody waits for it any more
        assert await runner.run(jobs.echo, 1) == 1
        (worker,) = runner.statistics().workers
        assert (worker.generation, worker.restarts) == (1, 0)
        await runner.reload()
        (worker,) = runner.statistics().workers
        assert (worker.generation, worker.restarts) == (2, 1)


async def test_a_reload_waits_for_a_place(gate: Gate, log: Log) -> None:
    async with FewPlacesRunner(1) as runner:
        engine = FewPlaces.made
        running = runner.submit(jobs.await_, log.path, gate.path, 1)
        await log.next()
        reload = asyncio.create_task(runner.reload())
        assert await engine.refused.get() == 0
        assert await runner.run(jobs.echo, 1) == 1
        engine.add()
        await reload
        assert runner.statistics().workers[0].generation == 2
        gate.open()
        assert await running == 1
        await until(lambda: engine.places == 1)  # its worker has ended
        cancelled = asyncio.create_task(runner.reload())
        engine.places = 0
        assert await engine.refused.get() == 0
        cancelled.cancel()
        await asyncio.wait([cancelled])
        engine.add()
        assert await runner.run(jobs.echo, 1) == 1
        assert runner.statistics().workers[0].generation == 2, "it has the worker that it had"


async def test_without_any_worker_a_place_has_to_come_within_the_time_of_a_start() -> None:
    async with FewPlacesRunner(1, start_timeout=0.5) as runner:
        engine = FewPlaces.made
        engine.loses, engine.no_place = True, "the cluster is full"
        worker_of(runner).kill()
        assert await engine.refused.get() == 0
        call = runner.submit(jobs.echo, 1)
        engine.add()
        assert await call == 1
        worker_of(runner).kill()
        calls = [runner.submit(jobs.echo, number) for number in range(2)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, RunnerBroken)
            assert (error.deaths, error.detail) == (0, "none was found within start_timeout=0.5 s: the cluster is full")
        with pytest.raises(RunnerBroken):
            await runner.run(jobs.echo, 1)
