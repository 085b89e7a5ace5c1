"""hard_timeout: calls that ignore their cancellation end all the same. What is awaited here ends by the limit or never."""

import asyncio
import logging
from typing import Any, cast

import pytest

import percore
from percore._scheduler import overruns
from tests import jobs, rows
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import supervisor_of
from tests.waiting import until

timed = pytest.mark.differs("uvloop", because="uvloop's clock has coarse ticks")
unseen = pytest.mark.differs("nodes", because="nobody reads start marks of nodes")

SHORT = 0.05
SOON = 0.3
LATE = r"ran for longer than hard_timeout=0\.05 s"


def _overruns(runner: percore.Runner) -> object:
    """The calls that have exceeded their hard timeout and have not ended, by worker; None or empty if there is none."""
    hard = supervisor_of(runner).calls.limits.hard
    return hard and hard.overruns.workers()


@unseen
@timed
@pytest.mark.parametrize(
    ("verb", "fn"),
    [
        *[("run", jobs.ignore_cancel), ("map", jobs.wait)],
        *rows.repeated_rows(("submit", jobs.ignore_cancel), ("map", jobs.ignore_cancel), ("run", jobs.wait), ("submit", jobs.wait)),
    ],
)
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_what_does_not_end_is_killed(  # noqa: PLR0917  # fixtures
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, caplog: pytest.LogCaptureFixture, verb: str, fn: Any
) -> None:
    caplog.set_level(logging.INFO, "percore")
    async with make(kill_after=SOON, threads=2) as runner:
        worker, pid = worker_of(runner), (await runner.run(jobs.where)).pid
        innocent = runner.submit(jobs.await_, log.path, gate.path, "innocent")
        assert await log.next() == "innocent"
        view = runner.options(hard_timeout=SHORT)
        args: Any = (log.path, gate.path, other_gate.path)
        with pytest.raises(TimeoutError, match=LATE):
            await getattr(view, verb)(fn, *([[arg] for arg in args] if verb == "map" else args))
        with pytest.raises(percore.WorkerDied) as died:
            await innocent
        assert "had not ended kill_after=0.3 s after its hard_timeout=0.05 s" in str(died.value)
        assert (await runner.run(jobs.where)).pid != pid
        gate.open()
        other_gate.open()
        await threads_ended(worker)
        statistics = runner.statistics()
        assert (statistics.restarts, statistics.running, statistics.queued) == (1, 0, 0)
        assert "a call does not end in worker 0" in caplog.text


@unseen
@timed
async def test_a_coroutine_that_obeys_costs_no_worker(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(kill_after=60) as runner:
        pid = (await runner.run(jobs.where)).pid
        view = runner.options(hard_timeout=SHORT)
        waiting = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(3)]
        results = await asyncio.gather(
            view.submit(jobs.await_, log.path, gate.path, 7), view.run(jobs.await_, log.path, gate.path, 7), return_exceptions=True
        )
        assert [type(result) for result in results] == [TimeoutError] * 2
        assert (await runner.run(jobs.where)).pid == pid  # it goes on
        gate.open()
        assert await asyncio.gather(*waiting) == [0, 1, 2]
        assert runner.statistics().restarts == 0


