"""What percore logs of its own: each record tells which worker it is about, and a runner's life is told with figures."""

import logging
import os
import re

import pytest

from tests import jobs
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log

pytestmark = [
    pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own"),
    pytest.mark.local_memory(because="the start of workers on nodes also tells that they wait for their nodes"),
]


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[tuple[int | None, str]]:
    """The worker and the text of percore's own records of a level, with figures as `#`."""
    own = [record for record in caplog.records if record.name == "percore" and record.levelno == level]
    texts = [re.sub(r"[0-9.]+", "#", record.getMessage()) for record in own]
    # When a worker starts, its pid may be unknown yet.
    texts = [STARTS if text == STARTS.replace(" (pid #)", "") else text for text in texts]
    return [(record.worker, text) for record, text in zip(own, texts, strict=True)]  # type: ignore[attr-defined]


STARTS = "percore: worker # (pid #) starts, as number # of its slot"
READY = "percore: worker # (pid #) is ready after # s, as number # of its slot"
ENDED = "percore: worker # (pid #) has ended after # s; calls done: #, failed: #"


async def test_a_life_is_told_with_figures(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "percore")
    async with make(2) as runner:
        await runner.map(jobs.fail, [ValueError, KeyError, OSError], return_exceptions=True)
        pids = {worker.index: worker.pid for worker in runner.statistics().workers}
    opened, closed = said(caplog, logging.INFO)
    assert opened == (None, "percore: the workers (#) are ready after # s")
    assert closed == (None, "percore: the workers have ended after # s; calls done: #, failed: #, retried: #; workers replaced: #")
    assert "; calls done: 3, failed: 3, retried: 0; workers replaced: 0" in caplog.records[-1].getMessage()
    assert sorted(said(caplog, logging.DEBUG)) == sorted([(index, text) for index in (0, 1) for text in (STARTS, READY, ENDED)])
    for record in caplog.records:
        about, pid = record.worker, record.pid  # type: ignore[attr-defined]
        assert pid == (os.getpid() if about is None else pids[about]) or (pid is None and "starts" in record.getMessage())


async def test_the_replacement_of_a_dead_worker_is_told(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "percore")
    async with make(1) as runner:
        await runner.run(jobs.echo)
        pid = runner.statistics().workers[0].pid
        worker_of(runner).kill()
        assert await runner.run(jobs.echo, 1) == 1
        following = runner.statistics().workers[0].pid
    (death,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (death.worker, death.pid) == (0, pid)  # type: ignore[attr-defined]
    _, (index, text), closed = said(caplog, logging.INFO)
    assert (index, text) == (0, READY)
    (ready,) = [record for record in caplog.records if "is ready after" in record.getMessage()]
    assert ready.pid == following  # type: ignore[attr-defined]
    assert ready.getMessage().endswith("as number 2 of its slot")
    assert closed[1].endswith("; workers replaced: #")
    assert caplog.records[-1].getMessage().endswith("; workers replaced: 1")


async def test_a_recycled_worker_is_told_at_debug_alone(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "percore")
    async with make(1, max_tasks_per_worker=1) as runner:
        for place in range(3):
            assert await runner.run(jobs.echo, place) == place
    assert said(caplog, logging.INFO)[0][1] == "percore: the workers (#) are ready after # s"
    assert len(said(caplog, logging.INFO)) == 2
    assert (0, READY) in said(caplog, logging.DEBUG)
    assert (0, "percore: worker # (pid #) may begin # more calls; its replacement starts") in said(caplog, logging.DEBUG)


async def test_a_blocked_worker_is_named(make: MakeRunner, log: Log, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    async with make(1, threads=1, kill_after=0.05) as runner:
        worker = worker_of(runner)
        call = runner.options(hard_timeout=0.05).submit(jobs.wait, log.path, gate.path, 1)
        with pytest.raises(TimeoutError):
            await call
        gate.open()
        await threads_ended(worker)
    own = [record for record in caplog.records if record.name == "percore"]
    assert {record.worker for record in own} <= {None, 0}  # type: ignore[attr-defined]
    assert all(isinstance(record.pid, int) for record in own)  # type: ignore[attr-defined]


async def test_a_start_that_fails_tells_of_no_end(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "percore")
    with pytest.raises(Exception, match="could not start"):
        await make(1, lifespan=jobs.no_resource).start()
    assert said(caplog, logging.INFO) == []
