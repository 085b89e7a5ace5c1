"""One suite for every engine: `make` gives the runners a test asks for, on the engine it is run with."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from percore import Runner, ThreadsEngine
from percore._common.system import default_start_method
from percore._engines.nodes.worker import NodeWorker
from percore._engines.threads import choice
from percore._engines.threads.worker import ThreadWorker
from tests.contract.pipes import gate, log, other_gate
from tests.fakes import FakeRunner, FakeWorker
from tests.hosts import NodesRunner
from tests.internals import current_member
from tests.rows import engine_of, engines_for

__all__ = ["gate", "log", "other_gate"]

MakeRunner: TypeAlias = Callable[..., Runner]
Starts: TypeAlias = Callable[[int], int]

REAL = ["forkserver", "spawn"] if default_start_method() == "forkserver" else ["spawn"]
ENGINES = ["fake", *REAL, "nodes", "threads"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test the engines that its marks and the rows of this run ask for, unless it names its own."""
    own = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    for name, engines in (("engine", ENGINES), ("real_engine", [*REAL, "nodes"])):
        if name in metafunc.fixturenames and name not in own:
            wanted = engines_for(metafunc.definition, engines, metafunc.config.getoption("rows"))
            metafunc.parametrize(name, wanted, indirect=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def real_engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _maker(engine: str) -> MakeRunner:
    def make(workers: int = 1, **options: object) -> Runner:
        if engine == "fake":
            return FakeRunner(workers, **options)  # type: ignore[arg-type]
        if engine == "nodes":
            return NodesRunner(workers, **options)  # type: ignore[arg-type]
        if engine == "threads":
            choice._told = True  # that only one thread runs at a time: test_threads_engine.py tests that it is said
            return Runner(workers, engine=ThreadsEngine(), **options)  # type: ignore[arg-type]
        return Runner(workers, start_method=engine, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make(engine: str) -> MakeRunner:
    """Makes runners, not started, on every engine."""
    return _maker(engine)


@pytest.fixture
def make_real(real_engine: str) -> MakeRunner:
    """Makes runners, not started, with processes."""
    return _maker(real_engine)


@pytest.fixture
def starts(request: pytest.FixtureRequest) -> Starts:
    """How many starts of a worker stand for so many: an interpreter takes as long as ten forks, and tells no more each time."""
    spawned = engine_of(request.node) == "spawn"
    return lambda count: -(-count // 3) if spawned else count


def worker_of(runner: Runner, index: int = 0) -> Any:
    """The worker of a slot, as its engine gave it: to be killed, or sent a signal."""
    member = current_member(runner, index)
    assert member is not None
    return member.worker


async def kill_arrived(worker: Any) -> None:
    """Wait until a worker that was killed does nothing more in its loop. A node's host passes the signal on."""
    if isinstance(worker, NodeWorker):
        await worker.ended.wait()


async def threads_ended(worker: Any) -> None:
    """Wait until what runs on in threads of a killed worker has ended. A process takes them along."""
    await kill_arrived(worker)
    if isinstance(worker, FakeWorker):
        await asyncio.to_thread(worker.core.server.join)
    elif isinstance(worker, ThreadWorker):
        await asyncio.to_thread(worker.join)


class WorkerLog:
    """What workers have logged: it arrives in this process's logging, or on standard error where nothing can be sent any more."""

    def __init__(self, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self._capfd = capfd
        self._caplog = caplog

    def text(self) -> str:
        return self._capfd.readouterr().err + self._caplog.text


@pytest.fixture
def worker_log(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> WorkerLog:
    return WorkerLog(capfd, caplog)
