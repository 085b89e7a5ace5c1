"""Calls from inside a call, on every engine."""

import asyncio
import re

import pytest

import percore
from percore import RunnerClosed, WorkerDied
from tests import nested_jobs as jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.counts import times
from tests.fakes import FakeRunner
from tests.internals import keys_of, members_of, slots_used
from tests.waiting import until

pytestmark = [
    pytest.mark.differs("nodes", because="the pickles of nested calls are passed on"),
    pytest.mark.differs("threads", because="objects of nested calls are passed on as they are"),
]


async def test_calls_of_calls_of_calls_never_wait_for_themselves(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make(concurrency=1, threads=1) as runner:
        for fn in (jobs.adown, jobs.down, jobs.amixed, jobs.mixed):
            with subtests.test(fn=fn.__name__):
                assert await runner.run(fn, 50) == 50
        (member,) = members_of(runner)
        assert (member.load, member.families, member.calls) == ([0, 0, 0], {}, {})
        assert runner.statistics().done == 4 * 51


async def test_answers_of_every_kind(make: MakeRunner, subtests: pytest.Subtests) -> None:
    large = b"x" * 3_000_000
    async with make(2, concurrency=2, threads=2) as runner:
        for outer in (jobs.acall, jobs.call):
            for value in (1, [1, {"a": 2}], large, bytearray(large)):
                with subtests.test(outer=outer.__name__, kind=type(value).__name__):
                    assert await runner.run(outer, jobs.echo, value) == value
            with pytest.raises(ValueError, match="alas"):
                await runner.run(outer, jobs.fail, "alas")
        assert await runner.run(jobs.gathered, jobs.echo, 30) == list(range(30))
        assert await asyncio.gather(*(runner.run(jobs.down, 3) for _ in range(40))) == [3] * 40
        assert slots_used(runner) == 0


async def test_the_wrong_face_is_refused(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(RuntimeError, match="run_sync\\(\\) would block"):
            await runner.run(jobs.wrong_face)
        with pytest.raises(RuntimeError, match="are for coroutines"):
            await runner.run(jobs.other_wrong_face)
        with pytest.raises(RuntimeError, match=r"percore\.current_runner\(\) works only in a worker"):
            percore.current_runner()


async def test_a_key_that_a_caller_holds_is_refused(make: MakeRunner) -> None:
    async with make(2, per_key=1) as runner:
        with pytest.raises(ValueError, match="would wait for itself"):
            await runner.options(key="a").run(jobs.with_key, "a")
        assert await runner.options(key="a").run(jobs.with_key, "b") == "x"
        assert await runner.options(key="a").run(jobs.adown, 5) == 5


async def test_the_key_that_nested_calls_have_of_their_caller_is_forgotten_with_it(make: MakeRunner) -> None:
    async with make(2) as runner:
        keyed = runner.options(key="a")
        for _ in range(3):
            assert await keyed.run(jobs.adown, 5) == 5
            with pytest.raises(ValueError, match="alas"):
                await keyed.run(jobs.call, jobs.fail, "alas")
            assert keys_of(runner) == ["a"]
        left = keyed.submit(jobs.acall, jobs.for_ever)
        await until(lambda: len(keys_of(runner)) == 2)
        left.cancel()
        await until(lambda: keys_of(runner) == ["a"])


async def test_a_death_is_told_with_its_caller(make_real: MakeRunner) -> None:
    async with make_real(2) as runner:
        for number in range(50):  # until the caller and its call have different workers
            with pytest.raises(WorkerDied) as caught:
                await runner.options(key="caller").run(jobs.with_key, str(number), jobs.die)
            if caught.value.call == "die":
                break
        (note,) = caught.value.__notes__
        assert re.fullmatch(r"called by tests\.nested_jobs\.with_key in worker \d \(pid \d+\)", note)
        assert await runner.run(jobs.down, 3) == 3


async def test_calls_end_with_their_caller(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=1) as runner:
        assert await runner.run(jobs.leave, log.path, gate.path) == "left"
        assert await log.take(2) == ["begun", "cancelled"]
        future = runner.submit(jobs.acall, jobs.until_cancelled, log.path, gate.path)
        assert await log.take(1) == ["begun"]
        future.cancel()
        assert await log.take(1) == ["cancelled"]
        members = members_of(runner)
    assert [(member.load, member.families) for member in members] == [([0, 0, 0], {})] * 2


async def test_workers_that_retire_get_their_answers(make: MakeRunner) -> None:
    async with make(max_tasks_per_worker=1) as runner:
        assert await runner.run(jobs.adown, 3) == 3
        assert await runner.run(jobs.down, 2) == 2


async def test_context_variables_and_timeouts_go_on(make: MakeRunner) -> None:
    async with make(contextvars=[jobs.colour]) as runner:
        jobs.colour.set("green")
        assert await runner.run(jobs.acall, jobs.colour_of) == "green"
        assert await runner.run(jobs.paint, "red") == "red"
        for outer in (jobs.acall, jobs.call):
            with pytest.raises(TimeoutError):
                await runner.options(timeout=0.05).run(outer, jobs.for_ever)


async def test_a_timeout_reaches_the_nested_calls(log: Log) -> None:
    async with FakeRunner() as runner:  # a fake's call makes its nested call long before its time is over
        with pytest.raises(TimeoutError, match=r"^call_and_say ran for longer than timeout=0\.5 s$"):
            await runner.options(timeout=0.5).run(jobs.call_and_say, log.path, jobs.for_ever)
        assert await log.next() == "the call that waits for this one has run for longer than its timeout"


async def test_a_call_that_has_ended_before_its_first_nested_call_gets_no_answer(make: MakeRunner, log: Log, gate: Gate) -> None:
    """Its thread runs on: what it then waits for would keep the thread for ever."""
    async with make(threads=2) as runner:
        call = runner.submit(jobs.late_call_and_say, log.path, gate.path, jobs.for_ever)
        late = runner.options(timeout=0.05).submit(jobs.late_call_and_say, log.path, gate.path, jobs.for_ever)
        assert await log.take(2) == ["begun"] * 2
        call.cancel()
        with pytest.raises(TimeoutError):
            await late
        await runner.run(jobs.adown, 0)  # by then the worker has read the cancellation
        gate.open()
        async with asyncio.timeout(20):
            assert sorted(await log.take(2)) == ["CancelledError", "TimeoutError"]
            await until(lambda: not any(member.calls for member in members_of(runner)))


async def test_a_refused_call_costs_its_caller_no_place(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1) as runner:
        caller = runner.options(key="k").submit(jobs.refused_then_waits, log.path, gate.path)
        assert await log.take(1) == ["refused"]
        other = runner.submit(jobs.aheld, log.path, gate.path, "y")
        assert "waits for a worker" in repr(other)
        gate.open()
        await caller
        assert await other == "y"
        (member,) = members_of(runner)
        assert (member.load, member.families) == ([0, 0, 0], {})


async def test_a_closing_runner_waits_for_nested_calls(make: MakeRunner) -> None:
    async with make(concurrency=1, threads=1) as runner:
        future = runner.submit(jobs.adown, 20)
    assert await future == 20


@pytest.mark.long
async def test_many_callers_at_once(make: MakeRunner, subtests: pytest.Subtests) -> None:
    """More than ever step aside at once: then nested calls go first."""
    async with make(2, concurrency=2, threads=1) as runner:
        for fn in (jobs.adown, jobs.down, jobs.amixed, jobs.mixed):
            with subtests.test(fn=fn.__name__):
                count = times(60, 150)
                assert await runner.map(fn, [2] * count) == [2] * count
        members = members_of(runner)
        assert [(member.load, member.families, member.calls) for member in members] == [([0, 0, 0], {}, {})] * 2


async def test_a_close_cuts_callers_and_their_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, concurrency=1)
    async with runner:
        futures = [runner.submit(jobs.acall, jobs.until_cancelled, log.path, gate.path) for _ in range(5)]
        assert await log.take(1) == ["begun"]
        await runner.aclose(grace=0)
    assert {type(error) for error in await asyncio.gather(*futures, return_exceptions=True)} == {RunnerClosed}


async def test_calls_of_a_dead_caller_end(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(2, concurrency=1) as runner:
        future = runner.options(retries=1).submit(jobs.acall, jobs.until_cancelled, log.path, gate.path)
        assert await log.take(1) == ["begun"]
        (caller,) = (member for member in members_of(runner) if member.families)
        caller.worker.kill()
        while await log.take(1) != ["begun"]:  # of the next attempt; the call that has lost its caller is cancelled, or died along
            pass
        gate.open()
        await future
        assert all(member.load == [0, 0, 0] for member in members_of(runner))
