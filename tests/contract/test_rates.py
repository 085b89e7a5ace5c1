"""Rates: no `per` seconds hold more than n starts of a key, whatever happens to workers.

Nothing here measures time: what waits for a rate of one call in eleven days goes on by the event that a test is about, or never.
The starts are those that workers have marked.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pytest

import percore
from tests import jobs
from tests.contract import rate_jobs
from tests.contract.conftest import MakeRunner, kill_arrived, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeWorker
from tests.hosts import NodesRunner, engine_of
from tests.internals import members_of, supervisor_of
from tests.marks import most_within
from tests.rows import repeats

pytestmark = pytest.mark.differs("nodes", because="nobody reads start marks of nodes")
timed = pytest.mark.differs("uvloop", because="uvloop's clock has coarse ticks")

SELDOM: Final = percore.Rate(1, per=1e6)
OFTEN: Final = percore.Rate(10**6, per=1, burst=10**6)
KINDS = pytest.mark.parametrize("hold", [rate_jobs.ahold, rate_jobs.hold], ids=["task", "thread"])

Hold = Callable[[str, str, object], Any]


async def waiting(runner: percore.Runner, count: int) -> None:
    """Check that so many calls wait, once percore has done all that it can do now."""
    assert await runner.run(jobs.aecho, 1) == 1
    assert supervisor_of(runner).calls.waiting() == count


# The promise


@timed
@pytest.mark.own_fork_server
@pytest.mark.parametrize("burst", [1, *repeats(4), 20])
async def test_no_window_holds_more_starts(make: MakeRunner, burst: int) -> None:
    """Of calls of every verb and both kinds, in two workers of which one takes over from another now and then."""
    rate = percore.Rate(20, per=0.2, burst=burst)
    async with make(2, max_tasks_per_worker=30) as runner:
        view = runner.options(key="k", rate=rate)
        singles = [view.submit(fn) for fn in (rate_jobs.told, rate_jobs.atold) for _ in range(10)]
        singles += [asyncio.ensure_future(view.run(fn)) for fn in (rate_jobs.told, rate_jobs.atold) for _ in range(10)]
        mapping = runner.options(rate=rate, retries=2).map(rate_jobs.told, range(10), key=lambda _: "k")
        streams = [view.stream(fn) for fn in (rate_jobs.told_twice, rate_jobs.atold_twice)]
        reloading = asyncio.ensure_future(runner.reload())
        starts: list[Any] = await mapping
        starts += await asyncio.gather(*singles)
        for stream in streams:
            first, second = [began async for began in stream]
            assert first == second
            starts.append(first)
        await reloading
        assert len(set(starts)) == 52
        assert most_within(starts, rate.per) <= rate.n


async def test_a_rate_that_is_not_reached_changes_nothing(make: MakeRunner) -> None:
    async with make(2) as runner:
        view = runner.options(key="k", rate=OFTEN)
        assert await asyncio.gather(*(view.run(jobs.aecho, n) for n in range(300))) == list(range(300))
        assert await runner.options(rate=OFTEN).map(jobs.echo, range(300), key=lambda n: n % 3) == list(range(300))
        assert await runner.options(rate=OFTEN).map(jobs.echo, range(3), key=lambda _: None) == [0, 1, 2]
        large = bytes(300_000)
        assert await view.run(jobs.aecho, large) == large
        with pytest.raises(ValueError, match="no"):
            await view.run(jobs.afail, ValueError("no"))


async def test_waiting_calls_hold_no_place_and_nobody_up(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1, threads=1) as runner:
        view = runner.options(key="k", rate=SELDOM)
        assert await view.run(jobs.aecho, "first") == "first"
        held = [view.submit(fn, n) for fn in (jobs.aecho, jobs.echo) for n in range(100)]
        mapping = asyncio.ensure_future(runner.options(rate=SELDOM).map(jobs.echo, range(5), key=lambda _: "k").collect())
        assert await asyncio.gather(*(runner.options(key="other").run(fn, n) for fn in (jobs.aecho, jobs.echo) for n in range(9)))
        assert await runner.map(jobs.echo, range(300)) == list(range(300))
        assert await runner.broadcast(jobs.aecho, 1) == [1]
        await waiting(runner, 205)
        assert runner.statistics().running == 0
        assert not any(call.done() for call in held)
        mapping.cancel()
        for call in held:
            call.cancel()
        await asyncio.gather(mapping, return_exceptions=True)
        await waiting(runner, 0)


@pytest.mark.parametrize("is_set", [False, True], ids=["options", "set_rate"])
@KINDS
async def test_the_time_counts_from_the_start_and_not_from_the_end(
    make: MakeRunner, log: Log, gate: Gate, hold: Hold, *, is_set: bool
) -> None:
    rate = percore.Rate(1, per=0.02)
    async with make() as runner:
        view = runner.options(key="k", rate=rate)
        if is_set:
            runner.set_rate("k", rate)
            view = runner.options(key="k")
        calls = [view.submit(hold, log.path, gate.path, n) for n in range(2)]
        calls += [asyncio.ensure_future(view.run(hold, log.path, gate.path, n)) for n in (2, 3)]
        assert sorted(await log.take(4)) == ["0", "1", "2", "3"], "all run at once"
        gate.open()
        starts = await asyncio.gather(*calls)
        assert most_within(starts, 0.02) == 1


@timed
async def test_a_queue_timeout_limits_the_wait(make: MakeRunner) -> None:
    async with make() as runner:
        view = runner.options(key="k", rate=SELDOM)
        assert await view.run(jobs.aecho, 0) == 0
        for fn in (jobs.aecho, jobs.echo):
            with pytest.raises(TimeoutError, match="did not begin within queue_timeout"):
                await runner.options(key="k", rate=SELDOM, queue_timeout=0.02).run(fn, 1)
        await waiting(runner, 0)


# What counts


async def test_every_attempt_counts(make: MakeRunner, tmp_path: Any) -> None:
    async with make() as runner:
        two = percore.Rate(2, per=1e6, burst=2)
        view = runner.options(key="k", rate=two, retries=2, retry_on=OSError)
        call = view.submit(jobs.afail_first, str(tmp_path), 2, OSError, 7)
        while supervisor_of(runner).calls.waiting() == 0:
            assert not call.done()
            await runner.run(jobs.aecho)
        assert runner.statistics().retried == 2
        await waiting(runner, 1)
        runner.set_rate("k", percore.Rate(3, per=1e6, burst=3))
        assert await call == 7
        last = runner.options(key="k").submit(jobs.aecho)
        await waiting(runner, 1)
        assert last.cancel()


@KINDS
async def test_a_call_whose_worker_died_counts_if_it_had_begun(make: MakeRunner, log: Log, gate: Gate, hold: Hold) -> None:
    async with make() as runner:
        view = runner.options(key="k", rate=SELDOM)
        begun = view.submit(hold, log.path, gate.path, "begun")
        assert await log.next() == "begun"
        following = view.submit(jobs.aecho, "following")
        worker = worker_of(runner)
        worker.kill()
        with pytest.raises(percore.WorkerDied):
            await begun
        await kill_arrived(worker)
        gate.open()
        await threads_ended(worker)
        await waiting(runner, 1)
        runner.set_rate("k", OFTEN)
        assert await following == "following"


@KINDS
async def test_a_call_that_has_not_begun_is_not_counted(make: MakeRunner, log: Log, gate: Gate, hold: Hold) -> None:
    """It was sent to a worker that reads nothing, and begins in the next one at once."""
    async with make(concurrency=10) as runner:
        worker = worker_of(runner)
        if isinstance(worker, FakeWorker):
            worker.pause()
        else:
            blocking = runner.submit(jobs.block_loop, log.path, gate.path)
            assert await log.next() == "blocked"
        call = runner.options(key="k", rate=SELDOM).submit(hold, log.path, gate.path, "runs")
        following = runner.options(key="k", rate=SELDOM).submit(hold, log.path, gate.path, "never")
        (member,) = members_of(runner)
        assert len(member.calls) == 1 + (not isinstance(worker, FakeWorker))
        worker.kill()
        if not isinstance(worker, FakeWorker):
            with pytest.raises(percore.WorkerDied):
                await blocking
        assert await log.next() == "runs"
        gate.open()
        _ = await call
        await waiting(runner, 1)
        following.cancel()


async def test_a_cancelled_call_takes_nothing_that_it_has_not_used(make: MakeRunner, log: Log, gate: Gate) -> None:
    two = percore.Rate(2, per=1e6, burst=2)
    async with make(threads=1) as runner:
        view = runner.options(key="k", rate=SELDOM)
        held = view.submit(rate_jobs.hold, log.path, gate.path, "holds")
        assert await log.next() == "holds"
        waits = view.submit(jobs.echo)
        waits.cancel()  # before it was sent
        runner.set_rate("k", two)
        queued = view.submit(jobs.echo)  # sent, and behind the first one
        await waiting(runner, 0)
        following = view.submit(jobs.aecho, "following")
        await waiting(runner, 1)
        queued.cancel()
        assert await following == "following"
        gate.open()
        await held
        last = view.submit(jobs.aecho)
        await waiting(runner, 1)
        last.cancel()


async def test_calls_of_calls_count_if_they_name_the_key(make: MakeRunner) -> None:
    async with make() as runner:
        rate = percore.Rate(10, per=0.1)
        runner.set_rate("k", rate)
        starts = await runner.run(rate_jobs.call_of_key, "k", 15)
        assert most_within(starts, rate.per) <= 10
        starts = await runner.options(key="one", rate=SELDOM).run(rate_jobs.call_of_key, "k", 5)
        assert len(starts) == 5


# set_rate


@timed
async def test_the_rate_of_a_key_changes_while_calls_wait(make: MakeRunner) -> None:
    async with make() as runner:
        view = runner.options(key="k", rate=SELDOM)
        calls = [view.submit(jobs.aecho, n) for n in range(5)]
        assert await calls[0] == 0
        await waiting(runner, 4)
        runner.set_rate("k", percore.Rate(3, per=1e6, burst=3))
        assert await asyncio.gather(*calls[1:3]) == [1, 2]
        await waiting(runner, 2)
        runner.set_rate("k", None)  # as their options have it
        await waiting(runner, 2)
        runner.set_rate("k", OFTEN)
        assert await asyncio.gather(*calls) == list(range(5))
        assert await view.run(jobs.aecho, "the rate that was set goes first") == "the rate that was set goes first"


@timed
async def test_a_pause(make: MakeRunner) -> None:
    async with make() as runner:
        runner.set_rate("k", None)  # nothing to lift
        assert len(supervisor_of(runner).calls.rates) == 0
        runner.set_rate("k", None, after=1e6)
        calls = [runner.options(key="k").submit(jobs.aecho, n) for n in range(3)]
        calls += [runner.options(key="k", rate=OFTEN).submit(jobs.aecho, 3)]
        other = runner.options(key="other", rate=OFTEN)
        assert await other.run(jobs.aecho, 4) == 4
        await waiting(runner, 4)
        runner.set_rate("k", OFTEN, after=0.02)
        assert await asyncio.gather(*calls) == list(range(4))
        runner.set_rate("k", None)
        assert await runner.options(key="k").run(jobs.aecho, 5) == 5


async def test_the_options_of_a_later_call_change_the_rate(make: MakeRunner) -> None:
    async with make() as runner:
        calls = [runner.options(key="k", rate=SELDOM).submit(jobs.aecho, n) for n in range(2)]
        assert await calls[0] == 0
        calls.append(runner.options(key="k", rate=percore.Rate(1, per=1e6)).submit(jobs.aecho, 2))  # an equal one
        await waiting(runner, 2)
        calls.append(runner.options(key="k", rate=OFTEN).submit(jobs.aecho, 3))
        assert await asyncio.gather(*calls) == [0, 1, 2, 3]


async def test_idle_keys_are_forgotten(make: MakeRunner) -> None:
    async with make() as runner:
        quick = percore.Rate(1, per=1e-4)
        for number in range(1000):
            await runner.options(key=number, rate=quick).run(jobs.aecho)
        assert len(supervisor_of(runner).calls.rates) <= 300
        assert len(supervisor_of(runner).dispatch.names) <= 1500
        runner.set_rate("k", SELDOM)
        for number in range(300):
            await runner.options(key=number, rate=quick).run(jobs.aecho)
        assert await runner.options(key="k").run(jobs.aecho, 1) == 1
        call = runner.options(key="k").submit(jobs.aecho)
        await waiting(runner, 1)
        call.cancel()


# The end, and other workers


async def test_a_close_lets_waiting_calls_run_at_their_rate(make: MakeRunner) -> None:
    runner = make()
    await runner.start()
    rate = percore.Rate(10, per=0.1)
    calls = [runner.options(key="k", rate=rate).submit(rate_jobs.atold) for _ in range(15)]
    await runner.aclose()
    starts = [call.result() for call in calls]
    assert most_within(starts, rate.per) <= rate.n


async def test_a_close_without_grace_ends_waiting_calls(make: MakeRunner) -> None:
    runner = make()
    await runner.start()
    calls = [runner.options(key="k", rate=SELDOM).submit(jobs.aecho, n) for n in range(3)]
    assert await calls[0] == 0
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    assert not calls[1].done()
    await runner.aclose(grace=0)
    await closing
    outcomes = await asyncio.gather(*calls[1:], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [percore.RunnerClosed] * 2


@pytest.mark.own_fork_server
async def test_other_workers_keep_the_rate(make: MakeRunner) -> None:
    rate = percore.Rate(20, per=0.1)
    async with make(2) as runner:
        mapping = asyncio.ensure_future(runner.options(rate=rate).map(rate_jobs.atold, range(60), key=lambda n: n % 2).collect())
        await runner.resize(4)
        await runner.reload()
        await runner.resize(1)
        starts = await mapping
        for parity in range(2):
            assert most_within(starts[parity::2], rate.per) <= rate.n


async def test_the_rate_holds_though_workers_die(make: MakeRunner) -> None:
    rate = percore.Rate(20, per=0.2)
    async with make(2) as runner:
        view = runner.options(key="k", rate=rate, retries=100)
        calls = [view.submit(rate_jobs.atold) for _ in range(50)]
        for number, call in enumerate(calls):
            _ = await call
            if number in (5, 25, 40):
                for index in range(2):
                    worker_of(runner, index).kill()
        assert most_within([call.result() for call in calls], rate.per) <= rate.n


# Mistakes


async def test_a_rate_needs_a_key(make: MakeRunner) -> None:
    async with make() as runner:
        view = runner.options(rate=OFTEN)
        with pytest.raises(TypeError, match="this call has none: give both"):
            _ = view.submit(jobs.aecho, [1])
        with pytest.raises(TypeError, match="this call has none: give both"):
            await view.run(jobs.aecho, 1)
        with pytest.raises(TypeError, match="this call has none: give both"):
            view.stream(rate_jobs.told_twice)
        with pytest.raises(TypeError, match="give the map a function that returns each call's key"):
            _ = view.map(jobs.echo, range(3))
        with pytest.raises(TypeError, match="a broadcast goes to each worker once"):
            await view.broadcast(jobs.echo)
        wrong: Any = 10
        with pytest.raises(TypeError, match=r"rate must be a percore\.Rate, as in percore\.Rate\(10, per=1\), not 10"):
            runner.options(key="k", rate=wrong)
        with pytest.raises(TypeError, match=r"rate must be a percore\.Rate"):
            runner.set_rate("k", wrong)
        with pytest.raises(TypeError, match="set_rate is for one key"):
            runner.set_rate(None, OFTEN)
        with pytest.raises(ValueError, match="after must be zero or more seconds, not -1"):
            runner.set_rate("k", OFTEN, after=-1)
        assert await runner.run(jobs.aecho, 1) == 1
        await waiting(runner, 0)


async def test_a_call_whose_node_was_lost_counts_as_begun(log: Log, gate: Gate) -> None:
    """Its worker may have announced the start, and nobody has heard of it."""
    async with NodesRunner(2) as runner:
        loop = asyncio.get_running_loop()
        view = runner.options(key="k", rate=SELDOM)
        links = engine_of(runner).links[:]
        for link in links:
            loop.remove_reader(link.connection._sock)
        begun = view.submit(rate_jobs.ahold, log.path, gate.path, "begun")
        assert await log.next() == "begun"
        (member,) = [member for member in members_of(runner) if member.calls]
        worker: Any = member.worker
        for link in links:
            if link is worker.link:
                link.connection.give_up("the test has cut it")
            else:
                loop.add_reader(link.connection._sock, link.connection._readable)
        with pytest.raises(percore.WorkerDied):
            await begun
        following = view.submit(jobs.aecho, "following")
        await waiting(runner, 1)
        assert not following.done()
        following.cancel()
