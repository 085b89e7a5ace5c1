"""Workers that cannot start: at the first start it fails, later the budget decides, and user code that raises decides nothing."""

import asyncio
import importlib
import itertools
import logging
import shutil
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import percore
from percore._protocol.interfaces import Worker
from percore._scheduler import replacement
from percore._supervisor.pool_worker import PoolWorker
from tests.counts import LONG
from tests.e2e import boot_calls, fault_calls
from tests.e2e.deaths import HARD, all_ready, died, ended, kill, pid_of, serves
from tests.faults import LIMIT, Wire, count_lines
from tests.internals import supervisor_of

pytestmark = pytest.mark.warm_fork_server

# At the first start


@pytest.mark.asyncio_only
@pytest.mark.parametrize("index", [-1, 1], ids=["all", "one"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "LookupError: there is no database"),
        ("sys.exit", "SystemExit: 3"),
        ("import", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("os._exit", "with exit code 3"),
    ],
)
async def test_b1_a_lifespan_that_fails_at_the_first_start(how: str, told: str, index: int, tmp_path: Path) -> None:
    births = tmp_path / "births"
    runner = percore.Runner(3, lifespan=partial(boot_calls.failing, str(births), how, index))
    with pytest.raises(percore.StartupFailed) as caught:
        await asyncio.wait_for(runner.start(), LIMIT)
    text = "".join(traceback.format_exception(caught.value))
    assert told in text
    if how != "os._exit":
        assert "boot_calls.py" in text
    assert count_lines(births) <= 3  # nothing is tried twice, nor in a slot that has not failed
    with pytest.raises(percore.RunnerClosed):
        await runner.run(fault_calls.who)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user's own that is there only as long as its file is."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "users_lifespan.py").write_text(
        "import contextlib\n@contextlib.contextmanager\ndef lifespan():\n    yield 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    module = importlib.import_module("users_lifespan")
    yield module
    monkeypatch.delitem(importlib.import_module("sys").modules, "users_lifespan")


@pytest.mark.asyncio_only
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_b1_an_import_that_fails_at_the_first_start(method: Any, module: Any, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "own")
    runner = percore.Runner(2, lifespan=module.lifespan, start_method=method)
    with pytest.raises(percore.StartupFailed, match="No module named 'users_lifespan'"):
        await asyncio.wait_for(runner.start(), LIMIT)


# Later


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> float:
    """How many times faster than promised workers are started again."""
    faster = 1 if LONG else 200
    monkeypatch.setattr(replacement, "_FIRST_DELAY", replacement._FIRST_DELAY / faster)
    monkeypatch.setattr(replacement, "LONGEST_DELAY", replacement.LONGEST_DELAY / faster)
    return faster


class Starts:
    """When workers were started, from now on."""

    def __init__(self, runner: percore.Runner) -> None:
        self.times: list[float] = []
        engine: Any = supervisor_of(runner).engine
        self._start = engine.start
        engine.start = self._spy

    def _spy(self, *args: Any) -> Any:
        self.times.append(time.monotonic())
        return self._start(*args)

    def keep_the_pace(self, faster: float) -> None:
        """As many as promised, none earlier: the first two replace at once one that had begun calls, and one that had not."""
        assert len(self.times) == replacement.LIMIT
        apart = [later - earlier for earlier, later in itertools.pairwise(self.times)]
        for number, seconds in enumerate(apart[1:]):
            assert seconds >= min(5.0, 0.1 * 2**number) / faster
        assert all(seconds >= 1 / faster for seconds in apart[5:])


