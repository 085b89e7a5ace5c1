"""A worker's death: whose calls end, with which words, and that nothing else notices."""

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import percore
from tests.e2e import death_calls as deadly
from tests.e2e import fault_calls as calls
from tests.e2e.deaths import HARD, died, ended, kill, pid_of, serves
from tests.faults import LIMIT, Program, Watch, Wire, figures
from tests.rows import repeats
from tests.waiting import until

pytestmark = [
    pytest.mark.warm_fork_server,
    pytest.mark.differs("uvloop", because="an exit reaches the loop through its callbacks of descriptors"),
]


# Where it dies


@pytest.mark.parametrize("place", ["call.marked", "call.running", "outcome.ready", "frame.written"])
@pytest.mark.parametrize("call", [calls.who, calls.who_in_thread], ids=["task", "thread"])
async def test_k3_a_death_before_publishing_ends_the_call(place: str, call: Any, points: Callable[[str], None]) -> None:
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


@pytest.mark.parametrize(
    ("plan", "outcome"),
    [
        ("bell.read=kill", "elsewhere"),
        ("call.marked=kill", "died"),
        ("call.running=kill", "died"),
        ("outcome.stored=kill", "died"),
        ("frame.written=kill@2", "died"),
        ("bell.rung=kill@2", "ok"),
    ],
)
@pytest.mark.asyncio_only
async def test_peers_1_no_future_waits_for_a_dead_worker(plan: str, outcome: str, points: Callable[[str], None]) -> None:
    points(f"worker.{plan}#0.1")
    async with percore.Runner(1) as runner:
        first = pid_of(runner)
        future = runner.submit(calls.pattern_in_task, 7, 200_000)
        if outcome == "died":
            assert (await died(future)).pid == first
        else:
            assert await ended(future) == calls.pattern(7, 200_000)
        assert (await ended(runner.submit(calls.who)))[1] == 2
        assert runner.statistics().failed == int(outcome == "died")


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["frame", "slot"])
@pytest.mark.parametrize("give", [deadly.give_half, deadly.give_half_in_task], ids=["thread", "task"])
async def test_k3_half_of_a_result_is_never_read(give: Any, size: int) -> None:
    async with percore.Runner(1) as runner:
        error = await died(runner.submit(give, size, signal.SIGKILL))
        assert (error.signal, error.started) == ("SIGKILL", True)
        assert await ended(runner.submit(calls.pattern, 7, size)) == calls.pattern(7, size)
        assert runner.statistics().failed == 1


@pytest.mark.parametrize("length", [0, 4, 12, -1], ids=["nothing", "half of the header", "half of the frame", "a whole frame"])
async def test_k3_what_lies_in_the_ring_and_was_not_rung_is_not_looked_for(length: int) -> None:
    async with percore.Runner(1) as runner:
        error = await died(runner.submit(deadly.die_in_a_frame, length))
        assert (error.exitcode, error.started) == (9, True)
        assert (await ended(runner.submit(calls.who)))[1] == 2


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["frame", "slot"])
async def test_k3_of_two_results_the_one_that_was_rung_is_delivered(size: int, points: Callable[[str], None]) -> None:
    # 1. the worker's third frame is the first call's result, and rung  2. it dies with the fourth frame in the ring, which is not
    # 3. the loop, which stood meanwhile, hears of both at once
    points("worker.frame.written=kill@4#0.1")
    async with percore.Runner(1) as runner:
        await ended(runner.submit(calls.pattern_in_task, 0, 10))
        with Watch([pid_of(runner)]) as worker:  # from before the calls: the loop may hear of the death in one turn
            futures = [runner.submit(calls.pattern_in_task, seed, size) for seed in (1, 2)]
            await asyncio.sleep(0)
            assert worker.wait_gone(LIMIT) == []
        assert await ended(futures[0]) == calls.pattern(1, size)
        assert (await died(futures[1])).started


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["frame", "slot"])
async def test_k4_a_published_result_is_delivered_although_its_worker_dies_next(size: int, points: Callable[[str], None]) -> None:
    # A coroutine, since its loop rings and dies before it could read the next call; a thread lets the loop go on meanwhile.
    points("worker.bell.rung=kill@2#0.1")
    async with percore.Runner(1) as runner:
        assert await ended(runner.submit(calls.pattern_in_task, 7, size)) == calls.pattern(7, size)
        assert (await ended(runner.submit(calls.who)))[1] == 2
        assert runner.statistics().failed == 0


async def test_k4_bell_and_death_in_one_turn_of_the_loop_deliver_the_result(points: Callable[[str], None]) -> None:
    points("worker.bell.rung=kill@2#0.1")
    for method in ("forkserver", "spawn"):
        async with percore.Runner(1, start_method=method) as runner:
            with Watch([pid_of(runner)]) as worker:
                future = runner.submit(calls.pattern, 7, 200_000)
                await asyncio.sleep(0)  # the call is sent
                assert worker.wait_gone(LIMIT) == []  # meanwhile this loop stands
            assert await ended(future) == calls.pattern(7, 200_000)


