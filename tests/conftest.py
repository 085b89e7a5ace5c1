"""The loops tests run under, the rows of a run, and the check after every test that nothing is left.

Async tests run under asyncio; those of tests/contract and tests/e2e that differ there (tests/rows.py) under uvloop as well, and
all of them with `--rows=full`. Elsewhere one asks with `@pytest.mark.both_loops`. `@pytest.mark.asyncio_only` takes a test out.
"""

import asyncio
import gc
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from percore._runner import early
from tests import leaks, order, rows, warm

# Runners audit themselves, also those of programs under test.
os.environ["PERCORE_DEBUG"] = "1"

# A shell that starts this in the background has SIGINT ignored, which every program under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As nohup does with SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No death of a process under test leaves a core file. All tests have this limit, because a fork server serves one set of limits.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

TESTS = Path(__file__).parent
BOTH_LOOPS = (TESTS / "contract", TESTS / "e2e")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _loop_factories() -> dict[str, LoopFactory]:
    factories: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if "uvloop" not in os.environ.get("PERCORE_WITHOUT", ""):
        import uvloop

        # The first loop of a process makes a pipe that libuv keeps for ever; made here, it is no test's leak.
        uvloop.new_event_loop().close()
        factories["uvloop"] = uvloop.new_event_loop
    return factories


LOOP_FACTORIES = _loop_factories()


# pytest_asyncio's own way to choose loops: no event loop policy is set, which Python 3.14 deprecates.
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    placed = any(item.path.is_relative_to(folder) for folder in BOTH_LOOPS)
    wanted = placed and (config.getoption("rows") == "full" or "uvloop" in rows.differing(item))
    both = item.get_closest_marker("both_loops") or (wanted and not item.get_closest_marker("asyncio_only"))
    return LOOP_FACTORIES if both else {"asyncio": LOOP_FACTORIES["asyncio"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", choices=rows.CHOICES, default="push", help="the engines and loops tests run with: see tests/rows.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected: there is hardly any, and each time there would be more to visit.

    What exists then is taken out of collections: many tests ask for one, and each would visit every test and its modules.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Do the same after each file, which leaves syntax trees, modules and examples behind: else each collection visits them."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _leave_out_of_collections()
    return result


def _leave_out_of_collections() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, left_out = rows.select(items, config.getoption("rows"))
    items[:] = order.longest_first(wanted) if hasattr(config, "workerinput") else wanted
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    warm.prepare(item)


def pytest_sessionfinish() -> None:
    warm.end()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail the test that leaves a process, thread, descriptor, memfd or name in /dev/shm. Taken down last of all."""
    before = leaks.snapshot()
    yield
    early.cool_down()  # the fork server that executors keep until the interpreter ends
    left = leaks.since(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def loop_is_guarded(request: pytest.FixtureRequest, nothing_left: None) -> None:
    """Set `guarded_loop` up for async tests alone; a sync test has no loop."""
    # Named here, it is set up first of all async fixtures and after `nothing_left`: so it is taken down when they are
    # gone and before its loop is closed, which would cancel the tasks; `nothing_left` looks when the loop is closed.
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("guarded_loop")


@pytest_asyncio.fixture
async def guarded_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail the test that leaves an asyncio task pending, or whose loop reports an error; make its time limit end the loop.

    A test whose loop has to report errors sets a handler of its own, or has the mark `loop_reports`.
    """
    before = asyncio.all_tasks()
    reported: list[dict[str, Any]] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        reported.append(context)
        _end_when_time_is_up(loop, context)

    asyncio.get_running_loop().set_exception_handler(handle)
    yield
    for _ in range(3):  # turns of the loop, not time: callbacks of what has ended are still queued
        await asyncio.sleep(0)
    current = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() - before if task is not current]
    if left:
        pytest.fail("the test left tasks pending:\n  " + "\n  ".join(map(repr, left)), pytrace=False)
    if reported and request.node.get_closest_marker("loop_reports") is None:
        pytest.fail("the loop reported:\n  " + "\n  ".join(map(repr, reported)), pytrace=False)


def _end_when_time_is_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # pytest-timeout raises from a signal handler. Where that hits a callback (under uvloop always: signals arrive in
    # one), the loop takes it for the callback's own failure, reports it here and would run on. Only SystemExit and
    # KeyboardInterrupt end a loop.
    error = context.get("exception")
    if isinstance(error, pytest.fail.Exception):
        raise SystemExit(str(error)) from error
    loop.default_exception_handler(context)
