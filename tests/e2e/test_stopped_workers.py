"""Workers that are stopped, or told to end: nothing fails that need not, and nobody else waits."""

import asyncio
import signal
from collections.abc import Callable

import pytest

import percore
from tests.e2e import death_calls as deadly
from tests.e2e import fault_calls as calls
from tests.e2e.deaths import HARD, died, ended, kill, pid_of, serves
from tests.faults import Watch, Wire, wait_stopped
from tests.internals import members_of
from tests.waiting import until

pytestmark = [pytest.mark.warm_fork_server, pytest.mark.differs("uvloop", because="uvloop's timers have a clock of their own")]


async def beside(runner: percore.Runner, pid: int, count: int) -> list[tuple[int, int, int]]:
    """Wait until that worker, which is stopped, counts as silent: then so many calls are run by the other one."""
    (stopped,) = (member for member in members_of(runner) if member.pid == pid)
    (other,) = (member for member in members_of(runner) if member is not stopped)
    await until(lambda: stopped.silence())  # only the clock changes it
    places = []
    for _ in range(count):
        await until(lambda: other.has_read())  # on a loaded machine it may be as silent for a moment
        places.append(await ended(runner.submit(calls.who)))
    return places


async def test_k8_a_stopped_worker_that_is_killed_fails_its_calls(wire: Wire) -> None:
    async with percore.Runner(2) as runner:
        future = runner.submit(calls.stay, wire.path)
        _, _, pid = await wire.worker()
        kill(pid, signal.SIGSTOP)
        wait_stopped(pid)
        for _ in range(3):  # turns of the loop: what it said before it was stopped is heard
            await asyncio.sleep(0)
        # Some of three are given to it, unless it counts as silent already. Once it does, it gets nothing more.
        some = [runner.submit(calls.accept) for _ in range(3)]
        assert pid not in [place[2] for place in await beside(runner, pid, 10)]
        kill(pid)
        assert (await died(future)).signal == "SIGKILL"
        assert [await ended(call) for call in some] == [0, 0, 0]


async def test_k8_a_stopped_worker_goes_on_when_it_is_continued(wire: Wire, gate: Wire) -> None:
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


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_k8_a_worker_that_is_stopped_idle_holds_up_nobody(end: int) -> None:
    async with percore.Runner(2) as runner:
        pid = pid_of(runner)
        kill(pid, signal.SIGSTOP)
        wait_stopped(pid)
        some = [runner.submit(calls.who) for _ in range(3)]  # it is given some of them, until it counts as silent
        assert [place[0] for place in await beside(runner, pid, 20)] == [1] * 20
        kill(pid, end)
        assert {(await ended(call))[0] for call in some} <= {0, 1}
        await serves(runner)
        assert (runner.statistics().failed, runner.statistics().restarts) == (0, int(end == signal.SIGKILL))


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["frame", "slot"])
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_k8_a_worker_that_is_stopped_amid_a_result(end: int, size: int, wire: Wire) -> None:
    async with percore.Runner(2) as runner:
        call = runner.submit(deadly.give_half_in_task, size, signal.SIGSTOP)
        staying = runner.submit(calls.stay, wire.path)
        index, _, other = await wire.worker()
        pid = pid_of(runner, 1 - index)
        await asyncio.to_thread(wait_stopped, pid)
        some = [runner.submit(calls.who) for _ in range(3)]
        assert {place[2] for place in await beside(runner, pid, 10)} == {other}
        kill(pid, end)
        if end == signal.SIGCONT:
            assert await ended(call) == [calls.pattern(1, size), 0, calls.pattern(2, size)]
        else:
            assert (await died(call)).signal == "SIGKILL"
        assert len([await ended(one) for one in some]) == 3
        assert not staying.done()
        staying.cancel()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_k8_a_worker_that_is_stopped_before_it_rings(end: int, points: Callable[[str], None]) -> None:
    points("worker.frame.written=stop@2#0.1")
    async with percore.Runner(1) as runner:
        call = runner.submit(calls.pattern_in_task, 7, 100_000)
        await asyncio.to_thread(wait_stopped, pid_of(runner))
        assert not call.done()
        kill(pid_of(runner), end)
        if end == signal.SIGCONT:
            assert await ended(call) == calls.pattern(7, 100_000)
        else:
            assert (await died(call)).started


async def test_k9_sigterm_drains_a_worker_and_nothing_fails(wire: Wire, gate: Wire) -> None:
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


async def test_k9_a_worker_that_swallows_sigterm_goes_on_and_can_be_killed_and_closed(wire: Wire) -> None:
    runner = percore.Runner(1, kill_after=0.3)
    await runner.start()
    pid = pid_of(runner)
    for generation in (1, 2):
        await ended(runner.submit(deadly.be_deaf_to_sigterm, wire.path))
        pid = pid_of(runner)
        kill(pid, signal.SIGTERM)
        assert await wire.line() == "swallowed"
        assert await ended(runner.submit(calls.who)) == (0, generation, pid)
        if generation == 1:
            kill(pid)
            await until(lambda: runner.statistics().restarts)
    with Watch([pid]) as worker:
        await asyncio.wait_for(runner.aclose(), HARD)
        assert worker.wait_gone(0) == []
