"""What workers log, warn of and lose arrives at the supervisor's loggers. With processes: a fake's loggers are the supervisor's."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import percore
from percore._worker_process.log_forwarding import LOG_RING_SIZE
from tests import log_jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate
from tests.counts import times

in_fresh_interpreters = pytest.mark.differs("spawn", because="a fresh interpreter has other streams and warning filters")
without_calls = pytest.mark.differs(
    "fallbacks",
    because="the records' ring is a file, its bell a pipe, the worker's loop asyncio's, and its exit seen in another way",
)

FLOOD = times(4_000, 100_000)
"""Records: a worker's ring holds some three hundred."""
APP = "app.jobs"


def of(caplog: pytest.LogCaptureFixture, name: str = APP) -> list[logging.LogRecord]:
    """What this logger has got from workers."""
    return [record for record in caplog.records if record.name == name and getattr(record, "worker", None) is not None]


def messages(caplog: pytest.LogCaptureFixture, name: str = APP) -> list[str]:
    return [record.getMessage() for record in of(caplog, name)]


@pytest.fixture
def levels() -> Iterator[Callable[..., None]]:
    """Sets levels of loggers until the end of the test."""
    changed: dict[str, tuple[int, bool]] = {}

    def change(name: str, level: int = logging.NOTSET, *, disabled: bool = False) -> None:
        logger = logging.getLogger(name)
        changed.setdefault(name, (logger.level, logger.disabled))
        logger.setLevel(level)
        logger.disabled = disabled

    yield change
    logging.disable(logging.NOTSET)
    for name, (level, disabled) in changed.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).disabled = disabled


# What a record says


