"""The house: which room may import which, and what no module may do.

ROOMS is the architecture; change it on purpose, and give the reason beside the row. A room is a folder of `src/percore`. The rows
stand from the ground up, and a room imports only rooms of earlier rows: so there is no circle of rooms, and no arrow runs up. An
import inside a function counts like one at the top, and an import under `if TYPE_CHECKING:` like one that happens. Modules are
named without the leading `percore.`; the package itself is `percore`.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import percore

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "percore"

ROOMS: dict[str, set[str]] = {
    # On both sides.
    "_common": set(),
    "_serialization": {"_common"},
    # Records alone, so the seam may speak of them.
    "_monitor": set(),
    "_protocol": {"_monitor"},
    "_transport": {"_common", "_protocol", "_serialization"},
    # A worker. It knows its channel by `interfaces` alone.
    "_worker": {"_common", "_protocol", "_serialization"},
    "_worker_process": {"_common", "_protocol", "_serialization", "_transport", "_worker"},
    # The program's process.
    "_scheduler": {"_common", "_protocol"},
    "_calls": {"_common", "_protocol", "_scheduler", "_serialization"},
    # The sockets that a pool hands to its workers. They are the program's, and no engine's: they outlive each worker.
    "_listening": {"_common"},
    "_supervisor": {"_calls", "_common", "_listening", "_monitor", "_protocol", "_scheduler", "_serialization"},
    # The program's half of an engine knows what it hands to its workers at their start.
    "_engines.processes": {
        *("_calls", "_common", "_monitor", "_protocol", "_serialization", "_transport", "_worker_process"),
    },
    # A host of workers on another node has an engine of its own there.
    "_node": {"_calls", "_common", "_engines.processes", "_protocol", "_serialization", "_transport", "_worker_process"},
    # The program's half of an engine of nodes. Records of workers are handled as those of processes.
    "_engines.nodes": {
        *("_calls", "_common", "_engines.processes", "_monitor", "_protocol", "_serialization", "_transport"),
    },
    # Workers that are threads of the program: so both halves are here, and the choice that users make.
    "_engines.threads": {
        *("_calls", "_common", "_engines.processes", "_monitor", "_protocol", "_serialization", "_transport", "_worker"),
    },
    # Whoever has the nodes. Each knows how to put a host there, and nothing of what it does. One that is public is a choice of an
    # engine, and may bring certificates. Threads of their own start hosts and ask others: the loop's executor may be full.
    "_places": {"_common", "_engines.nodes", "_monitor", "_transport"},
    "_map": {"_calls", "_common", "_monitor", "_protocol", "_scheduler", "_supervisor"},
    # The composition root: it makes the engine that runs the workers.
    "_runner": {
        *("_calls", "_common", "_engines.processes", "_map", "_monitor", "_protocol", "_serialization", "_supervisor"),
    },
    "_executor": {
        *(
            "_calls",
            "_common",
            "_engines.processes",
            "_monitor",
            "_protocol",
            "_runner",
            "_scheduler",
            "_serialization",
            "_supervisor",
            "_worker",
        ),
    },
    # An extra, whose library percore does not need. `_common.tracing` is its seam, so nothing of percore imports it.
    "opentelemetry": {"_common", "_serialization", "_worker"},
    # The way to other programs: their pages and their workers' stacks. It shares no process with them.
    "_attach": {"_monitor", "_worker_process"},
    # `percore top` and `percore record`.
    "_top": {"_attach", "_monitor"},
    "_record": {"_attach"},
    # The extra `web`: the dashboard.
    "_web": {"_attach", "_common", "_monitor", "_runner"},
    "web": {"_common", "_runner", "_web"},
    # For tests of the user's: workers in the program's own loop. percore never imports it.
    "_testing": {"_calls", "_common", "_monitor", "_protocol", "_runner", "_serialization", "_transport", "_worker"},
    "testing": {"_common", "_protocol", "_runner", "_testing"},
    # A plugin of pytest, which percore does not need. Users name it in their conftest.py; percore never imports it.
    "pytest_plugin": {"testing"},
    # A program: it uses percore as users do, and reads what the system can do.
    "_cli": {"_common", "_record", "_runner", "_top"},
    # What `python -m percore` runs.
    "__main__": {"_cli"},
    # For PyInstaller; percore never imports it.
    "_pyinstaller": set(),
    # A program of its own, for examples to fetch from.
    "demo_server": set(),
    # For the user's configuration of logging, which names it; percore never imports it.
    "logging": set(),
}

# Circles of modules within a room that only type-only imports close, each with its reason.
CIRCLES: dict[frozenset[str], str] = {}

# A worker loads nothing of the parent's rooms. In rooms that both sides share, these modules are the parent's: they are costly to
# import, or of no use in a worker.
WORKER = ("_worker", "_worker_process")
PARENT = (
    *("_monitor", "_scheduler", "_calls", "_listening", "_supervisor", "_engines", "_node", "_places", "_map", "_runner"),
    "_executor",
)
PARENT_IN_COMMON = {
    # Not `_common.options`: it checks the options of nested calls. A worker loads it on the first use of `current_runner`.
    *("_common.log", "_common.worker_errors", "_protocol.interfaces"),
    *("_transport.arena", "_transport.supervisor_side"),
}

# Modules of the standard library (and psutil) with which a module could do what its room must not: wait, look at the clock, touch
# the system. A name stands for all below it; a room for all its modules.
SYSTEM = frozenset({"asyncio", "os", "select", "selectors", "signal", "socket", "subprocess", "threading", "time"})
COSTLY = frozenset({"argparse", "concurrent.futures.process", "multiprocessing", "psutil"})
MUST_NOT_IMPORT: dict[str, frozenset[str]] = {
    "_scheduler": SYSTEM,
    "_transport.codec": SYSTEM,
    "_transport.ring": SYSTEM,
    "_transport.slots": SYSTEM - {"threading"},  # a worker's threads take slots; its lock waits for no other process
    **dict.fromkeys(("_calls.items", "_calls.policy", "_executor.life", "_map.results"), SYSTEM),
    **dict.fromkeys(("_protocol", "_serialization", "_transport", "_worker", "_worker_process"), COSTLY),
    **dict.fromkeys(("_common.errors", "_common.options", "_common.system", "_common.fault_points"), COSTLY),
}
# Decisions touch neither the system nor a place where tests strike.
DECIDES = {
    "_scheduler": {"_common.errors", "_common.options", "_common.rates", "_protocol.messages"},
    "_calls.policy": {"_common.call_options", "_common.callables", "_common.options", "_common.rates", "_common.worker_errors"},
    "_executor.life": {"_common.errors", "_common.worker_errors"},
    "_map.results": set(),
}

# Nobody waits by sleeping. What is allowed gives way to others and is named here, call by call.
GIVES_WAY = {
    # Ray, which tells nobody when a CPU becomes free
    "_places.ray_nodes": ["asyncio.sleep(_AGAIN)"],
    # the GIL, to the worker's loop
    "_worker.turns": ["time.sleep(_YIELD_FOR)"],
    # the loop, in the middle of a long input that is not async
    "_map.feeder": ["asyncio.sleep(0)"],
    # a program that is watched: it writes when it likes
    "_attach.programs": ["time.sleep(_PAUSE)"],
    "_attach.stacks": ["time.sleep(step)", "time.sleep(step)"],
    "_record.recorder": ["time.sleep(max(0.0, due - time.monotonic()))"],
    "_top.top": ["time.sleep(max(interval or 0.0, _BETWEEN))"],
    # a browser, which shows what it has got
    "_web.feed": ["asyncio.sleep(self._interval)"],
    # a call that a test delays
    "_testing.faults": ["time.sleep(self.plan.delay)", "asyncio.sleep(self.plan.delay)"],
    # nobody: under virtual time it is the next death
    "_testing.simulation": ["asyncio.sleep(chance.expovariate(deaths))"],
    # the loop, between two imports
    "_runner.assembly": ["asyncio.sleep(0)"],
}

# Who reads the wall clock: the system tells a process's start by it, and by nothing else.
WALL_CLOCK = {"_monitor.usage": ["time.time()"]}


class Import(NamedTuple):
    module: str  # who imports
    target: str  # what, as written: a module, or a module and a name in it
    typing_only: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module} -> {self.target} (line {self.line})"


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "percore"


# Functions, so that the files are read by the process that runs these tests, and not by each that collects them.


@cache
def modules() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(), str(path)) for path in sorted(SRC.rglob("*.py"))}


@cache
def all_imports() -> list[Import]:
    return [found for module, tree in modules().items() for found in imports(module, tree)]


@cache
def imports_of(module: str) -> list[Import]:
    return [found for found in all_imports() if found.module == module]


@cache
def edges() -> list[tuple[Import, str]]:
    # The package looks its public names up on first use, and tells them to type checkers: its imports are no arrows.
    return [(found, target) for found in all_imports() if found.module != "percore" and (target := inner(found.target)) is not None]


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(module: str, node: ast.AST, *, typing_only: bool = False) -> Iterator[Import]:
    """Every import below `node`; `from a import b` gives `a.b`, because b may be a module.

    A public name, as in `percore.Map`, counts as an import of its home, because its first use imports that.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield from imports(module, ast.Module([statement], []), typing_only=True)
            yield from imports(module, ast.Module(child.orelse, []), typing_only=typing_only)
        elif isinstance(child, ast.Import):
            yield from (Import(module, alias.name, typing_only, child.lineno) for alias in child.names if alias.name != "percore")
        elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "percore":
            if child.attr in {"__version__", "_import_uncollected"}:  # the package's own: they load nothing
                continue
            home = percore._HOMES.get(child.attr, child.attr)  # else a module, as in `percore.testing`
            yield Import(module, f"percore.{home}", typing_only, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}, line {child.lineno}: a relative import"
            yield from (Import(module, f"{child.module}.{alias.name}", typing_only, child.lineno) for alias in child.names)
        else:
            yield from imports(module, child, typing_only=typing_only)


