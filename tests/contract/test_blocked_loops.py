"""A worker whose event loop is blocked is reported, with functions and stacks. One that is stopped is not called blocked."""

import asyncio
import logging
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

import percore
from percore._common.system import has_gil
from tests import jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.faults import wait_stopped

SHORT = 0.1


class Reports(logging.Handler):
    """What the logger `percore` says, in the test's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: asyncio.Queue[str] = asyncio.Queue()
        self.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put_nowait(record.getMessage())

    async def about(self, part: str) -> str:
        """The next text with this part. A worker that gets too little CPU time, or imports slowly, is reported as such before."""
        while part not in (text := await self.texts.get()):
            pass
        return text

    def says_no_more(self, part: str) -> bool:
        """Whether no other text with this part has come."""
        return not any(part in self.texts.get_nowait() for _ in range(self.texts.qsize()))


@pytest.fixture
async def reports() -> AsyncIterator[Reports]:
    handler = Reports()
    logging.getLogger("percore").addHandler(handler)
    yield handler
    logging.getLogger("percore").removeHandler(handler)


async def test_a_blocked_loop_is_reported_with_its_stack_and_its_end(
    make_real: MakeRunner, log: Log, gate: Gate, reports: Reports
) -> None:
    async with make_real(blocked_after=SHORT) as runner:
        longer = [runner.submit(jobs.apass_gate, gate.path) for _ in range(3)]
        blocking = runner.submit(jobs.block_loop, log.path, gate.path)
        await log.next()
        waiting = [runner.submit(jobs.echo, number) for number in range(3)]
        text = await reports.about("is blocked by tests.jobs.")
        worker = runner.statistics().workers[0]
        assert worker.blocked_by == "tests.jobs.block_loop", "and not the calls that have run for longer"
        assert text.startswith(f"percore: worker 0 (pid {worker.pid}) has read nothing for ")
        assert re.search(r" s: its event loop is blocked by tests.jobs.block_loop\. The stacks of its threads:\n", text)
        assert "jobs.py" in text
        assert "in pass_gate" in text
        assert "_worker_process" not in text
        assert worker.blocked_for >= SHORT
        gate.open()
        assert await asyncio.gather(*waiting) == [0, 1, 2]
        await asyncio.gather(blocking, *longer)
        assert (await reports.about(" goes on, after ")).startswith(f"percore: worker 0 (pid {worker.pid}) ")
        worker = runner.statistics().workers[0]
        assert (worker.blocked_for, worker.blocked_by) == (0, None)
    assert reports.says_no_more("is blocked by tests.jobs.")


async def test_a_task_of_a_call_blocks_in_its_name(make_real: MakeRunner, log: Log, gate: Gate, reports: Reports) -> None:
    async with make_real(blocked_after=SHORT) as runner:
        blocking = runner.submit(jobs.block_loop_in_task, log.path, gate.path)
        await log.next()
        waiting = runner.submit(jobs.aecho, 1)
        await reports.about("is blocked by tests.jobs.block_loop_in_task. ")
        gate.open()
        await asyncio.gather(blocking, waiting)


@pytest.mark.skipif(not has_gil(), reason="there is no GIL to hold")
async def test_c_code_that_holds_the_gil_is_shown_by_its_caller(
    make_real: MakeRunner, log: Log, gate: Gate, reports: Reports
) -> None:
    async with make_real(blocked_after=SHORT) as runner:
        holding = runner.submit(jobs.hold_gil_until, log.path, gate.path)
        await log.next()
        waiting = runner.submit(jobs.aecho, 1)
        text = await reports.about("its event loop is blocked by tests.jobs.hold_gil_until. ")
        assert "in hold_gil_until" in text
        gate.open()
        await holding
        assert await waiting == 1


async def test_a_stopped_worker_is_not_called_blocked(make_real: MakeRunner, reports: Reports) -> None:
    async with make_real(blocked_after=SHORT) as runner:
        await runner.run(jobs.echo, 0)
        worker = worker_of(runner)
        worker.kill(signal.SIGSTOP)
        assert worker.pid is not None
        wait_stopped(worker.pid)
        waiting = runner.submit(jobs.echo, 1)
        assert (await reports.about("is stopped")).endswith(" s: its process is stopped, by a signal or a debugger")
        assert runner.statistics().workers[0].blocked_for == 0
        worker_of(runner).kill(signal.SIGCONT)
        assert await waiting == 1
        await reports.about(" goes on, after ")


async def test_the_death_of_a_blocked_worker_ends_its_watch(make_real: MakeRunner, log: Log, gate: Gate, reports: Reports) -> None:
    async with make_real(blocked_after=SHORT) as runner:
        blocking = runner.submit(jobs.block_loop, log.path, gate.path)
        await log.next()
        waiting = runner.submit(jobs.aecho, 1)
        await reports.about("is blocked by tests.jobs.")
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await blocking
        assert await waiting == 1
        await reports.about("died")
        assert runner.statistics().workers[0].blocked_for == 0
    assert reports.says_no_more("is blocked by tests.jobs.")


async def test_closing_a_runner_whose_worker_is_blocked(make_real: MakeRunner, log: Log, gate: Gate, reports: Reports) -> None:
    runner = make_real(blocked_after=SHORT, kill_after=0.3)
    await runner.start()
    blocking = runner.submit(jobs.block_loop, log.path, gate.path)
    await log.next()
    waiting = runner.submit(jobs.aecho, 1)
    await reports.about("is blocked by tests.jobs.")
    await runner.aclose(grace=0)
    outcomes = await asyncio.gather(blocking, waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [percore.RunnerClosed] * 2


@pytest.mark.asyncio_only  # it looks at the loop's timers
async def test_nobody_is_watched_without_blocked_after(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCORE_METRICS", "0")  # a fake worker has its timer for samples in this loop
    async with make(blocked_after=None) as runner:
        loop: Any = asyncio.get_running_loop()
        before = [*loop._scheduled]
        await runner.run(jobs.aecho, 1)  # a plain function needs a thread, and without a GIL idle threads have a timer
        added = [timer for timer in loop._scheduled if timer not in before]
        assert not [timer for timer in added if "Reclaiming" not in repr(timer)]  # without a GIL that wakes threads