@without_calls
async def test_a_record_tells_who_logged_it_and_where(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real() as runner:
        pid = await runner.run(log_jobs.fail_and_tell)
        (record,) = of(caplog)
    said = record.__dict__
    assert (record.getMessage(), record.levelname, record.args) == ("it failed for a reason", "ERROR", ())
    assert (said["worker"], record.process, record.threadName) == (0, pid, "MainThread")
    assert (record.funcName, record.module, record.pathname) == ("fail_and_tell", "log_jobs", log_jobs.__file__)
    assert record.exc_text is not None
    assert record.stack_info is not None
    assert record.exc_text.endswith("KeyError: 'missing'")
    assert "in fail_and_tell" in record.stack_info
    assert (said["shop"], said["odd"]) == (7, "odd, but a text")


async def test_records_of_threads_are_there_before_the_outcome(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real(2) as runner:
        for turn in range(20):
            await runner.run(log_jobs.say_in_thread, f"turn {turn}")
            assert messages(caplog)[-1] == f"turn {turn}"
    assert {(record.threadName or "")[:8] for record in of(caplog)} == {"percore-"}


@without_calls
async def test_every_worker_keeps_its_order(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    calls = [(log_jobs.count, "task"), (log_jobs.count_in_thread, "thread")]
    async with make_real(2) as runner, asyncio.TaskGroup() as group:
        for i in range(8):
            fn, name = calls[i % 2]
            group.create_task(runner.run(fn, f"{name}-{i}", 200))
    by_call: dict[str, list[str]] = {}
    for message in messages(caplog):
        call, _, number = message.partition(" ")
        by_call.setdefault(call, []).append(number)
    assert len(by_call) == 8
    assert all(numbers == [str(i) for i in range(200)] for numbers in by_call.values())
    for worker in (0, 1):
        times = [record.created for record in of(caplog) if record.__dict__["worker"] == worker]
        assert len(times) > 0


# Levels


@in_fresh_interpreters
async def test_levels_of_the_parent_decide_in_the_worker(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, levels: Callable[..., None]
) -> None:
    levels("app", logging.INFO)
    levels("app.quiet", logging.CRITICAL)
    levels("app.disabled", disabled=True)
    async with make_real() as runner:
        assert await runner.run(log_jobs.say_unspeakable) == "said"
    assert messages(caplog) == ["wanted"]


async def test_logging_disable_holds_in_workers(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, levels: Callable[..., None]
) -> None:
    levels("app", logging.DEBUG)
    logging.disable(logging.CRITICAL)
    async with make_real() as runner:
        assert await runner.run(log_jobs.say_unspeakable) == "said"
    logging.disable(logging.NOTSET)
    assert messages(caplog) == []


async def test_a_replacement_sees_levels_as_they_are_when_it_starts(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, levels: Callable[..., None]
) -> None:
    levels("app", logging.ERROR)
    async with make_real() as runner:
        await runner.run(log_jobs.say, "first", logging.INFO)
        levels("app", logging.INFO)
        await runner.run(log_jobs.say, "second", logging.INFO)
        with pytest.raises(percore.WorkerDied):
            await runner.run(log_jobs.say_and_die, 0)
        await runner.run(log_jobs.say, "third", logging.INFO)
    assert messages(caplog) == ["third"]


async def test_a_level_that_has_risen_since_holds_in_the_supervisor(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, levels: Callable[..., None]
) -> None:
    async with make_real() as runner:
        levels("app", logging.CRITICAL)
        await runner.run(log_jobs.say, "unwanted by now")
    assert messages(caplog) == []


# Warnings and lost errors


@in_fresh_interpreters
async def test_warnings_arrive(make_real: MakeRunner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    async with make_real() as runner:
        await runner.run(log_jobs.warn)
        with pytest.raises(UserWarning, match="too careful"):
            await runner.run(log_jobs.warn_strictly)
    (record,) = of(caplog, "py.warnings")
    assert (record.pathname, record.levelname) == (log_jobs.__file__, "WARNING")
    assert record.getMessage().startswith(f"{log_jobs.__file__}:{record.lineno}: UserWarning: careful\n")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("job", [log_jobs.lose_task, log_jobs.lose_task_in_a_cycle])
@without_calls
async def test_errors_of_tasks_that_nobody_awaits_arrive(
    job: Callable[[], Any], make_real: MakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_real() as runner:
        await runner.run(job)
    (record,) = of(caplog, "asyncio")
    assert "Task exception was never retrieved" in record.getMessage()
    assert "LookupError: nobody asked this task" in (record.exc_text or "")


async def test_errors_of_threads_arrive(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real() as runner:
        await runner.run(log_jobs.lose_thread, "the thread's name")
        assert await runner.run(log_jobs.lose_thread_with_own_hook) == ["this thread had more to do"]
        await runner.run(log_jobs.end_thread_by_exit)
    (record,) = of(caplog, "percore")
    assert (record.getMessage(), record.threadName) == ("percore: an exception ended thread the thread's name", "the thread's name")
    assert "LookupError: this thread had more to do" in (record.exc_text or "")


async def test_what_a_lifespan_raises_when_it_is_left_arrives(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real(lifespan=log_jobs.stubborn):
        pass
    (record,) = of(caplog, "percore")
    assert "the lifespan of worker 0 failed" in record.getMessage()
    assert "LookupError: it does not want to be left" in (record.exc_text or "")
    assert f'File "{os.path.dirname(percore.__file__)}' not in (record.exc_text or "")


# Beginning and end


@without_calls
@in_fresh_interpreters
async def test_from_the_first_moment_to_the_last(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real(lifespan=log_jobs.talkative, loop_factory=log_jobs.talkative_loop) as runner:
        assert messages(caplog) == ["making a loop", "entering"]
        await runner.run(log_jobs.say, "serving")
    assert messages(caplog) == ["making a loop", "entering", "serving", "leaving", "atexit"]


@without_calls
async def test_a_worker_that_ends_in_order_loses_nothing(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    # More than its ring holds, twice: while it leaves its lifespan, and after its loop has ended.
    async with make_real(2, lifespan=log_jobs.very_talkative, kill_after=60):
        pass
    assert Counter(messages(caplog)) == Counter({f"{when} {i}": 2 for when in ("leaving", "atexit") for i in range(3000)})


@without_calls
@in_fresh_interpreters
async def test_what_was_logged_before_a_death_arrives(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real() as runner:
        with pytest.raises(percore.WorkerDied):
            await runner.run(log_jobs.say_and_die, 50)
        assert messages(caplog) == [f"last words {i}" for i in range(50)]


# Too much


class Count(logging.Handler):
    """Counts the messages of a flood, by the turn of the loop in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.by_turn = [0]
        self._awaited = (0, asyncio.Event())

    async def reach(self, count: int) -> None:
        """Wait until there are so many."""
        self._awaited = (count, asyncio.Event())
        if len(self.messages) < count:
            await self._awaited[1].wait()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if self.by_turn[-1] == 0:
            asyncio.get_running_loop().call_soon(self.by_turn.append, 0)
        self.by_turn[-1] += 1
        if len(self.messages) == self._awaited[0]:
            self._awaited[1].set()


@pytest.fixture
def count() -> Iterator[Count]:
    """Counts instead of whoever else would see what workers log."""
    logger, handler = logging.getLogger(APP), Count()
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.propagate = True


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.asyncio_only
@pytest.mark.parametrize("job", [log_jobs.count_until, log_jobs.count_in_thread_until])
@without_calls
async def test_a_worker_that_logs_without_end_slows_itself(
    job: Callable[..., Any], make_real: MakeRunner, count: Count, gate: Gate
) -> None:
    # The supervisor goes on: a turn of its loop handles a few records, and other calls come and go meanwhile.
    async with make_real(2) as runner:
        flood: asyncio.Future[int] = runner.submit(job, gate.path)
        for tenth in range(1, 11):
            await count.reach(FLOOD // 10 * tenth)
            await runner.run(log_jobs.who)
            assert not flood.done()
        gate.open()
        logged = await flood
    assert count.messages == [f"flood {i}" for i in range(logged)]
    assert max(count.by_turn) <= LOG_RING_SIZE // 100


@without_calls
async def test_a_loop_that_waits_for_a_thread_that_logs_goes_on(make_real: MakeRunner, count: Count) -> None:
    # 1. a thread holds a lock and waits for room in the ring; 2. the loop waits for the lock. The loop is not needed to go on.
    async with make_real() as runner:
        first = runner.submit(log_jobs.count_under_lock, 3000)
        assert await runner.run(log_jobs.take_lock) == "had it"
        await first
    assert len(count.messages) == 3000


# User code in the supervisor


async def test_b5_a_handler_that_raises_costs_its_record_alone(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: logging.LogRecord) -> bool:
        if record.getMessage() == "bad":
            raise LookupError("the user's own")
        return True

    logger = logging.getLogger(APP)
    logger.addFilter(fail)
    try:
        async with make_real() as runner:
            for text in ("good", "bad", "fine"):
                await runner.run(log_jobs.say, text)
            assert runner.statistics().restarts == 0
    finally:
        logger.removeFilter(fail)
    assert messages(caplog) == ["good", "fine"]
    assert "LookupError: the user's own" in capsys.readouterr().err


async def test_a_handler_may_use_the_runner(make_real: MakeRunner) -> None:
    calls: list[asyncio.Future[Any]] = []
    closing: list[asyncio.Task[None]] = []

    class Calls(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            calls.append(runner.submit(log_jobs.who))
            if len(calls) == 3:
                closing.append(asyncio.ensure_future(runner.aclose()))

    logger, handler = logging.getLogger(APP), Calls()
    logger.addHandler(handler)
    try:
        runner = make_real()
        await runner.start()
        await runner.run(log_jobs.count, "called", 3)
        await closing[0]
        assert [call.result().index for call in calls] == [0, 0, 0]
    finally:
        logger.removeHandler(handler)


# User code in the worker


async def test_records_made_while_one_is_made_arrive_before_it(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real() as runner:
        await runner.run(log_jobs.say_within)
    assert messages(caplog) == ["a __del__", "a __str__", "cyclic"]


async def test_a_record_that_cannot_be_formatted_is_reported(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with make_real() as runner:
        assert await runner.run(log_jobs.say_badly) == "said"
    assert messages(caplog) == []
    assert "--- Logging error ---" in capfd.readouterr().err


@in_fresh_interpreters
async def test_basic_config_in_a_worker_does_not_double_records(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with make_real() as runner:
        await runner.run(log_jobs.configure_and_say, "once", force=False)
        assert (messages(caplog), capfd.readouterr().err) == (["once"], "")
        await runner.run(log_jobs.configure_and_say, "here", force=True)
        assert (messages(caplog), capfd.readouterr().err) == (["once"], "the worker's own: here\n")


@without_calls
async def test_a_fork_of_a_worker_logs_for_itself(
    make_real: MakeRunner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with make_real() as runner:
        assert await runner.run(log_jobs.say_in_fork, "from the fork") == 0
        await runner.run(log_jobs.say, "from the worker")
    assert messages(caplog) == ["from the worker"]
    told = capfd.readouterr().err
    assert told.startswith("from the fork\n")
    assert "UserWarning: from the fork" in told


# Broken workers


@without_calls
async def test_a_worker_whose_records_are_broken_is_killed(make_real: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make_real() as runner:
        with pytest.raises(percore.WorkerDied):
            await runner.run(log_jobs.write_nonsense)
        assert (await runner.run(log_jobs.who)).generation == 2
    assert "was killed: its channel broke" in caplog.text
