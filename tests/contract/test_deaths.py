"""A worker's death costs its own started calls, and nothing else."""

import asyncio
import functools
import gc
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

import percore
from percore._protocol.interfaces import Exit, Fate
from percore._protocol.messages import RECALL
from tests import jobs
from tests.contract.conftest import MakeRunner, kill_arrived
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeRunner, FakeWorker
from tests.internals import current_member, nodes_of, supervisor_of
from tests.waiting import until

pytestmark = [
    pytest.mark.differs("uvloop", because="an exit and the last messages reach the loop in another order"),
    pytest.mark.differs("fallbacks", because="bells are pipes, and the workers' loop is asyncio's", on="fake"),
    pytest.mark.differs("nodes", because="an exit arrives as a message, with how far the calls had come"),
    pytest.mark.differs("threads", because="what had not begun is taken back from a worker that may run on"),
]


in_processes = pytest.mark.differs("fallbacks", because="an exit is seen by a thread, and memory lies in files")
spawned = pytest.mark.differs("spawn", because="the program itself reaps the worker, and reads its exit code")


def _worker(runner: percore.Runner, index: int = 0) -> Any:
    """The worker of a slot, as its engine gave it."""
    member = current_member(runner, index)
    assert member is not None
    return member.worker


@spawned
@in_processes
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_k2_a_started_call_gets_worker_died(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        pid = runner.statistics().workers[0].pid
        future = runner.submit(jobs.await_, log.path, gate.path, 1)
        await log.next()
        _worker(runner).kill()
        with pytest.raises(percore.WorkerDied) as caught:
            await future
    error = caught.value
    assert isinstance(error, BrokenProcessPool)
    assert (error.pid, error.exitcode, error.signal) == (pid, -9, "SIGKILL")
    assert (error.call, error.started, error.attempts) == ("await_", True, 1)
    assert error.age is not None
    assert 0 <= error.age < 60  # uvloop's time is that of the loop's turn
    assert error.node == (nodes_of(runner)[0] if nodes_of(runner) else None)
    where = "" if error.node is None else f" on node {error.node}"
    assert f"worker (pid {pid}{where}) died by SIGKILL (perhaps out of memory" in str(error)
    assert "while it ran await_" in str(error)


@in_processes
async def test_a_thread_that_ends_outside_a_call_costs_its_worker_and_leaves_nobody_waiting(make: MakeRunner) -> None:
    async with make(threads=1) as runner:
        with pytest.raises(percore.WorkerDied, match="with exit code 1"):
            await runner.run(jobs.fail_after_the_call)
        assert await runner.run(len, "ab") == 2


@spawned
@in_processes
async def test_k12_an_exit_code_is_told(make_real: MakeRunner) -> None:
    async with make_real() as runner:
        with pytest.raises(percore.WorkerDied, match="with exit code 3") as caught:
            await runner.run(jobs.die)
        assert (caught.value.exitcode, caught.value.signal) == (3, None)
        assert await runner.run(jobs.aecho, 1) == 1


async def test_k2_every_started_call_of_that_worker_fails_and_no_other(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=5) as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(10)]
        await log.take(10)
        _worker(runner).kill()
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        gate.open()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(result) for result in results].count(percore.WorkerDied) == 5
        assert [error.others for error in results if isinstance(error, percore.WorkerDied)] == [{"await_": 4}] * 5
        assert [type(result) for result in results].count(int) == 5