@unseen
async def test_a_late_answer_is_a_timeout(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(kill_after=60) as runner:
        view = runner.options(hard_timeout=SHORT)
        call = view.submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
        failing = view.submit(jobs.fail_when_cancelled, log.path, gate.path)
        assert sorted(await log.take(3)) == ["began", "began", "ignored"]
        waiting = runner.submit(jobs.echo, 1)  # its worker takes nothing more
        other_gate.open()
        for one in (call, failing):
            with pytest.raises(TimeoutError, match=LATE):
                await one
        assert await waiting == 1


@unseen
async def test_what_has_not_begun_is_spared(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(kill_after=SOON, threads=1, concurrency=1) as runner:
        worker = worker_of(runner)
        stuck = runner.options(hard_timeout=SHORT).submit(jobs.wait, log.path, gate.path, "stuck")
        assert await log.next() == "stuck"
        calls = [runner.submit(jobs.echo, i) for i in range(10)]  # some of them are queued ahead, in the worker
        calls += [runner.options(key="k").submit(jobs.echo, i) for i in range(10, 15)]
        mapped = asyncio.ensure_future(runner.map(jobs.echo, range(100)).collect())
        with pytest.raises(TimeoutError):
            await stuck
        assert await asyncio.gather(*calls) == list(range(15))
        assert await mapped == list(range(100))
        gate.open()
        await threads_ended(worker)


async def test_keys_move_away_from_a_worker_in_which_a_call_does_not_end(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overruns, "OBEYS", 60.0)  # its worker is not replaced meanwhile
    async with make(2, kill_after=60) as runner:
        homes = {key: (await runner.options(key=key).run(jobs.where)).index for key in range(8)}
        stuck, moved = next(key for key, home in homes.items() if home), [key for key, home in homes.items() if home]
        view = runner.options(key=stuck, hard_timeout=SHORT)
        call = view.submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
        assert sorted(await log.take(2)) == ["began", "ignored"]
        for key in set(moved) - {stuck}:
            assert (await runner.options(key=key).run(jobs.awhere)).index == 0
        waiting = runner.options(key=stuck).submit(jobs.awhere)  # its key is held there
        assert (await runner.options(key=next(iter(homes.keys() - moved), 99)).run(jobs.awhere)).index == 0
        assert not waiting.done()
        other_gate.open()
        with pytest.raises(TimeoutError, match=LATE):
            await call
        assert (await waiting).index == 1
        for key in moved:
            assert (await runner.options(key=key).run(jobs.awhere)).index == 1
        assert runner.statistics().restarts == 0


@unseen
async def test_in_time(make: MakeRunner) -> None:
    async with make(threads=2) as runner:
        view = runner.options(hard_timeout=60)
        large = [bytes(300_000)]
        for fn in (jobs.echo, jobs.aecho, jobs.later):
            assert [await call for call in (view.submit(fn, 1), view.submit(fn, large))] == [1, large]
            assert await view.run(fn, 1) == 1
            assert await view.map(fn, range(100)) == list(range(100))
            assert await view.broadcast(fn, 7) == [7]
            assert await runner.options(hard_timeout=60, queue_timeout=60, timeout=60).run(fn, 1) == 1
        assert runner.statistics().restarts == 0


async def test_it_is_attempted_again(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(kill_after=SOON) as runner:
        worker = worker_of(runner)
        view = runner.options(hard_timeout=SHORT, retries=1, retry_on=TimeoutError)
        with pytest.raises(TimeoutError, match=LATE):
            await view.run(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
        assert [line for line in log.rest() if line == "began"] == ["began"] * 2
        assert runner.statistics().retried == 1
        gate.open()
        await threads_ended(worker)


@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_a_cancelled_caller_leaves_the_limit_in_force(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(kill_after=SOON) as runner:
        worker, pid = worker_of(runner), (await runner.run(jobs.where)).pid
        call = runner.options(hard_timeout=SHORT).submit(jobs.wait, log.path, gate.path, "began")
        assert await log.next() == "began"
        innocent = runner.submit(jobs.await_, log.path, gate.path, "innocent")
        call.cancel()
        with pytest.raises(percore.WorkerDied):
            await innocent
        assert (await runner.run(jobs.where)).pid != pid
        gate.open()
        await threads_ended(worker)


@unseen
async def test_its_worker_dies_meanwhile(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(kill_after=60) as runner:
        dead = []
        for limit, error in ((60, percore.WorkerDied), (SHORT, TimeoutError)):
            call = runner.options(hard_timeout=limit).submit(jobs.wait, log.path, gate.path, 7)
            assert await log.next() == "7"
            await until(lambda limit=limit: limit != SHORT or _overruns(runner))
            dead.append(worker_of(runner))
            dead[-1].kill()
            with pytest.raises(error):
                await call
        assert await runner.run(jobs.aecho, 1) == 1
        statistics = runner.statistics()
        assert (statistics.restarts, statistics.running, statistics.queued) == (2, 0, 0)
        gate.open()
        for worker in dead:
            await threads_ended(worker)


async def test_closed_meanwhile(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    runner = make(kill_after=SOON)
    await runner.start()
    call = runner.options(hard_timeout=SHORT).submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
    assert await log.take(2) == ["began", "ignored"]
    await runner.aclose()
    with pytest.raises(TimeoutError):
        await call


@pytest.mark.parametrize("fn", [jobs.block_loop, jobs.hold_gil])
async def test_a_worker_that_cannot_answer(make_real: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make_real(kill_after=SOON) as runner:
        with pytest.raises(TimeoutError, match=LATE):
            await runner.options(hard_timeout=SHORT).run(fn, log.path, gate.path)
        assert await runner.run(jobs.aecho, 1) == 1
        assert runner.statistics().restarts == 1


async def test_bad_ones_are_refused(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for seconds in [0, -1, float("nan"), float("inf"), "1", True]:
            with subtests.test(seconds=seconds), pytest.raises((TypeError, ValueError), match="hard_timeout"):
                runner.options(hard_timeout=cast(Any, seconds))