@pytest.mark.parametrize(
    ("action", "exitcode", "name"),
    [
        ("kill", -9, "SIGKILL"),
        ("segv", -11, "SIGSEGV"),
        ("abrt", -6, "SIGABRT"),
        ("bus", -7, "SIGBUS"),
        ("exit", 0, None),
        ("libcexit", 0, None),
    ],
)
@pytest.mark.asyncio_only
async def test_k2_every_death_is_named(action: str, exitcode: int, name: str | None, points: Callable[[str], None]) -> None:
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
        for words in (
            f"worker (pid {pid}) died by SIGKILL",
            "perhaps out of memory",
            "while it ran stay for",
            "runner.options(retries=1)",
        ):
            assert words in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("exiting", [calls.exit_with, calls.exit_with_in_thread, calls.exit_by_libc, deadly.exit_by_libc_in_task])
@pytest.mark.parametrize("code", [0, 3])
async def test_k12_a_call_that_exits_fails(exiting: Any, code: int) -> None:
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


async def test_a_death_while_the_result_is_pickled() -> None:
    async with percore.Runner(1) as runner:
        assert (await died(runner.submit(calls.give_unpicklable_death))).exitcode == 9
        await serves(runner)


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["frame", "slot"])
@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (deadly.take, deadly.DiesWhenDropped()),
        (deadly.take_in_task, deadly.DiesWhenDropped()),
        (deadly.give_death, None),
        (deadly.give_death_in_task, None),
    ],
    ids=["argument, thread", "argument, task", "result, thread", "result, task"],
)
async def test_k13_a_death_as_argument_or_result_goes_costs_no_result(call: Any, argument: Any, size: int) -> None:
    async with percore.Runner(1) as runner:
        pid = pid_of(runner)
        assert await ended(runner.submit(call, size, argument)) == calls.pattern(7, size)
        async with asyncio.timeout(LIMIT):
            await until(lambda: runner.statistics().restarts)
        assert runner.statistics().failed == 0
        await serves(runner)
        assert pid_of(runner) != pid


# Whose calls end


async def test_k2_unstarted_plain_calls_wait_for_the_replacement(wire: Wire) -> None:
    async with percore.Runner(1, threads=1) as runner:
        first = runner.submit(calls.stay_in_thread, wire.path)
        _, _, pid = await wire.worker()
        ahead = [runner.submit(calls.who_in_thread) for _ in range(20)]
        await asyncio.sleep(0)
        kill(pid)
        assert (await died(first)).started
        assert {(await ended(future))[1] for future in ahead} == {2}
        assert runner.statistics().failed == 1


async def test_k2_unstarted_coroutines_of_a_blocked_worker_wait_for_the_replacement(wire: Wire) -> None:
    async with percore.Runner(1, concurrency=3) as runner:
        first = runner.submit(calls.stay_blocking, wire.path)
        _, _, pid = await wire.worker()
        others = [runner.submit(calls.who) for _ in range(10)]
        await asyncio.sleep(0)
        kill(pid)
        assert (await died(first)).started
        assert {(await ended(future))[1] for future in others} == {2}


async def test_k2_large_arguments_of_unstarted_calls_arrive_in_the_replacement(wire: Wire) -> None:
    data = calls.pattern(3, 2_000_000)
    async with percore.Runner(1, threads=1) as runner:
        first = runner.submit(calls.stay_in_thread, wire.path)
        _, _, pid = await wire.worker()
        echoes = [runner.submit(bytes, data) for _ in range(3)]
        await asyncio.sleep(0)
        kill(pid)
        await died(first)
        assert [await ended(future) == data for future in echoes] == [True] * 3


async def test_k2_another_workers_calls_survive(wire: Wire, gate: Wire) -> None:
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


async def test_k2_many_coroutines_at_once_end_with_their_worker_alone(wire: Wire) -> None:
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


async def test_memory_that_a_dead_worker_could_write_is_not_used_again() -> None:
    async with percore.Runner(1) as runner:
        before = await runner.run(calls.writable_memory)
        assert before
        await died(runner.submit(calls.exit_with, 1))
        after = await runner.run(calls.writable_memory)
        assert after
        assert not before & after


async def test_c6_cancelled_calls_of_a_dead_worker_stay_cancelled(wire: Wire) -> None:
    async with percore.Runner(1) as runner:
        future = runner.submit(calls.stay_stubborn, wire.path)
        _, _, pid = await wire.worker()
        future.cancel()
        await asyncio.sleep(0)
        kill(pid)
        await serves(runner)
        assert future.cancelled()


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
        assert error.why.startswith("its channel broke")
        gate.give(1)
        assert await ended(survivor) == (index, 1, pid)
        assert [(await ended(runner.submit(calls.who)))[2] != bad for _ in range(10)] == [True] * 10
        assert pid_of(runner, index) == pid
    assert f"worker {1 - index} (pid {bad}) was killed: its channel broke" in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", *repeats("uvloop")])  # another test has both: how it reaches the end of the program
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