class Word(logging.Handler):
    """Waits for percore to say something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._said = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._said.set()

    async def wait(self) -> None:
        logger = logging.getLogger("percore")
        logger.addHandler(self)
        try:
            await self._said.wait()
        finally:
            logger.removeHandler(self)


@pytest.mark.long
@pytest.mark.asyncio_only
@pytest.mark.timeout(120)
async def test_b2_a_module_that_is_deleted_meanwhile(pace: float, module: Any, tmp_path: Path) -> None:
    async with percore.Runner(1, lifespan=module.lifespan, concurrency=4) as runner:
        assert await ended(runner.submit(fault_calls.accept)) == 0
        shutil.rmtree(tmp_path / "own")
        starts = Starts(runner)
        began = time.process_time()
        kill(pid_of(runner))
        await asyncio.sleep(0)
        pending = [runner.submit(fn) for fn in (fault_calls.who, fault_calls.who_in_thread) * 500]
        stream = aiter(runner.map(fault_calls.accept, itertools.count()))
        with pytest.raises(percore.RunnerBroken, match="No module named 'users_lifespan'"):
            await asyncio.wait_for(anext(stream), 60)
        await asyncio.wait(pending, timeout=HARD)
        errors = [future.exception() for future in pending]
        assert {type(error) for error in errors} == {percore.RunnerBroken}
        assert all("No module named 'users_lifespan'" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == len(errors)
        with pytest.raises(percore.RunnerBroken, match="users_lifespan"):
            await runner.run(fault_calls.who)
        starts.keep_the_pace(pace)
        if LONG:
            assert time.process_time() - began < 8  # of the 16 seconds that it takes


@pytest.mark.long
@pytest.mark.asyncio_only
@pytest.mark.timeout(120)
async def test_b3_workers_that_die_when_they_are_ready(pace: float, tmp_path: Path) -> None:
    flag, births = tmp_path / "flag", tmp_path / "births"
    async with percore.Runner(2, lifespan=partial(boot_calls.dying_when_ready, str(flag), str(births))) as runner:
        assert len(await runner.broadcast(fault_calls.who)) == 2  # each has begun a call
        flag.touch()
        starts = Starts(runner)
        kill(pid_of(runner, 1))
        await Word("the runner goes on without it").wait()
        assert [worker.state for worker in runner.statistics().workers] == ["ready", "failed"]
        assert count_lines(births) == 2 + len(starts.times)
        starts.keep_the_pace(pace)
        await serves(runner)


# User code that is called in the midst of supervision


class Raises(logging.Handler):
    """A handler, and a filter, that cannot do what they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        raise ValueError("the log is full")

    def filter(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return False


@pytest.fixture
def broken_log(request: pytest.FixtureRequest) -> Iterator[Raises]:
    """The logger of percore, with a handler or a filter that raises."""
    logger, raises = logging.getLogger("percore"), Raises()
    is_filter = request.param == "filter"
    (logger.addFilter if is_filter else logger.addHandler)(raises)
    yield raises
    (logger.removeFilter if is_filter else logger.removeHandler)(raises)


@pytest.mark.parametrize("broken_log", ["handler", "filter"], indirect=True)
async def test_b5_a_log_handler_that_raises_keeps_nobody_from_being_replaced(
    broken_log: Raises, wire: Wire, capfd: pytest.CaptureFixture[str]
) -> None:
    async with percore.Runner(2) as runner:
        future = runner.submit(fault_calls.stay, wire.path)
        index, _, pid = await wire.worker()
        kill(pid)
        await died(future)
        kill(pid_of(runner, 1 - index))
        await all_ready(runner, 2)
        assert (await died(runner.submit(fault_calls.misbehave, "crc"))).signal == "SIGKILL"
        await serves(runner)
    assert len([text for text in broken_log.seen if "died" in text or "was killed" in text]) == 3
    assert "the log is full" in capfd.readouterr().err


@pytest.mark.asyncio_only
@pytest.mark.parametrize("broken_log", ["handler"], indirect=True)
async def test_b5_a_log_handler_that_raises_when_a_slot_is_given_up(
    broken_log: Raises, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replacement, "_FIRST_DELAY", 0.0001)
    flag = tmp_path / "flag"
    async with percore.Runner(1, lifespan=partial(fault_calls.dying_if, str(flag), str(tmp_path / "births"))) as runner:
        flag.touch()
        kill(pid_of(runner))
        with pytest.raises(percore.RunnerBroken):
            await ended(runner.submit(fault_calls.who))  # sent to a dead worker, or to none
    assert "every worker died" in broken_log.seen[-1]


async def test_b5_done_callbacks_that_raise(wire: Wire) -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context["exception"]))

    def refuse(_: object) -> None:
        raise ValueError("a callback's own")

    async with percore.Runner(1) as runner:
        futures = [runner.submit(fault_calls.stay, wire.path) for _ in range(3)]
        for future in futures:
            future.add_done_callback(refuse)
        _, _, pid = await wire.worker()
        await wire.lines(2)
        futures[0].cancel()
        await asyncio.sleep(0)
        kill(pid)
        await asyncio.wait(futures)
        await serves(runner)
    assert [str(error) for error in reports] == ["a callback's own"] * 3


@pytest.mark.asyncio_only
def test_an_interrupt_in_the_midst_of_a_start_is_the_only_thing_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two Ctrl-C may come where a process is started and nobody has it yet."""
    started: list[Worker] = []

    def interrupted(self: PoolWorker, worker: Worker, shares: object) -> None:
        started.append(worker)
        worker.kill()
        raise KeyboardInterrupt

    monkeypatch.setattr(PoolWorker, "attach", interrupted)
    loop = asyncio.new_event_loop()
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: told.append(context))
    runner = percore.Runner(1)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(runner.start())
    loop.run_until_complete(runner.aclose())
    for worker in started:
        worker.close()
    loop.close()
    assert len(started) == 1
    assert told == []
