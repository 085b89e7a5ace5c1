"""reload and resize: workers are replaced, added and removed while calls go on."""

import asyncio
import functools
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import percore
from percore import Runner
from percore._protocol.messages import Kind
from percore._scheduler.places import MOST_BROADCASTS
from tests import jobs
from tests.contract import life_jobs
from tests.contract.conftest import MakeRunner, Starts, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import seats_at_each_change, supervisor_of
from tests.waiting import until

pytestmark = pytest.mark.own_fork_server
launches = pytest.mark.differs("spawn", "nodes", because="a successor is launched, and an exit seen, in another way")


def generations(runner: Runner) -> list[int]:
    return [worker.generation for worker in runner.statistics().workers]


@asynccontextmanager
async def steady_load(runner: Runner, tasks: int = 8) -> AsyncIterator[Callable[[], int]]:
    """Calls of every kind, each made when the one before has ended. Yields how many have ended."""
    ended, is_over = 0, False

    async def calls(number: int) -> None:
        nonlocal ended
        options = runner.options(key=f"key {number % 5}")
        while not is_over:
            await runner.run(life_jobs.a_moment)
            assert await runner.run(jobs.aecho, number) == number
            assert await options.run(jobs.echo, number) == number
            assert await runner.map(jobs.echo, range(number)) == [*range(number)]
            ended += 3 + number

    running = [asyncio.ensure_future(calls(number)) for number in range(tasks)]
    try:
        yield lambda: ended
    finally:
        is_over = True
        await asyncio.gather(*running)  # raises what a call has raised


@launches
@pytest.mark.differs("uvloop", because="exits and messages of old and new workers reach the loop in another order")
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_a_reload_under_load_fails_no_call_and_there_are_always_as_many_ready_workers(make: MakeRunner) -> None:
    async with make(2, concurrency=4, threads=2) as runner:
        async with steady_load(runner) as ended:
            with seats_at_each_change(runner) as seats:
                await runner.broadcast(jobs.aecho)
                before = ended()
                await runner.reload()
                await until(lambda: ended() > before)
                assert generations(runner) == [2, 2]
                assert min(seats) >= 2
                assert len(seats) == 4  # each new worker comes before the old one goes
        statistics = runner.statistics()
        assert (statistics.failed, statistics.restarts) == (0, 2)


@pytest.mark.differs("nodes", because="a place is given back to a host, and taken there")
async def test_a_resize_under_load_fails_no_call(make: MakeRunner) -> None:
    async with make(1, concurrency=4, threads=2) as runner:
        async with steady_load(runner):
            await runner.resize(3)
            assert [worker.state for worker in runner.statistics().workers] == ["ready"] * 3
            assert [where.index for where in await runner.broadcast(jobs.awhere)] == [0, 1, 2]
            assert repr(runner).startswith("<percore.Runner open workers=3 ready=3 in_flight=")
            with seats_at_each_change(runner) as seats:
                await runner.resize(1)
                assert seats == [2, 1]
            done = runner.statistics().done
            assert [where.index for where in await runner.broadcast(jobs.where)] == [0]
            await runner.resize(2)
            await runner.resize(2)  # nothing to do
            assert generations(runner) == [1, 2]  # the slot is the one that was removed
            assert runner.statistics().done > done  # what removed workers have done counts
        assert runner.statistics().failed == 0


async def test_a_map_under_way_gives_added_workers_as_much_as_those_it_began_with(make: MakeRunner, gate: Gate) -> None:
    pulled, wanted, reached = 0, 0, asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        nonlocal pulled
        while True:
            pulled += 1
            if pulled == wanted:
                reached.set()
            yield pulled - 1

    async with make(1, concurrency=50) as runner:
        results = runner.map(functools.partial(jobs.await_unless_first, gate.path), inputs())
        assert await anext(results) == 0
        second = asyncio.ensure_future(anext(results))
        await runner.broadcast(jobs.aecho)
        window = supervisor_of(runner).dispatch.room_for(Kind.TASK) * 2
        wanted = 3 * window
        assert pulled < wanted
        await runner.resize(3)
        await reached.wait()
        gate.open()
        assert await second == 1
        await results.aclose()


async def test_what_a_removed_worker_has_begun_ends_there_and_what_it_has_not_begins_elsewhere(
    make: MakeRunner, log: Log, gate: Gate
) -> None:
    async with make(2, threads=1) as runner:
        calls = [asyncio.ensure_future(runner.run(jobs.wait, log.path, gate.path, i)) for i in range(8)]
        await log.take(2)
        await runner.resize(1)
        assert (runner.statistics().running, len(runner.statistics().workers)) == (2, 1)
        gate.open()
        assert await asyncio.gather(*calls) == list(range(8))
        assert runner.statistics().failed == 0