def within(target: str, names: Iterable[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


def inner(target: str) -> str | None:
    """The module of percore that an import loads; None for anybody else's."""
    if target != "percore" and not target.startswith("percore."):
        return None
    path = target.removeprefix("percore").removeprefix(".")
    while path and path not in modules():
        path = path.rpartition(".")[0]
    return path or "percore"


@cache
def room_of(module: str) -> str | None:
    return next((room for room in ROOMS if within(module, {room})), None)


def test_every_module_is_in_a_room_and_a_package_holds_no_code() -> None:
    packages = {name_of(path) for path in SRC.rglob("__init__.py")} - {"percore", "_pyinstaller"}
    outside = [module for module in modules() if room_of(module) is None and module not in packages | {"percore"}]
    assert outside == []
    assert [package for package in sorted(packages) if modules()[package].body] == []
    assert [room for room in ROOMS if not any(within(module, {room}) for module in modules())] == []


def test_a_room_imports_only_rooms_of_earlier_rows() -> None:
    rooms = list(ROOMS)
    up = [(room, other) for room, others in ROOMS.items() for other in others if other not in rooms[: rooms.index(room)]]
    assert up == []


def test_a_room_imports_exactly_what_its_row_says(subtests: pytest.Subtests) -> None:
    for room in ROOMS:
        with subtests.test(room=room):
            arrows: dict[str | None, list[str]] = {}
            for found, target in edges():
                if room_of(found.module) == room and room_of(target) != room:
                    arrows.setdefault(room_of(target), []).append(str(found))
            outside = [found for other, those in arrows.items() if other not in ROOMS[room] for found in those]
            unused = ROOMS[room] - set(arrows)
            assert (outside, unused) == ([], set())


def test_contributing_draws_this_house() -> None:
    house = (ROOT / "CONTRIBUTING.md").read_text().partition("## The house\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \|", house, re.MULTILINE)
    assert rows == list(dict.fromkeys(room.partition(".")[0] for room in ROOMS))
    named = set(re.findall(r"`((?:_[a-z_]+|tests|docs)/[a-z_/]+\.(?:py|md))`", house))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists() and not (SRC / path).exists()] == []


def test_importing_the_package_imports_nothing_of_it() -> None:
    assert [
        str(found) for found in all_imports() if found.module == "percore" and inner(found.target) and not found.typing_only
    ] == []


def test_no_circle_of_modules() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found, target in edges():
        known = any({found.module, target} <= circle for circle in CIRCLES)
        if target != found.module and not (found.typing_only and known):
            graph[found.module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' <- '.join(error.args[1])}", pytrace=False)


def test_a_worker_loads_nothing_of_the_parent() -> None:
    loaded: dict[str, Import | None] = {module: None for module in modules() if within(module, WORKER)}
    waiting = list(loaded)
    while waiting:
        module = waiting.pop()
        for found, target in edges():
            if found.module == module and not found.typing_only and target not in loaded:
                loaded[target] = found
                waiting.append(target)
    assert [str(found) for module, found in loaded.items() if within(module, PARENT) or module in PARENT_IN_COMMON] == []


def test_imports_nothing_its_room_must_not_know(subtests: pytest.Subtests) -> None:
    for module in sorted(modules()):
        with subtests.test(module=module):
            forbidden = {name for room, names in MUST_NOT_IMPORT.items() if within(module, {room}) for name in names}
            known = [found for found in imports_of(module) if not found.typing_only]
            outside = [str(found) for found in known if within(found.target, forbidden)]
            for room, allowed in DECIDES.items():
                if within(module, {room}):
                    outside += [
                        str(found) for found, target in edges() if found.module == module and not within(target, {room, *allowed})
                    ]
            assert outside == []


def imported_names(module: str, names: set[str]) -> list[str]:
    return [str(found) for found in imports_of(module) if found.target in names]


def calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    """Calls of anything that is called by this name, as a function or as an attribute of whatever."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if name in (getattr(call.func, "attr", None), getattr(call.func, "id", None))]


def test_never_reads_the_wall_clock(subtests: pytest.Subtests) -> None:
    for module in sorted(modules()):
        with subtests.test(module=module):
            # The wall clock jumps; ages and deadlines are time.monotonic's or the loop's.
            tree = modules()[module]
            imported = imported_names(module, {"time.time", "time.time_ns"})
            # loop.time() is another clock, and allowed.
            calls = [*calls_of("time", tree), *calls_of("time_ns", tree)]
            read = [ast.unparse(call) for call in calls if ast.unparse(call.func).startswith("time.")]
            assert (imported, read) == ([], WALL_CLOCK.get(module, []))


def test_never_sleeps(subtests: pytest.Subtests) -> None:
    for module in sorted(modules()):
        with subtests.test(module=module):
            imported = imported_names(module, {"time.sleep", "asyncio.sleep"})
            slept = [ast.unparse(call) for call in calls_of("sleep", modules()[module])]
            assert (imported, slept) == ([], GIVES_WAY.get(module, []))
