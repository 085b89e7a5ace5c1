"""Workers that die while they start or end: what is started again, how often, and that closing comes to its end."""

import asyncio
import multiprocessing.spawn
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore._scheduler import replacement
from tests.e2e import death_calls as deadly
from tests.e2e import fault_calls as calls
from tests.e2e.deaths import HARD, all_ready, died, ended, kill, pid_of, serves
from tests.e2e.scripts import python
from tests.faults import LIMIT, Watch, Wire, count_lines, wait_stopped
from tests.internals import current_pid
from tests.rows import repeated_rows
from tests.waiting import until

pytestmark = pytest.mark.warm_fork_server


# Starting, and starting again


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_b1_a_first_start_that_dies_fails_and_is_never_retried(workers: int, method: Any, tmp_path: Path) -> None:
    births = tmp_path / "births"
    runner = percore.Runner(workers, lifespan=partial(calls.dying_if, str(tmp_path), str(births), workers - 1), start_method=method)
    with pytest.raises(percore.StartupFailed, match=f"worker {workers - 1} died with exit code 5 before it was ready"):
        await asyncio.wait_for(runner.start(), LIMIT)
    assert 1 <= count_lines(births) <= workers
    with pytest.raises(percore.RunnerClosed):
        await runner.run(calls.who)


@pytest.mark.parametrize(
    ("place", "method"),
    [("forked", "forkserver"), ("hello", "forkserver"), ("lifespan.entered", "forkserver"), ("hello", "spawn")],
)
async def test_k5_a_first_start_that_is_killed_fails(place: str, method: Any, points: Callable[[str], None]) -> None:
    points(f"worker.{place}=kill")
    with pytest.raises(percore.StartupFailed, match="died by SIGKILL"):
        await asyncio.wait_for(percore.Runner(2, start_method=method).start(), LIMIT)


async def test_k5_an_interpreter_that_ends_before_it_runs_anything_fails_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python3"  # by its name; what has another one is not started at all
    interpreter.symlink_to("/bin/false")
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", str(interpreter))  # it was sys.executable when it was imported
    monkeypatch.setattr("sys.executable", str(interpreter))
    with pytest.raises(percore.StartupFailed, match="died with exit code 1"):
        await asyncio.wait_for(percore.Runner(2, start_method="spawn").start(), LIMIT)


_BAD_MAIN = """\
import asyncio, contextlib, os, signal, sys, time
import percore

if __name__ != "__main__" and os.path.exists("bad"):
    with open("births", "a") as births:
        births.write("born\\n")
    if {how!r} == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while {how!r} == "hangs":
        signal.pause()
    while True:
        pass

@contextlib.contextmanager
def lifespan():
    yield

async def main():
    runner = percore.Runner(1, lifespan=lifespan, start_method={method!r}, start_timeout={limit})
    if {when!r} == "first":
        began = time.monotonic()
        try:
            await runner.start()
        except percore.StartupFailed as error:
            print(error)
        assert time.monotonic() - began < {limit} + 2
        return
    async with runner:
        open("bad", "w").close()
        os.kill(runner.statistics().workers[0].pid, signal.SIGKILL)
        loop = asyncio.get_running_loop()
        while not os.path.exists("births"):
            await asyncio.sleep(0)
        os.unlink("bad")
        print(await asyncio.wait_for(runner.run(abs, -1), 30))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "when", "method"),
    [
        ("dies", "first", "forkserver"),
        ("hangs", "first", "forkserver"),
        ("spins", "first", "spawn"),
        ("dies", "later", "forkserver"),
        *repeated_rows(("hangs", "later", "forkserver")),
    ],
)
def test_k5_a_main_module_that_kills_or_holds_the_worker_that_imports_it(how: str, when: str, method: str, tmp_path: Path) -> None:
    limit = 1.5 if when == "first" else 3.0  # a healthy worker has to come up within that
    (tmp_path / "program.py").write_text(_BAD_MAIN.format(how=how, when=when, method=method, limit=limit))
    if when == "first":
        (tmp_path / "bad").touch()
    done = python("program.py", cwd=tmp_path)
    assert done.code == 0, done
    if when == "later":
        assert done.out == "1\n"
        assert ("killed" if how == "hangs" else "died by SIGKILL") in done.err
    else:
        reason = "died by SIGKILL" if how == "dies" else "start_timeout=1.5 s"
        assert reason in done.out
        assert count_lines(tmp_path / "births") <= 1


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_k5_a_worker_that_dies_in_the_moment_it_is_ready_is_replaced(method: Any, points: Callable[[str], None]) -> None:
    # The loop stands until the worker is dead, so it hears of readiness and death at once.
    points("worker.ready=kill#0.1")
    runner = percore.Runner(1, start_method=method)
    starting = asyncio.create_task(runner.start())
    while not starting.done() and (pid := current_pid(runner)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if not starting.done():
        assert pid is not None
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
async def test_k5_a_first_start_that_hangs_fails_after_start_timeout(
    method: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    births = tmp_path / "births"
    runner = percore.Runner(
        2, lifespan=partial(calls.hanging_if, str(tmp_path), str(births)), start_timeout=0.7, start_method=method
    )
    began = time.monotonic()
    with pytest.raises(percore.StartupFailed, match=r"^worker \d was killed: not ready within start_timeout=0\.7 s$"):
        await asyncio.wait_for(runner.start(), LIMIT)
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == [], "the error says it"
    assert 0.7 <= time.monotonic() - began < 0.7 + HARD
    assert count_lines(births) <= 2  # a loaded machine may not even get there in time


@pytest.mark.asyncio_only
async def test_k5_a_replacement_that_hangs_is_killed_and_replaced(
    tmp_path: Path, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    flag, births = tmp_path / "flag", wire
    lifespan = partial(calls.hanging_if, str(flag), births.path)
    # The first runner is there for the fork server, which takes longest to come up.
    async with percore.Runner(1), percore.Runner(1, lifespan=lifespan, start_timeout=2.0) as runner:
        await births.line()
        flag.touch()
        await died(runner.submit(calls.exit_with, 1))
        waiting = runner.submit(calls.who)
        _, hanging, pid = await births.worker()
        flag.unlink()
        assert (await ended(waiting))[1] > hanging > 1
    said = [text for record in caplog.records if f"(pid {pid})" in (text := record.getMessage()) and record.levelname != "DEBUG"]
    assert said == [f"percore: worker 0 (pid {pid}) was killed: not ready within start_timeout=2 s"]


async def test_k5_a_death_of_the_replacement_before_it_is_ready_costs_nothing(points: Callable[[str], None]) -> None:
    points("worker.call.running=kill#0.1,worker.lifespan.entered=kill#0.2,worker.ready=kill#0.3")
    async with percore.Runner(1) as runner:
        await died(runner.submit(calls.who))
        assert (await ended(runner.submit(calls.who)))[1] == 4


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off in milliseconds."""
    monkeypatch.setattr(replacement, "_FIRST_DELAY", 0.0001)


