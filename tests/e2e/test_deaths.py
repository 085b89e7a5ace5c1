"""A worker's death: whose calls end, with which words, and that nothing else notices."""

import asyncio
import contextlib
import logging
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore._core import restart
from tests.e2e import fault_calls as calls
from tests.faults import LIMIT, Program, Watch, Wire, count_lines, figures, wait_stopped

HARD = 2.0
"""Seconds within which a death must have ended its calls."""


@pytest.fixture(autouse=True)
def no_core_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path / "wire")
    yield wire
    wire.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Wire]:
    gate = Wire(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plan what workers do at their points; those of runners that are started afterwards."""
    return partial(monkeypatch.setenv, "PERCORE_POINTS")


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
        while any((worker.generation, worker.state) != (generation, "ready") for worker in runner.statistics().workers):
            await runner.run(calls.accept)


# Where it dies


@pytest.mark.parametrize("place", ["call.marked", "call.running", "outcome.ready", "frame.written"])
@pytest.mark.parametrize("call", [calls.who, calls.who_in_thread], ids=["task", "thread"])
async def test_a_death_before_publishing_ends_the_call(place: str, call: Any, points: Callable[[str], None]) -> None:
    nth = 2 if place == "frame.written" else 1  # the first frame says that the worker is ready
    points(f"worker.{place}=kill@{nth}#0.1")
    async with percore.Runner(1) as runner:
        first = pid_of(runner)
        error = await died(runner.submit(call))
        assert (error.pid, error.signal, error.started) == (first, "SIGKILL", True)
        index, generation, pid = await ended(runner.submit(call))
        assert (index, generation) == (0, 2)
        assert pid not in (first, os.getpid())
        assert runner.statistics().restarts == 1


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["frame", "slot"])
async def test_a_published_result_is_delivered_although_its_worker_dies_next(size: int, points: Callable[[str], None]) -> None:
    # A coroutine, since its loop rings and dies before it could read the next call; a thread lets the loop go on meanwhile.
    points("worker.bell.rung=kill@2#0.1")
    async with percore.Runner(1) as runner:
        assert await ended(runner.submit(calls.pattern_in_task, 7, size)) == calls.pattern(7, size)
        assert (await ended(runner.submit(calls.who)))[1] == 2
        assert runner.statistics().failed == 0


async def test_bell_and_death_in_one_turn_of_the_loop_deliver_the_result(points: Callable[[str], None]) -> None:
    points("worker.bell.rung=kill@2#0.1")
    for method in ("forkserver", "spawn"):
        async with percore.Runner(1, start_method=method) as runner:
            future = runner.submit(calls.pattern, 7, 200_000)
            await asyncio.sleep(0)  # the call is sent
            with Watch([pid_of(runner)]) as worker:
                assert worker.wait_gone(LIMIT) == []  # meanwhile this loop stands
            assert await ended(future) == calls.pattern(7, 200_000)


@pytest.mark.parametrize(
    ("action", "exitcode", "name"),
    [("kill", -9, "SIGKILL"), ("segv", -11, "SIGSEGV"), ("abrt", -6, "SIGABRT"), ("bus", -7, "SIGBUS"), ("exit", 0, None)],
)
@pytest.mark.asyncio_only
async def test_every_death_is_named(action: str, exitcode: int, name: str | None, points: Callable[[str], None]) -> None:
    points(f"worker.call.running={action}#0.1")
    async with percore.Runner(1) as runner:
        error = await died(runner.submit(calls.who))
        assert (error.exitcode, error.signal) == (exitcode, name)
        assert (name or "exit code 0") in str(error)


async def test_the_error_tells_everything_and_can_be_pickled(wire: Wire) -> None:
    async with percore.Runner(1) as runner:
        future = runner.submit(calls.stay, wire.path)
        _, _, pid = await wire.worker()
        kill(pid)
        error = await died(future)
        assert (error.pid, error.exitcode, error.signal) == (pid, -9, "SIGKILL")
        assert (error.call, error.started, error.attempts) == ("stay", True, 1)
        assert error.age is not None
        assert 0 < error.age < LIMIT
        for words in (f"worker {pid} died by SIGKILL", "perhaps out of memory", "while it ran stay for", "call again, or give it"):
            assert words in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("exiting", [calls.exit_with, calls.exit_with_in_thread, calls.exit_by_libc])
@pytest.mark.parametrize("code", [0, 3])
async def test_a_call_that_exits_fails(exiting: Any, code: int) -> None:
    async with percore.Runner(1) as runner:
        error = await died(runner.submit(exiting, code))
        assert (error.exitcode, error.signal, error.call) == (code, None, exiting.__qualname__)
        assert f"with exit code {code}" in str(error)
        await serves(runner)


async def test_a_death_while_arguments_are_unpickled_counts_as_begun(wire: Wire) -> None:
    async with percore.Runner(1) as runner:
        error = await died(runner.submit(calls.accept, calls.DiesWhenLoaded(wire.path)))
        assert (error.started, error.exitcode) == (True, 9)
        assert (await wire.worker())[1] == 1
        await serves(runner)


async def test_a_death_while_the_result_is_pickled_and_one_after_it_was_sent() -> None:
    async with percore.Runner(1) as runner:
        assert (await died(runner.submit(calls.give_unpicklable_death))).exitcode == 9
        assert await ended(runner.submit(calls.give_death_later)) == 42
        await serves(runner)


# Whose calls end


async def test_unstarted_plain_calls_wait_for_the_replacement(wire: Wire) -> None:
    async with percore.Runner(1, threads=1) as runner:
        first = runner.submit(calls.stay_in_thread, wire.path)
        _, _, pid = await wire.worker()
        ahead = [runner.submit(calls.who_in_thread) for _ in range(20)]
        await asyncio.sleep(0)
        kill(pid)
        assert (await died(first)).started
        assert {(await ended(future))[1] for future in ahead} == {2}
        assert runner.statistics().failed == 1


async def test_unstarted_coroutines_of_a_blocked_worker_wait_for_the_replacement(wire: Wire) -> None:
    async with percore.Runner(1, concurrency=3) as runner:
        first = runner.submit(calls.stay_blocking, wire.path)
        _, _, pid = await wire.worker()
        others = [runner.submit(calls.who) for _ in range(10)]
        await asyncio.sleep(0)
        kill(pid)
        assert (await died(first)).started
        assert {(await ended(future))[1] for future in others} == {2}


async def test_large_arguments_of_unstarted_calls_arrive_in_the_replacement(wire: Wire) -> None:
    data = calls.pattern(3, 2_000_000)
    async with percore.Runner(1, threads=1) as runner:
        first = runner.submit(calls.stay_in_thread, wire.path)
        _, _, pid = await wire.worker()
        echoes = [runner.submit(bytes, data) for _ in range(3)]
        await asyncio.sleep(0)
        kill(pid)
        await died(first)
        assert [await ended(future) == data for future in echoes] == [True] * 3


async def test_another_workers_calls_survive(wire: Wire, gate: Wire) -> None:
    async with percore.Runner(2, threads=1) as runner:
        held = {}
        for _ in range(2):
            future = runner.submit(calls.hold, wire.path, gate.path)
            held[(await wire.worker())[0]] = future
        ahead = [runner.submit(calls.who_in_thread) for _ in range(8)]
        coroutine = runner.submit(calls.hold_in_task, wire.path, gate.path)
        busy, _, _ = await wire.worker()
        survivor = pid_of(runner, busy)
        await asyncio.sleep(0)
        kill(pid_of(runner, 1 - busy))
        await died(held[1 - busy])
        gate.give(2)
        assert await ended(held[busy]) == await ended(coroutine) == (busy, 1, survivor)
        places = {(await ended(future))[:2] for future in ahead}
        assert places <= {(busy, 1), (1 - busy, 2)}
        assert pid_of(runner, busy) == survivor


async def test_many_coroutines_at_once_end_with_their_worker_alone(wire: Wire) -> None:
    async with percore.Runner(2) as runner:
        futures = [runner.submit(calls.stay, wire.path) for _ in range(64)]
        told = [await wire.worker() for _ in futures]
        victims = sum(index == 0 for index, _, _ in told)
        kill(pid_of(runner, 0))
        await asyncio.wait(futures, timeout=HARD, return_when=asyncio.FIRST_EXCEPTION)
        await serves(runner)
        done = {future for future in futures if future.done()}
        assert len(done) == victims
        assert all(isinstance(future.exception(), percore.WorkerDied) for future in done)
        for future in futures:
            future.cancel()


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_call_that_kills_another_worker(victim: int, wire: Wire) -> None:
    async with percore.Runner(2) as runner:
        futures = {}
        for _ in range(2):
            future = runner.submit(calls.stay, wire.path)
            futures[(await wire.worker())[0]] = future
        killing = runner.submit(calls.kill_other, pid_of(runner, victim))
        await died(futures[victim])
        with contextlib.suppress(percore.WorkerDied):  # it may have run in the very worker
            await ended(killing)
        assert not futures[1 - victim].done()
        await serves(runner)
        futures[1 - victim].cancel()


async def test_all_workers_at_once_and_again_is_no_reason_to_give_up() -> None:
    async with percore.Runner(2) as runner:
        for turn in range(4):
            for index in (0, 1):
                kill(pid_of(runner, index))
            await all_ready(runner, turn + 2)
        await serves(runner)
        assert runner.statistics().restarts == 8


async def test_a_dead_worker_that_left_a_child_is_dead(wire: Wire) -> None:
    async with percore.Runner(1) as runner:
        future = runner.submit(calls.fork_and_die, wire.path)
        child = int((await wire.line()).split()[3])
        with Watch([child]) as left:
            assert (await died(future)).exitcode == 7
            await serves(runner)
            await asyncio.wait_for(runner.aclose(), LIMIT)
            assert left.wait_gone(0) == [child]
            left.kill()
            assert left.wait_gone(HARD) == []


async def test_memory_that_a_dead_worker_could_write_is_not_used_again() -> None:
    async with percore.Runner(1) as runner:
        before = await runner.run(calls.writable_memory)
        assert before
        await died(runner.submit(calls.exit_with, 1))
        after = await runner.run(calls.writable_memory)
        assert after
        assert not before & after


async def test_cancelled_calls_of_a_dead_worker_stay_cancelled(wire: Wire) -> None:
    async with percore.Runner(1) as runner:
        future = runner.submit(calls.stay_stubborn, wire.path)
        _, _, pid = await wire.worker()
        future.cancel()
        await asyncio.sleep(0)
        kill(pid)
        await serves(runner)
        assert future.cancelled()


async def test_a_stopped_worker_that_is_killed_fails_its_calls(wire: Wire) -> None:
    async with percore.Runner(2) as runner:
        future = runner.submit(calls.stay, wire.path)
        _, _, pid = await wire.worker()
        kill(pid, signal.SIGSTOP)
        wait_stopped(pid)
        for _ in range(3):  # turns of the loop: what it said before it was stopped is heard
            await asyncio.sleep(0)
        # Some of three are given to it, unless it counts as silent already. Once it does, it gets nothing more.
        some = [runner.submit(calls.accept) for _ in range(3)]
        (stopped,) = (member for member in runner._supervisor.members if member.pid == pid)
        (other,) = (member for member in runner._supervisor.members if member is not stopped)
        while not stopped.silence():  # noqa: ASYNC110  # only the clock changes it
            await asyncio.sleep(0)
        for _ in range(10):
            while other.worker.channel.tx.is_unread():  # noqa: ASYNC110  # on a loaded machine it may be as silent for a moment
                await asyncio.sleep(0)
            assert await ended(runner.submit(calls.accept)) == 0
        kill(pid)
        assert (await died(future)).signal == "SIGKILL"
        assert [await ended(call) for call in some] == [0, 0, 0]


async def test_a_stopped_worker_goes_on_when_it_is_continued(wire: Wire, gate: Wire) -> None:
    async with percore.Runner(1) as runner:
        future = runner.submit(calls.hold, wire.path, gate.path)
        _, _, pid = await wire.worker()
        kill(pid, signal.SIGSTOP)
        wait_stopped(pid)
        other = runner.submit(calls.who)
        gate.give(1)
        await asyncio.sleep(0)
        kill(pid, signal.SIGCONT)
        assert await ended(future) == await ended(other) == (0, 1, pid)


async def test_sigterm_drains_a_worker_and_nothing_fails(wire: Wire, gate: Wire) -> None:
    async with percore.Runner(1, threads=1) as runner:
        held = runner.submit(calls.hold, wire.path, gate.path)
        task = runner.submit(calls.hold_in_task, wire.path, gate.path)
        _, _, pid = await wire.worker()
        await wire.worker()
        ahead = [runner.submit(calls.who_in_thread) for _ in range(10)]
        await asyncio.sleep(0)
        kill(pid, signal.SIGTERM)
        assert {(await ended(future))[1] for future in ahead} == {2}
        gate.give(2)
        assert await ended(held) == await ended(task) == (0, 1, pid)
        assert runner.statistics().failed == 0


# Broken channels


@pytest.mark.asyncio_only
@pytest.mark.parametrize("how", calls.MISDEEDS)
async def test_a_bad_frame_kills_that_worker_and_nothing_else(
    how: str, wire: Wire, gate: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    async with percore.Runner(2, threads=1) as runner:
        survivor = runner.submit(calls.hold, wire.path, gate.path)
        index, _, pid = await wire.worker()
        bad = pid_of(runner, 1 - index)
        error = await died(runner.submit(calls.misbehave, how))
        assert (error.pid, error.signal) == (bad, "SIGKILL")
        gate.give(1)
        assert await ended(survivor) == (index, 1, pid)
        assert [(await ended(runner.submit(calls.who)))[2] != bad for _ in range(10)] == [True] * 10
        assert pid_of(runner, index) == pid
    assert f"worker {1 - index} (pid {bad}) is killed: its channel broke" in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("points", "call", "outcome"),
    [
        # The first two rings say that the workers are ready, the third that the call has been read, and is heard once it has begun.
        ("supervisor.bell.read=interrupt@3", "stays", ["interrupted", "WorkerDied", "1 survived"]),
        ("supervisor.outcome.delivered=interrupt", "ends", ["interrupted", "NoneType", "1 survived"]),
        # One worker, whose last words are read when it is dead already.
        ("worker.bell.rung=kill@2#0.1,supervisor.bell.read=interrupt@2", "unheard", ["interrupted", "WorkerDied", "0 survived"]),
    ],
)
def test_an_interrupt_within_a_callback_breaks_that_channel_alone(
    loop: str, points: str, call: str, outcome: list[str], tmp_path: Path, wire: Wire
) -> None:
    with Program("interrupted_callback", loop, call, wire.path, stderr=tmp_path / "stderr", points=points) as program:
        assert program.told("outcome") == outcome
        assert program.end() == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_interrupt_within_a_callback_ends_the_program_in_order(loop: str, tmp_path: Path) -> None:
    with Program("interrupted_program", loop, stderr=tmp_path / "stderr", points="supervisor.bell.read=interrupt@3") as program:
        program.expect("started")
        with Watch(program.descendants()) as everybody:
            assert program.end() == -signal.SIGINT
            assert everybody.wait_gone(HARD) == []
        assert program.stderr.rstrip().endswith("KeyboardInterrupt")


# Starting, and starting again


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_a_first_start_that_dies_fails_and_is_never_retried(workers: int, method: Any, tmp_path: Path) -> None:
    births = tmp_path / "births"
    runner = percore.Runner(workers, lifespan=partial(calls.dying_if, str(tmp_path), str(births), workers - 1), start_method=method)
    with pytest.raises(percore.StartupFailed, match=f"worker {workers - 1} died with exit code 5 before it was ready"):
        await asyncio.wait_for(runner.start(), LIMIT)
    assert 1 <= count_lines(births) <= workers
    with pytest.raises(percore.RunnerClosed):
        await runner.run(calls.who)


@pytest.mark.parametrize("place", ["forked", "lifespan.entered"])
async def test_a_first_start_that_is_killed_fails(place: str, points: Callable[[str], None]) -> None:
    points(f"worker.{place}=kill")
    with pytest.raises(percore.StartupFailed, match="died by SIGKILL"):
        await asyncio.wait_for(percore.Runner(2).start(), LIMIT)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_a_worker_that_dies_in_the_moment_it_is_ready_is_replaced(method: Any, points: Callable[[str], None]) -> None:
    # The loop stands until the worker is dead, so it hears of readiness and death at once.
    points("worker.ready=kill#0.1")
    runner = percore.Runner(1, start_method=method)
    starting = asyncio.create_task(runner.start())
    await asyncio.sleep(0)
    while (pid := runner._supervisor.slots[0].current.pid if runner._supervisor.slots[0].current else 0) is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if pid:
        with Watch([pid]) as worker:
            assert worker.wait_gone(LIMIT) == []
    try:
        await asyncio.wait_for(starting, LIMIT)
    except percore.StartupFailed:
        return  # as right as the other: a death in the first start
    assert (await ended(runner.submit(calls.who)))[1] == 2
    await asyncio.wait_for(runner.aclose(), LIMIT)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_a_first_start_that_hangs_fails_after_start_timeout(method: Any, tmp_path: Path) -> None:
    births = tmp_path / "births"
    runner = percore.Runner(
        2, lifespan=partial(calls.hanging_if, str(tmp_path), str(births)), start_timeout=0.7, start_method=method
    )
    began = time.monotonic()
    with pytest.raises(percore.StartupFailed, match=r"start_timeout=0\.7 seconds"):
        await asyncio.wait_for(runner.start(), LIMIT)
    assert 0.7 <= time.monotonic() - began < 0.7 + HARD
    assert count_lines(births) <= 2  # a loaded machine may not even get there in time


@pytest.mark.asyncio_only
async def test_a_replacement_that_hangs_is_killed_and_replaced(tmp_path: Path, wire: Wire) -> None:
    flag, births = tmp_path / "flag", wire
    lifespan = partial(calls.hanging_if, str(flag), births.path)
    # The first runner is there for the fork server, which takes longest to come up.
    async with percore.Runner(1), percore.Runner(1, lifespan=lifespan, start_timeout=2.0) as runner:
        await births.line()
        flag.touch()
        await died(runner.submit(calls.exit_with, 1))
        waiting = runner.submit(calls.who)
        _, hanging, _ = await births.worker()
        flag.unlink()
        assert (await ended(waiting))[1] > hanging > 1


async def test_a_death_of_the_replacement_before_it_is_ready_costs_nothing(points: Callable[[str], None]) -> None:
    points("worker.call.running=kill#0.1,worker.lifespan.entered=kill#0.2,worker.ready=kill#0.3")
    async with percore.Runner(1) as runner:
        await died(runner.submit(calls.who))
        assert (await ended(runner.submit(calls.who)))[1] == 4


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off in milliseconds."""
    monkeypatch.setattr(restart, "_FIRST_DELAY", 0.0001)


@pytest.mark.usefixtures("impatient")
async def test_ten_deaths_in_a_row_break_the_runner(tmp_path: Path) -> None:
    flag, births = tmp_path / "flag", tmp_path / "births"
    async with percore.Runner(1, lifespan=partial(calls.dying_if, str(flag), str(births)), concurrency=2) as runner:
        await ended(runner.submit(calls.who))
        flag.touch()
        await died(runner.submit(calls.exit_with, 1))
        pending = [runner.submit(fn) for fn in (calls.who, calls.who_in_thread) * 4]
        mapped = asyncio.ensure_future(runner.map(calls.accept, range(100)).collect())
        for future in pending:
            with pytest.raises(percore.RunnerBroken, match="died 10 times in a row") as caught:
                await ended(future)
            assert (caught.value.deaths, caught.value.exitcode) == (10, 5)
        with pytest.raises(percore.RunnerBroken):
            await ended(mapped)
        with pytest.raises(percore.RunnerBroken):
            _ = runner.submit(calls.who)
        with pytest.raises(percore.RunnerBroken):
            await runner.run(calls.who)
        assert [worker.state for worker in runner.statistics().workers] == ["failed"]
        assert count_lines(births) == 11
        await asyncio.wait_for(runner.aclose(), HARD)


@pytest.mark.usefixtures("impatient")
async def test_one_slot_that_fails_is_given_up_and_the_runner_goes_on(
    tmp_path: Path, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    flag, births = tmp_path / "flag", wire
    async with percore.Runner(2, lifespan=partial(calls.dying_if, str(flag), births.path, 1)) as runner:
        await births.lines(2)
        flag.touch()
        healthy = pid_of(runner, 0)
        kill(pid_of(runner, 1))
        for _ in range(9):  # the kill was the first death of ten
            assert (await births.worker())[0] == 1
        while runner.statistics().workers[1].state != "failed":
            assert await ended(runner.submit(calls.who)) == (0, 1, healthy)
        await serves(runner)
        assert [worker.state for worker in runner.statistics().workers] == ["ready", "failed"]
    assert "the runner goes on without it" in caplog.text


@pytest.mark.usefixtures("impatient")
async def test_deaths_after_a_call_began_never_add_up() -> None:
    async with percore.Runner(1) as runner:
        for _ in range(restart.LIMIT + 2):
            await died(runner.submit(calls.exit_with, 1), LIMIT)
        await serves(runner)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_sigchld_ignored_never_makes_a_death_look_clean(method: Any) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        async with percore.Runner(1, start_method=method) as runner:
            assert (await died(runner.submit(calls.exit_with, 3))).exitcode in (3, None)
            await serves(runner)  # a new interpreter takes its time to come up
            assert (await died(runner.submit(calls.kill_self, signal.SIGKILL))).exitcode in (-9, None)
            await serves(runner)
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_a_stolen_child_never_looks_clean(wire: Wire) -> None:
    async with percore.Runner(1, start_method="spawn") as runner:
        future = runner.submit(calls.stay, wire.path)
        _, _, pid = await wire.worker()
        kill(pid)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9  # noqa: ASYNC222  # the thief, faster than the loop
        assert (await died(future)).exitcode in (-9, None)
        await serves(runner)


# Closing


@pytest.mark.parametrize("stay", [calls.stay_stubborn, calls.stay_in_thread, calls.stay_blocking, calls.stay_in_c])
async def test_what_ignores_cancellation_is_killed_after_kill_after(stay: Any, wire: Wire) -> None:
    runner = percore.Runner(2, kill_after=0.3)
    await runner.start()
    future = runner.submit(stay, wire.path)
    await wire.worker()
    began = time.monotonic()
    await asyncio.wait_for(runner.aclose(grace=0.1), LIMIT)
    assert 0.4 <= time.monotonic() - began < 0.4 + HARD
    with pytest.raises(percore.RunnerClosed):
        future.result()


async def test_a_stopped_worker_does_not_hold_up_close(wire: Wire) -> None:
    runner = percore.Runner(2, kill_after=0.3)
    await runner.start()
    future = runner.submit(calls.stay, wire.path)
    _, _, pid = await wire.worker()
    kill(pid, signal.SIGSTOP)
    wait_stopped(pid)
    await asyncio.wait_for(runner.aclose(grace=0), HARD)
    assert isinstance(future.exception(), percore.RunnerClosed)


async def test_a_lifespan_that_hangs_at_the_end_is_killed_and_loses_no_result(wire: Wire) -> None:
    began = time.monotonic()
    async with percore.Runner(2, lifespan=partial(calls.hanging_at_the_end, wire.path), kill_after=0.3) as runner:
        future = runner.submit(calls.pattern, 1, 1_000_000)
        await ended(future)
        began = time.monotonic()
    assert time.monotonic() - began < 0.3 + HARD
    assert future.result() == calls.pattern(1, 1_000_000)


async def test_a_lifespan_that_dies_at_the_end_fails_nothing() -> None:
    async with percore.Runner(2, lifespan=calls.dying_at_the_end) as runner:
        future = runner.submit(calls.pattern, 1, 1_000_000)
    assert future.result() == calls.pattern(1, 1_000_000)


async def test_a_death_during_close_ends_every_future_and_starts_nobody(wire: Wire) -> None:
    for workers in (1, 2):
        runner = percore.Runner(workers, threads=1, concurrency=1)
        await runner.start()
        tasks = [runner.submit(calls.stay, wire.path) for _ in range(workers)]
        threads = [runner.submit(calls.stay_in_thread, wire.path) for _ in range(workers)]
        pids = {(await wire.worker())[2] for _ in range(2 * workers)}
        waiting: list[asyncio.Future[Any]] = [runner.submit(fn) for fn in (calls.who, calls.who_in_thread) for _ in range(12)]
        closing = asyncio.create_task(runner.aclose())
        await asyncio.sleep(0)
        for pid in pids:
            kill(pid)
        await asyncio.wait_for(closing, HARD + LIMIT)
        began: list[asyncio.Future[Any]] = [*tasks, *threads]
        assert all(future.done() for future in began + waiting)
        for future in began:
            assert isinstance(future.exception(), percore.WorkerDied)
        for future in waiting:
            error = future.exception()
            assert isinstance(error, percore.RunnerClosed) or (isinstance(error, percore.WorkerDied) and not error.started)


async def test_the_calls_of_one_that_dies_during_close_run_elsewhere(wire: Wire, gate: Wire) -> None:
    runner = percore.Runner(2, threads=1)
    await runner.start()
    held = {}
    for _ in range(2):
        future = runner.submit(calls.hold, wire.path, gate.path)
        held[(await wire.worker())[0]] = future
    ahead = [runner.submit(calls.who_in_thread) for _ in range(8)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    kill(pid_of(runner, 0))
    assert (await died(held[0])).started
    gate.give(1)
    assert {(await ended(future))[:2] for future in [held[1], *ahead]} == {(1, 1)}
    await asyncio.wait_for(closing, LIMIT)


async def test_a_cancelled_close_kills_at_once(wire: Wire) -> None:
    runner = percore.Runner(2, kill_after=60)
    await runner.start()
    futures = [runner.submit(calls.stay_stubborn, wire.path)]
    await wire.worker()
    futures += [runner.submit(calls.stay_stubborn, "/dev/null") for _ in range(300)]  # more than there are places
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(closing, HARD)
    assert {type(future.exception()) for future in futures} == {percore.RunnerClosed}


# How fast


@pytest.mark.asyncio_only
async def test_detection(wire: Wire, capfd: pytest.CaptureFixture[str]) -> None:
    took = []
    logging.getLogger("percore").setLevel(logging.ERROR)
    try:
        async with percore.Runner(2) as runner:
            for _ in range(30):
                future = runner.submit(calls.stay, wire.path)
                _, _, pid = await wire.worker()
                began = time.perf_counter()
                kill(pid)
                await died(future)
                took.append(time.perf_counter() - began)
    finally:
        logging.getLogger("percore").setLevel(logging.NOTSET)
    assert max(took) < HARD
    with capfd.disabled():
        os.write(1, f"\n{figures('death to failed future', took)}\n".encode())


async def test_a_worker_that_its_fork_server_could_not_tell_of_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, wire: Wire
) -> None:
    # 1. the fork server forks, and stops  2. the worker is ready, and runs a call  3. the fork server dies, and so does the worker:
    # who is made from the same request would find that call in its memory, and run it again.
    monkeypatch.setenv("PERCORE_POINTS", "forkserver.forked=stop")
    runner = percore.Runner(1, start_method="forkserver")
    await runner.start()
    monkeypatch.delenv("PERCORE_POINTS")
    future = runner.submit(calls.stay, wire.path)
    index, generation, pid = (await wire.line()).split()
    assert (index, generation) == ("0", "1")
    os.kill(int(pid), signal.SIGSTOP)
    wait_stopped(int(pid))
    (server,) = [child for child in psutil.Process().children() if child.status() == psutil.STATUS_STOPPED]
    unheard = [runner.submit(calls.who) for _ in range(3)]
    await asyncio.sleep(0)  # they are sent
    server.kill()
    with pytest.raises(percore.WorkerDied) as caught:
        await future
    assert caught.value.started
    assert caught.value.pid == int(pid)  # not that of another one, with the same memory
    assert [(await call)[1] for call in unheard] == [2, 2, 2]
    again = runner.submit(calls.stay, wire.path)
    assert (await wire.line()).split()[:2] == ["0", "2"]  # nobody else has told anything
    again.cancel()
    await runner.aclose()