async def test_k2_calls_that_wait_here_wait_for_the_replacement(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1) as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(4)]
        assert await log.next() == "0"
        _worker(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await futures[0]
        gate.open()
        assert await asyncio.gather(*futures[1:]) == [1, 2, 3]


async def test_k2_calls_queued_ahead_wait_for_the_replacement(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        futures = [runner.submit(jobs.wait, log.path, gate.path, i) for i in range(4)]
        assert await log.next() == "0"
        await runner.run(jobs.aecho)  # all of them have been read there
        _worker(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await futures[0]
        gate.open()
        assert await asyncio.gather(*futures[1:]) == [1, 2, 3]
        assert sorted(line for line in log.rest() if not line.startswith("cancelled")) == ["1", "2", "3"]


async def test_k2_calls_queued_ahead_run_elsewhere(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, threads=1) as runner:
        futures = [runner.submit(jobs.wait, log.path, gate.path, i) for i in range(8)]
        await log.take(2)
        _worker(runner).kill()
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        gate.open()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(future.exception()) for future in done] == [percore.WorkerDied]
        assert sum(isinstance(result, int) for result in results) == 7


async def _stop_reading(runner: percore.Runner, log: Log, gate: Gate) -> "asyncio.Future[Any] | None":
    """Have worker 0 read nothing more: by a call that blocks its loop, where it has one of its own."""
    worker = _worker(runner)
    if isinstance(worker, FakeWorker):
        worker.pause()
        return None
    blocking = runner.submit(jobs.block_loop, log.path, gate.path)
    assert await log.next() == "blocked"
    return blocking


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_k2_calls_that_were_sent_and_not_read_run_on_the_replacement(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(concurrency=10, threads=2) as runner:
        blocking = await _stop_reading(runner, log, gate)
        futures = [runner.submit(fn, [i]) for i in range(6)]
        await asyncio.sleep(0)
        _worker(runner).kill()
        assert await asyncio.gather(*futures) == [[i] for i in range(6)]
        if blocking is not None:
            with pytest.raises(percore.WorkerDied):
                await blocking


@in_processes
async def test_k2_large_arguments_run_again_from_the_same_bytes(make: MakeRunner, log: Log, gate: Gate) -> None:
    data = jobs.pattern(1 << 20)
    async with make(concurrency=10) as runner:
        blocking = await _stop_reading(runner, log, gate)
        futures = [runner.submit(jobs.aecho, data) for _ in range(3)]
        await asyncio.sleep(0)
        _worker(runner).kill()
        assert await asyncio.gather(*futures) == [data] * 3
        if blocking is not None:
            await asyncio.wait([blocking])
            assert type(blocking.exception()) is percore.WorkerDied


@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_the_replacement_is_new(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
        before = await runner.run(jobs.where)
        future = runner.submit(jobs.await_, log.path, gate.path, 1)
        assert await log.take(2) == ["enter", "1"]
        _worker(runner).kill()
        await asyncio.wait([future])
        after = await runner.run(jobs.where)
        assert (after.index, after.generation) == (0, 2)
        assert after.pid != before.pid
        assert isinstance(future.exception(), percore.WorkerDied)
        assert "enter" in log.rest()
        assert runner.statistics().restarts == 1


@spawned
@in_processes
async def test_k1_a_worker_that_dies_idle_is_replaced(make: MakeRunner, log: Log) -> None:
    async with make(lifespan=functools.partial(jobs.resource, log.path)) as runner:
        assert await log.next() == "enter"
        for generation in range(1, 4):
            assert (await runner.run(jobs.where)).generation == generation
            _worker(runner).kill()
            while await log.next() != "enter":
                """A fake leaves its lifespan even then."""
        assert (await runner.run(jobs.where)).generation == 4
        assert runner.statistics().failed == 0


@in_processes
async def test_a_map_goes_on_over_a_death(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=2) as runner:
        repeated = [log.path] * 20, [gate.path] * 20
        task = asyncio.create_task(runner.map(jobs.await_, *repeated, range(20), return_exceptions=True).collect())
        assert await log.take(2) == ["0", "1"]
        worker = _worker(runner)
        worker.kill()
        await kill_arrived(worker)
        gate.open()
        results = await task
        assert [type(result) for result in results[:2]] == [percore.WorkerDied] * 2
        assert results[2:] == list(range(2, 20))


@spawned
@in_processes
async def test_k10_all_workers_may_die_at_once(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=1) as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(6)]
        await log.take(2)
        for index in range(2):
            _worker(runner, index).kill()
        await asyncio.wait(futures[:2])
        gate.open()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(result) for result in results] == [percore.WorkerDied] * 2 + [int] * 4


@spawned
@in_processes
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_k9_sigterm_drains(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1, lifespan=functools.partial(jobs.resource, log.path)) as runner:
        pid = (await runner.run(jobs.where)).pid
        coroutine = runner.submit(jobs.await_, log.path, gate.path, "task")
        plain = [runner.submit(jobs.wait, log.path, gate.path, f"plain {i}") for i in range(4)]
        assert sorted(await log.take(3)) == ["enter", "plain 0", "task"]
        _worker(runner).kill(signal.SIGTERM)
        assert await log.next() == "enter"  # the replacement
        assert (await runner.run(jobs.awhere)).pid != pid
        gate.open()
        assert await coroutine == "task"
        assert await asyncio.gather(*plain) == [f"plain {i}" for i in range(4)]
        assert runner.statistics().failed == 0
    assert log.rest().count("exit") == 2


async def test_k9_a_drained_worker_leaves_when_its_results_are_published(log: Log, gate: Gate) -> None:
    loop = asyncio.get_running_loop()
    async with FakeRunner(1) as runner:
        worker = _worker(runner)
        futures = [runner.submit(jobs.await_pattern, log.path, gate.path, 50_000) for _ in range(20)]  # more than a ring holds
        await log.take(20)
        worker.kill(signal.SIGTERM)
        await until(lambda: _worker(runner) is not worker)  # the replacement is there: it has been heard that this one drains
        bell = worker.channel._bell.fileno()
        loop.remove_reader(bell)  # the supervisor's loop is busy with something else
        gate.open()
        await until(lambda: not worker.core.server.own_tasks())
        for _ in range(20):
            await asyncio.sleep(0)
        assert worker.exitcode is None
        loop.add_reader(bell, worker.channel._on_bell)
        assert await asyncio.gather(*futures) == [jobs.pattern(50_000)] * 20


@in_processes
async def test_k9_sigterm_with_many_large_results(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real() as runner:
        futures = [runner.submit(jobs.await_pattern, log.path, gate.path, size) for size in [50_000, 200_000] * 50]
        await log.take(100)
        _worker(runner).kill(signal.SIGTERM)
        gate.open()
        assert [len(result) for result in await asyncio.gather(*futures)] == [50_000, 200_000] * 50


async def test_a_call_handed_back_to_a_broken_runner_ends(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        supervisor = supervisor_of(runner)
        running = runner.submit(jobs.wait, log.path, gate.path, 1)
        ahead = runner.submit(jobs.wait, log.path, gate.path, 2)
        assert await log.next() == "1"
        (member,) = supervisor.members
        supervisor.phase.fail(percore.RunnerBroken(10, 1))
        member.worker.channel.send(RECALL, 1, b"")
        with pytest.raises(percore.RunnerBroken):
            await ahead
        gate.open()
        assert await running == 1


async def test_a_repeated_call_that_nobody_will_run_tells_its_attempts(
    make: MakeRunner, log: Log, gate: Gate, tmp_path: Path
) -> None:
    failed = asyncio.Event()

    def has_failed(error: BaseException) -> bool:
        failed.set()
        return isinstance(error, OSError)

    runner = make(threads=1)
    await runner.start()
    repeated = runner.options(retries=1, retry_on=has_failed).submit(jobs.fail_first, str(tmp_path), 1, OSError, 0)
    holding = runner.submit(jobs.wait, log.path, gate.path, 1)
    await log.next()
    await failed.wait()  # its second attempt is behind the other call
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    _worker(runner).kill()
    await closing
    told = [repeated.exception(), holding.exception()]
    assert [(type(error), vars(error)["started"], vars(error)["attempts"]) for error in told] == [
        (percore.WorkerDied, False, 1),
        (percore.WorkerDied, True, 1),
    ]


@pytest.mark.parametrize("key", [None, lambda _: "key"], ids=["plain", "keyed"])
async def test_items_of_a_stream_that_nobody_will_run_hold_no_close_up(make: MakeRunner, log: Log, gate: Gate, key: Any) -> None:
    go_on, at_end = asyncio.Event(), asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        yield 0
        await go_on.wait()
        for number in range(1, 6):
            yield number
        at_end.set()

    runner = make()
    await runner.start()
    results = aiter(runner.map(jobs.aecho, numbers(), key=key))
    assert await anext(results) == 0
    blocking = await _stop_reading(runner, log, gate)
    go_on.set()
    await at_end.wait()  # the others are sent, and unread
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    _worker(runner).kill()
    # 1. items 1 to 5 have lost their worker  2. the end of item 1 fails the stream, which cancels those after it: they are nowhere.
    await asyncio.wait_for(closing, 10)
    with pytest.raises(percore.WorkerDied) as caught:
        await anext(results)
    assert (caught.value.started, caught.value.attempts) == (False, 0)
    if blocking is not None:
        assert isinstance(blocking.exception(), percore.WorkerDied)


@in_processes
async def test_x3_a_dropped_runner_ends_its_workers_and_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=1)
    await runner.start()
    supervisor, assembly = supervisor_of(runner), runner._assembly
    futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(3)]
    assert await log.next() == "0"
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del runner
        gc.collect()
    await asyncio.wait(futures)
    assert [type(future.exception()) for future in futures] == [percore.RunnerClosed] * 3
    assert not supervisor.members
    assert not any(slot.timer for slot in supervisor.slots)  # and none will come
    assert assembly is not None
    await assembly.engine.aclose()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the garbage collector's thread cannot be asked for it
async def test_x3_a_runner_that_another_thread_drops_is_ended_by_its_loop(make: MakeRunner, log: Log, gate: Gate) -> None:
    kept = [make()]
    await kept[0].start()
    supervisor, assembly, worker = supervisor_of(kept[0]), kept[0]._assembly, _worker(kept[0])
    future = kept[0].submit(jobs.await_, log.path, gate.path, 0)
    assert await log.next() == "0"
    kill, killers = worker.kill, []

    def spy(*_signal: int) -> None:
        killers.append(threading.current_thread())
        kill()

    worker.kill = spy
    await asyncio.to_thread(kept.clear)
    await asyncio.wait([future])
    assert isinstance(future.exception(), percore.RunnerClosed)
    assert killers == [threading.current_thread()]
    assert not supervisor.members
    assert assembly is not None
    await assembly.engine.aclose()


@spawned
@in_processes
async def test_sigint_does_nothing(make_real: MakeRunner) -> None:
    async with make_real() as runner:
        pid = (await runner.run(jobs.where)).pid
        _worker(runner).kill(signal.SIGINT)
        assert (await runner.run(jobs.where)).pid == pid
        assert (await runner.run(jobs.awhere)).pid == pid


def _lose_place(worker: Any) -> None:
    """End a worker as an engine does whose node has gone: nobody can tell which of its calls have begun."""
    worker.fate = lambda call_id: Fate(None)
    report = worker._on_exit
    worker._on_exit = lambda end: report(Exit(None, place_lost=True))
    worker.kill()


async def test_calls_whose_fate_nobody_can_tell_count_as_begun(log: Log, gate: Gate) -> None:
    async with FakeRunner(1, concurrency=1) as runner, asyncio.timeout(20):
        running, queued = (runner.submit(jobs.await_, log.path, gate.path, i) for i in range(2))
        batch = asyncio.ensure_future(runner.map(jobs.wait, [log.path] * 3, [gate.path] * 3, return_exceptions=True))
        await log.take(2)
        _lose_place(_worker(runner))
        await asyncio.wait([running, batch])
        for error in (running.exception(), *batch.result()):
            assert isinstance(error, percore.WorkerDied)
            assert (error.started, error.exitcode, error.age) == (True, None, None)
        gate.open()
        await asyncio.wait([queued])  # repeated if the supervisor still had it, or lost like the others


async def test_a_lost_place_is_no_failed_start() -> None:
    async with FakeRunner(1) as runner, asyncio.timeout(20):
        for generation in range(2, 14):  # after ten failed starts in a row the runner would be broken
            _lose_place(_worker(runner))
            await until(lambda wanted: runner.statistics().workers[0].generation == wanted, generation)
            await until(lambda: runner.statistics().workers[0].state == "ready")
        assert await runner.run(jobs.aecho, 1) == 1