@pytest.mark.usefixtures("impatient")
async def test_b2_ten_deaths_in_a_row_break_the_runner(tmp_path: Path) -> None:
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
async def test_b4_one_slot_that_fails_is_given_up_and_the_runner_goes_on(
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
async def test_b3_deaths_after_a_call_began_never_add_up() -> None:
    async with percore.Runner(1) as runner:
        for _ in range(replacement.LIMIT + 2):
            await died(runner.submit(calls.exit_with, 1), LIMIT)
        await serves(runner)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_p9_sigchld_ignored_never_makes_a_death_look_clean(method: Any) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        async with percore.Runner(1, start_method=method) as runner:
            assert (await died(runner.submit(calls.exit_with, 3))).exitcode in (3, None)
            await serves(runner)  # a new interpreter takes its time to come up
            assert (await died(runner.submit(calls.kill_self, signal.SIGKILL))).exitcode in (-9, None)
            await serves(runner)
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_p9_a_stolen_child_never_looks_clean(wire: Wire) -> None:
    async with percore.Runner(1, start_method="spawn") as runner:
        future = runner.submit(calls.stay, wire.path)
        _, _, pid = await wire.worker()
        kill(pid)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9  # noqa: ASYNC222  # the thief, faster than the loop
        assert (await died(future)).exitcode in (-9, None)
        await serves(runner)


async def test_k10_all_workers_at_once_and_again_is_no_reason_to_give_up() -> None:
    async with percore.Runner(2) as runner:
        for turn in range(4):
            for index in (0, 1):
                kill(pid_of(runner, index))
            await all_ready(runner, turn + 2)
        await serves(runner)
        assert runner.statistics().restarts == 8


async def test_k10_all_workers_at_once_and_their_replacements_three_times(wire: Wire, gate: Wire) -> None:
    async with percore.Runner(2, threads=1, lifespan=partial(deadly.held_until, 5, wire.path)) as runner:
        first = [await wire.worker() for _ in range(2)]
        began: list[asyncio.Future[Any]] = [runner.submit(calls.stay_in_thread, wire.path) for _ in range(2)]
        began += [runner.submit(calls.stay, wire.path) for _ in range(6)]
        for _ in began:
            await wire.worker()
        waiting = [runner.submit(calls.who_in_thread) for _ in range(20)]
        for _, _, pid in first:
            kill(pid)
        for future in began:
            assert (await died(future)).started
        for generation in (2, 3, 4):  # each is killed in its lifespan
            reborn = [await wire.worker() for _ in range(2)]
            assert {worker[:2] for worker in reborn} == {(0, generation), (1, generation)}
            for _, _, pid in reborn:
                kill(pid)
        assert {(await ended(future))[1] for future in waiting} == {5}
        await all_ready(runner, 5)
        await serves(runner)
        assert (runner.statistics().failed, runner.statistics().restarts) == (8, 8)


async def test_k16_poison_is_given_up_after_its_attempts_and_breaks_nothing(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with percore.Runner(2) as runner:
        for turn in range(1, 5):  # more deaths than would break a runner in which no call ever began
            error = await died(runner.options(retries=3).submit(deadly.poison, str(ledger)), LIMIT)
            assert (error.attempts, error.started, error.exitcode) == (4, True, 13)
            assert "That was attempt 4; no retries are left" in str(error)
            assert count_lines(ledger) == 4 * turn
        await serves(runner)
        assert (runner.statistics().failed, runner.statistics().retried) == (4, 12)


async def test_a_worker_that_its_fork_server_could_not_tell_of_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, points: Callable[[str], None], wire: Wire
) -> None:
    # 1. the fork server forks, and stops  2. the worker is ready, and runs a call  3. the fork server dies, and so does the worker:
    # who is made from the same request would find that call in its memory, and run it again.
    points("forkserver.forked=stop")
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


async def test_k8_a_stopped_worker_does_not_hold_up_close(wire: Wire) -> None:
    runner = percore.Runner(2, kill_after=0.3)
    await runner.start()
    future = runner.submit(calls.stay, wire.path)
    _, _, pid = await wire.worker()
    kill(pid, signal.SIGSTOP)
    wait_stopped(pid)
    await asyncio.wait_for(runner.aclose(grace=0), HARD)
    assert isinstance(future.exception(), percore.RunnerClosed)


async def test_k6_a_lifespan_that_raises_in_a_replacement_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "flag"
    async with percore.Runner(1, lifespan=partial(deadly.failing_if, str(flag))) as runner:
        flag.touch()
        kill(pid_of(runner))
        waiting = runner.submit(calls.who)
        async with asyncio.timeout(LIMIT):
            await until(lambda: "no such database today" in caplog.text)
        flag.unlink()
        index, generation, _ = await ended(waiting)
        assert (index, generation > 2) == (0, True)
        assert runner.statistics().failed == 0
    assert "LookupError: no such database today" in caplog.text
    assert "in failing_if" in caplog.text


async def test_k6_a_lifespan_that_raises_at_the_end_is_logged_and_loses_no_result(caplog: pytest.LogCaptureFixture) -> None:
    async with percore.Runner(2, lifespan=deadly.failing_at_the_end) as runner:
        future = runner.submit(calls.pattern, 1, 1_000_000)
    assert future.result() == calls.pattern(1, 1_000_000)
    assert caplog.text.count("failed on exit") == 2
    assert caplog.text.count("LookupError: the session was lost") == 2


async def test_k6_a_lifespan_that_hangs_at_the_end_is_killed_and_loses_no_result(wire: Wire) -> None:
    began = time.monotonic()
    async with percore.Runner(2, lifespan=partial(calls.hanging_at_the_end, wire.path), kill_after=0.3) as runner:
        future = runner.submit(calls.pattern, 1, 1_000_000)
        await ended(future)
        began = time.monotonic()
    assert time.monotonic() - began < 0.3 + HARD
    assert future.result() == calls.pattern(1, 1_000_000)


async def test_k6_a_lifespan_that_dies_at_the_end_fails_nothing() -> None:
    async with percore.Runner(2, lifespan=calls.dying_at_the_end) as runner:
        future = runner.submit(calls.pattern, 1, 1_000_000)
    assert future.result() == calls.pattern(1, 1_000_000)


@pytest.mark.parametrize("place", ["worker.finished", "worker.lifespan.left", "worker.bye"])
@pytest.mark.parametrize("which", ["", "#0.1"], ids=["all", "one"])
async def test_k7_a_death_at_a_step_of_closing_costs_nothing(
    place: str, which: str, points: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points(f"{place}=kill{which}")
    births = tmp_path / "births"
    async with percore.Runner(2, lifespan=partial(deadly.counting_births, str(births))) as runner:
        futures = [runner.submit(fn, seed, 300_000) for fn in (calls.pattern, calls.pattern_in_task) for seed in range(4)]
        await asyncio.wait_for(runner.aclose(), LIMIT)
    assert [future.result() for future in futures] == [calls.pattern(seed, 300_000) for seed in range(4)] * 2
    assert count_lines(births) == 2
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


async def test_k7_a_death_during_close_ends_every_future_and_starts_nobody(wire: Wire) -> None:
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


async def test_k7_the_calls_of_one_that_dies_during_close_run_elsewhere(wire: Wire, gate: Wire) -> None:
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