async def test_a_key_stays_with_the_worker_that_runs_its_call_and_then_moves(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        view = runner.options(key="key")
        first = asyncio.ensure_future(view.run(jobs.await_, log.path, gate.path, "first"))
        assert await log.next() == "first"
        await runner.reload()
        second = asyncio.ensure_future(view.run(jobs.awhere))
        assert (await runner.run(jobs.awhere)).generation == 2
        assert not second.done()
        gate.open()
        await first
        assert (await second).generation == 2


async def test_a_broadcast_that_an_old_worker_has_not_begun_runs_in_the_new_one(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        held = [asyncio.ensure_future(runner.broadcast(jobs.await_, log.path, gate.path, i)) for i in range(MOST_BROADCASTS)]
        await log.take(MOST_BROADCASTS)
        waiting = asyncio.ensure_future(runner.broadcast(jobs.awhere))
        await asyncio.sleep(0)
        await runner.reload()
        assert [where.generation for where in await waiting] == [2]
        gate.open()
        assert await asyncio.gather(*held) == [[i] for i in range(MOST_BROADCASTS)]


@launches
async def test_a_reload_whose_new_worker_cannot_start_raises_and_leaves_the_old_ones(make: MakeRunner, tmp_path: Path) -> None:
    path = tmp_path / "away"
    path.touch()
    async with make(2, lifespan=functools.partial(life_jobs.fails_where, str(path))) as runner:
        async with steady_load(runner):
            with seats_at_each_change(runner) as seats:
                with pytest.raises(percore.StartupFailed) as failure:
                    await runner.reload()
                assert str(failure.value) == (
                    "the reload stopped, and the workers in service go on: "
                    "worker 0 could not start: ConnectionError: the database is away"
                )
                assert "in fails_where" in "".join(traceback.format_exception(failure.value))
                assert not seats
                path.unlink()
                await runner.reload()
        assert [where.generation for where in await runner.broadcast(jobs.awhere)] == [3, 2]
        assert runner.statistics().failed == 0


@pytest.mark.differs("nodes", because="a place is given back to a host, and taken there")
async def test_a_resize_whose_new_workers_cannot_start_raises_and_leaves_as_many_as_there_were(
    make: MakeRunner, tmp_path: Path
) -> None:
    path = tmp_path / "full"
    path.touch()
    async with make(1, lifespan=functools.partial(life_jobs.only_the_first, str(path))) as runner:
        with pytest.raises(percore.StartupFailed, match=r"the resize stopped, .*: worker [12] could not start: ConnectionError"):
            await runner.resize(3)
        assert len(runner.statistics().workers) == 1
        path.unlink()
        await runner.resize(3)
        assert len(await runner.broadcast(jobs.aecho)) == 3


async def test_a_cancelled_reload_leaves_old_and_new_workers_in_service(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        await log.take(2)
        reloads = [asyncio.ensure_future(runner.reload()) for _ in range(2)]
        assert await log.next() == "enter 2"
        for reload in reloads:
            reload.cancel()
        await asyncio.wait(reloads)
        assert generations(runner)[1] == 1
        assert len(await runner.broadcast(jobs.aecho)) == 2
        gate.open()
        await runner.reload()
        assert all(where.generation > 1 for where in await runner.broadcast(jobs.awhere))


async def test_a_cancelled_resize_leaves_as_many_workers_as_there_were(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        await runner.resize(2)
        await runner.resize(1)
        assert sorted(await log.take(3)) == ["enter 1", "enter 1", "exit 1"]
        resize = asyncio.ensure_future(runner.resize(2))
        assert await log.next() == "enter 2"
        resize.cancel()
        await asyncio.wait([resize])
        assert resize.cancelled()
        assert generations(runner) == [1]
        assert await runner.map(jobs.echo, range(10)) == [*range(10)]
        gate.open()
        await runner.resize(2)
        assert len(await runner.broadcast(jobs.aecho)) == 2


async def test_a_resize_that_fails_before_it_starts_a_worker_leaves_as_many_as_there_were(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that was added has no worker yet, and nothing would give it one."""
    async with make(1) as runner:
        pool = supervisor_of(runner).pool
        grow = pool.grow

        def interrupted(workers: int) -> None:
            grow(workers)
            raise MemoryError

        monkeypatch.setattr(pool, "grow", interrupted)
        with pytest.raises(MemoryError):
            await runner.resize(3)
        monkeypatch.undo()
        assert len(runner.statistics().workers) == 1
        await runner.resize(2)
        assert await runner.run(jobs.aecho, 1) == 1


async def test_an_interrupted_resize_to_fewer_workers_removes_them_all_the_same(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would go on, and be replaced, in slots that are not in use."""
    async with make(3) as runner:
        pool = supervisor_of(runner).pool
        retire = pool._retire

        def interrupted(member: object) -> None:
            monkeypatch.setattr(pool, "_retire", retire)
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "_retire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await runner.resize(1)
        assert [member.index for member in supervisor_of(runner).dispatch.seats] == [0]
        await until(lambda: [member.index for member in pool.members] == [0])
        assert await runner.run(jobs.aecho, 1) == 1


async def test_reloads_and_resizes_run_in_order_and_reloads_that_wait_are_one(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        first = asyncio.ensure_future(runner.reload())
        assert await log.next() == "enter 2"
        others = [asyncio.ensure_future(ask) for ask in (runner.reload(), runner.resize(2), runner.reload(), runner.reload())]
        gate.open()
        await asyncio.gather(first, *others)
        assert generations(runner) == [3, 1]


@pytest.mark.parametrize("grace", [None, 0])
async def test_a_close_ends_a_reload_and_those_that_wait(make: MakeRunner, log: Log, gate: Gate, grace: float | None) -> None:
    async with make(2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        await log.take(2)
        asked = [asyncio.ensure_future(ask) for ask in (runner.reload(), runner.resize(5), runner.reload())]
        assert await log.next() == "enter 2"
        await runner.aclose(grace=grace)
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert type(outcome) is percore.RunnerClosed
        for ask in (runner.reload(), runner.resize(1)):
            with pytest.raises(percore.RunnerClosed):
                await ask


@launches
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_deaths_during_a_reload(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, retries=9, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        reload = asyncio.ensure_future(runner.reload())
        assert await log.next() == "enter 2"
        slot = supervisor_of(runner).slots[0]
        assert slot.next is not None
        slot.next.worker.kill()  # the new one
        with pytest.raises(percore.StartupFailed, match=r"the reload stopped, .* worker 0 died by SIGKILL"):
            await reload
        assert (await runner.run(jobs.awhere)).generation == 1
        reload = asyncio.ensure_future(runner.reload())
        assert await log.next() == "enter 3"
        worker_of(runner).kill()  # the old one
        call = asyncio.ensure_future(runner.run(jobs.awhere))
        gate.open()
        await reload
        assert (await call).generation == 3


async def test_a_replacement_that_waits_for_its_turn_takes_over_and_is_replaced(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, max_tasks_per_worker=4, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        for _ in range(3):
            await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"  # ahead of time
        reload = asyncio.ensure_future(runner.reload())
        gate.open()
        await reload
        assert (await runner.run(jobs.awhere)).generation == 3
        calls = [await runner.run(jobs.awhere) for _ in range(9)]
        assert len({where.generation for where in calls}) == 3
        assert runner.statistics().failed == 0


async def test_a_worker_asked_to_end_while_it_is_reloaded(make: MakeRunner, starts: Starts) -> None:
    async with make(2) as runner:
        async with steady_load(runner):
            for _ in range(starts(3)):
                reload = asyncio.ensure_future(runner.reload())
                await asyncio.sleep(0)
                worker_of(runner).kill(signal.SIGTERM)
                await asyncio.gather(reload, runner.resize(1), runner.resize(2))
        assert runner.statistics().failed == 0


async def test_values_of_resize(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for value, error, text in [
            (0, ValueError, r"^workers must be from 1 to 1024, not 0$"),
            (1025, ValueError, r"from 1 to 1024, not 1025$"),
            (1.5, TypeError, r"^workers must be a whole number, not 1\.5$"),
            (True, TypeError, r"a whole number, not True$"),
        ]:
            with subtests.test(value=value), pytest.raises(error, match=text):
                await runner.resize(value)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(percore.RunnerClosed):
            await Runner(1).reload()


@launches
async def test_new_workers_see_changed_modules_and_come_from_a_new_fork_server(
    make_real: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = tmp_path / "reloaded_jobs.py"
    module.write_text("def version():\n    return 1\n")
    import reloaded_jobs  # type: ignore[import-not-found]  # made here

    async with make_real(1) as runner:
        assert await runner.run(reloaded_jobs.version) == 1
        servers = {one.pid for one in (await runner.usage()).processes if one.role == "fork server"}
        module.write_text("def version():\n    return 22\n")
        await runner.reload()
        assert await runner.run(reloaded_jobs.version) == 22
        module.write_text("def version(:\n    return 3\n")
        later = {one.pid for one in (await runner.usage()).processes if one.role == "fork server"}
        assert len(later - servers) == bool(servers)
    del sys.modules["reloaded_jobs"]
