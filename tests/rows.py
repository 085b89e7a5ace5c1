"""Which ways of running each test goes in: the first way always, another one where the test says that it differs.

The product of engines, event loops and missing system calls is large, and most of its rows repeat each other: above the seam
nothing knows the engine, and workers have the same loop whatever the program's is. So each push runs a test of tests/contract
on the fake engine and with the fork server, under asyncio, and one of tests/e2e under asyncio. A test or a module whose
subject depends on the way names the further ways, with the reason:

    pytestmark = pytest.mark.differs("spawn", "fallbacks", because="the exit of a worker reaches its supervisor another way")

Where the fake engine shows all that differs without system calls, `on="fake"` leaves processes to the tests that add a mark of
their own: each process imports what its calls need.

A row that repeats most of another one is given as `repeats(value)`: it costs a push its seconds and tells little more.

In a further way each test function runs once, whatever its parameters.

`--rows=full` (`make test-full`) runs every row. `--rows=threads` (`make test-threads`) runs every test of the contract on threads.
`--rows=fallbacks` runs the tests that differ in that way alone: for a run
under PERCORE_WITHOUT. Where there is no fork server, spawned interpreters are the first way.
"""

from typing import Final

import pytest
from _pytest.mark import ParameterSet

from percore._common.system import default_start_method

WAYS: Final = {
    "uvloop": "the program's loop is uvloop: callbacks of descriptors, timers and signals, and their order, are another library's",
    "spawn": "workers are fresh interpreters: how one is launched, what it is given, and how its exit is seen",
    "nodes": "payloads and messages pass a socket: where they lie, who discards them, and when a read or an exit is known here",
    "threads": "workers are threads of the program: nothing is pickled, a worker ends as its loop does, no thread can be killed",
    "fallbacks": "system calls are missing (PERCORE_WITHOUT): memory, bells, exits and the workers' loop are others",
}
"""Each way besides the first, and what differs in it."""

CHOICES: Final = ("push", "full", "fallbacks", "threads")


def repeats(*values: object) -> list[ParameterSet]:
    """These values of a parameter in `make test-full` alone."""
    return repeated_rows(*((value,) for value in values))


def repeated_rows(*rows: tuple[object, ...]) -> list[ParameterSet]:
    """As `repeats`, where a row has the values of several parameters."""
    return [pytest.param(*row, marks=pytest.mark.full) for row in rows]


def differing(item: pytest.Item) -> set[str]:
    """The ways for which the test or its module says that it differs there."""
    ways: set[str] = set()
    for mark in item.iter_markers("differs"):
        unknown = set(mark.args) - set(WAYS)
        if unknown or not mark.args or not mark.kwargs.get("because"):
            raise pytest.UsageError(f'{item.nodeid}: differs() takes some of {", ".join(WAYS)}, and because="..."')
        ways.update(mark.args)
    return ways


def select(items: list[pytest.Item], rows: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those that a run has, and those that it leaves out."""
    wanted: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen: set[tuple[str, str]] = set()
    for item in items:
        further = item.nodeid.partition("[")[0], _further_way(item, rows)
        can_run = _can_run(item, engine_of(item))
        is_wanted = can_run and (rows == "full" or (_is_wanted(item, rows) and further not in seen))
        if is_wanted and further[1]:
            seen.add(further)
        (wanted if is_wanted else left_out).append(item)
    return wanted, left_out


def engines_for(item: pytest.Item, engines: list[str], rows: str) -> list[str]:
    """The engines that a run has a test on, whatever its parameters; the first one, if it has none, for `select` to leave out.

    A test that nobody runs is not made: that would take most of the time until the first test begins.
    """
    return [engine for engine in engines if _has_row(item, engine, rows)] or engines[:1]


def _can_run(item: pytest.Item, engine: object) -> bool:
    """Whether the engine has what the test is about.

    On nodes, the program and its workers share no memory. With threads nothing is apart: there is one process.
    """
    for name in ("local_memory", "apart"):
        marks = list(item.iter_markers(name))
        if any(not mark.kwargs.get("because") for mark in marks):
            raise pytest.UsageError(f'{item.nodeid}: {name}() takes because="..."')
        if marks and (engine == "threads" or (engine == "nodes" and name == "local_memory")):
            return False
    return True


def _has_row(item: pytest.Item, engine: object, rows: str) -> bool:
    if not _can_run(item, engine):
        return False
    if rows == "full":
        return True
    if rows == "threads":
        return engine == "threads"
    if rows == "fallbacks" and not _falls_back(item, engine):
        return False
    if engine in {"nodes", "threads"}:
        return engine in differing(item) and rows == "push"
    return not _is_spawned(engine) or "spawn" in differing(item)


def _is_wanted(item: pytest.Item, rows: str) -> bool:
    engine = engine_of(item)
    if not _has_row(item, engine, rows) or item.get_closest_marker("full"):
        return False
    # Without processes the loop is the test's own, and each further way tells the same under any loop.
    return not ((engine in {"fake", "nodes", "threads"} or _is_spawned(engine)) and "uvloop" in item.name)


def _falls_back(item: pytest.Item, engine: object) -> bool:
    """Whether a mark says that the test differs without system calls, on the engine that it has."""
    marks = [mark for mark in item.iter_markers("differs") if "fallbacks" in mark.args]
    return any(engine is None or mark.kwargs.get("on") in {None, engine} for mark in marks)


def _further_way(item: pytest.Item, rows: str) -> str:
    """The way in which a test runs once: its parameters repeat there what the first way has told of them."""
    if rows == "fallbacks":
        return f"fallbacks of {engine_of(item)}"
    if engine_of(item) in {"nodes", "threads"}:
        return str(engine_of(item))
    if _is_spawned(engine_of(item)):
        return "spawn"
    is_chosen = "_asyncio_loop_factory" in _parameters(item)  # by tests/conftest.py, and not by a parameter of the test's own
    return "uvloop" if is_chosen and "uvloop" in item.name else ""


def _is_spawned(engine: object) -> bool:
    return engine == "spawn" != default_start_method()


def engine_of(item: pytest.Item) -> object:
    """The engine that the fixtures of tests/contract gave a test."""
    parameters = _parameters(item)
    return parameters.get("engine") or parameters.get("real_engine")


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
