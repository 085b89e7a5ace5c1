"""Workers that kill each other, and children that outlive their worker."""

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import percore
from tests.counts import LONG
from tests.e2e import death_calls as deadly
from tests.e2e import fault_calls as calls
from tests.e2e.deaths import HARD, died, ended, pid_of, serves
from tests.faults import LIMIT, Watch, Wire
from tests.internals import members_of

pytestmark = pytest.mark.warm_fork_server

NUMBERS_OF_WORKERS = range(2, 14) if LONG else (2, 5, 13)


class Killers:
    """Calls, one in each worker, that kill whom they are told."""

    def __init__(self, runner: percore.Runner, folder: Path) -> None:
        self._runner = runner
        self._folder = folder
        self._gates: list[Wire] = []
        self._wire = Wire(folder / "told")

    async def begin(self, workers: int) -> dict[int, "asyncio.Future[Any]"]:
        """A call in each; the futures by worker. With `concurrency=1` no worker gets two."""
        self._gates += [Wire(self._folder / str(index)) for index in range(len(self._gates), workers)]
        futures = [self._runner.submit(deadly.kill_told, str(self._folder)) for _ in range(workers)]
        assert sorted([(await self._wire.worker())[0] for _ in futures]) == list(range(workers))
        calls_of: dict[int, list[Any]] = {member.index: list(member.calls.values()) for member in members_of(self._runner)}
        return {index: next(future for future in futures if future in held) for index, held in calls_of.items()}

    def tell(self, index: int, pid: int) -> None:
        self._gates[index].write(f"{pid}\n")

    def close(self) -> None:
        for wire in (self._wire, *self._gates):
            wire.close()


@pytest.fixture
def make_killers(tmp_path: Path) -> Iterator[Callable[[percore.Runner], Killers]]:
    made: list[Killers] = []

    def make(runner: percore.Runner) -> Killers:
        made.append(Killers(runner, tmp_path))
        return made[-1]

    yield make
    for killers in made:
        killers.close()


@pytest.mark.long
@pytest.mark.parametrize("workers", NUMBERS_OF_WORKERS)
async def test_k11_a_call_that_kills_another_worker(workers: int, make_killers: Callable[[percore.Runner], Killers]) -> None:
    async with percore.Runner(workers, concurrency=1) as runner:
        killers = make_killers(runner)
        for killer, victim in ((0, workers - 1), (workers - 1, 0)):
            futures = await killers.begin(workers)
            pids = {index: pid_of(runner, index) for index in futures}
            killers.tell(killer, pids[victim])
            assert (await died(futures[victim])).pid == pids[victim]
            assert (await ended(futures[killer]))[::2] == (killer, pids[killer])
            others = set(futures) - {killer, victim}
            assert not any(futures[index].done() for index in others)
            for index in others:
                killers.tell(index, 0)
            assert {(await ended(futures[index]))[::2] for index in others} == {(index, pids[index]) for index in others}
            await serves(runner)


@pytest.mark.long
@pytest.mark.parametrize("workers", NUMBERS_OF_WORKERS)
async def test_k11_workers_that_all_kill_each_other_at_once(
    workers: int, make_killers: Callable[[percore.Runner], Killers]
) -> None:
    async with percore.Runner(workers, concurrency=1) as runner:
        killers = make_killers(runner)
        futures = await killers.begin(workers)
        pids = {index: pid_of(runner, index) for index in futures}
        for index in futures:
            killers.tell(index, pids[(index + 1) % workers])
        async with asyncio.timeout(LIMIT):
            await asyncio.wait(futures.values())
        for index, future in futures.items():
            error = future.exception()  # none: it was killed when it had ended
            assert error is None or (isinstance(error, percore.WorkerDied) and error.pid == pids[index])
        await serves(runner)


async def test_k14_a_dead_worker_that_left_a_child_is_dead(wire: Wire) -> None:
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


@pytest.mark.parametrize(
    ("how", "leave"),
    [
        ("multiprocessing", deadly.leave_child),
        ("multiprocessing", deadly.leave_child_in_task),
        ("subprocess", deadly.leave_child),
        ("os.fork", deadly.leave_child),
    ],
    ids=["multiprocessing in a thread", "multiprocessing in a task", "subprocess", "os.fork"],
)
@pytest.mark.asyncio_only
async def test_k14_a_child_that_outlives_its_worker_holds_nothing_of_percore(how: str, leave: Any, wire: Wire) -> None:
    async with percore.Runner(1, loop_factory=asyncio.new_event_loop) as runner:
        future = runner.submit(leave, how, wire.path)
        of_worker = {(fd, target) for fd, target in json.loads(await wire.line())}
        child, of_child = json.loads(await wire.line())
        with Watch([child]) as left:
            try:
                assert (await died(future)).exitcode == 7
                await serves(runner)
                await asyncio.wait_for(runner.aclose(), LIMIT)
                assert left.wait_gone(0) == [child]
            finally:
                left.kill()
            assert left.wait_gone(HARD) == []
    # A libffi with static trampolines, which ctypes loads, has itself open for ever.
    both = [target for fd, target in of_child if (fd, target) in of_worker and "libffi" not in target]
    shared = sorted(re.sub(r":\[\d+\]", "", target) for target in both)
    # What its loop has open is the worker's own, and shared by every fork of a process with a loop.
    assert shared == ([] if how == "subprocess" else ["anon_inode:[eventpoll]", "socket", "socket"])


@pytest.mark.parametrize(
    ("end", "factory"),
    [(deadly.end_child, None), (deadly.end_child_in_task, asyncio.new_event_loop)],
    ids=["in a thread", "in a task, asyncio"],
)
@pytest.mark.asyncio_only
async def test_k14_sigterm_to_a_forked_child_ends_the_child_and_does_not_drain_the_worker(end: Any, factory: Any) -> None:
    async with percore.Runner(1, loop_factory=factory) as runner:
        pid = pid_of(runner)
        assert await ended(runner.submit(end)) == (-signal.SIGTERM, pid)
        assert await ended(runner.submit(calls.who)) == (0, 1, pid)
        assert runner.statistics().restarts == 0
