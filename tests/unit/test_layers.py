"""The layers: which module may import which, and what no module may do.

The tables are the architecture; change them on purpose. Modules are named without the leading `percore.`; the package
itself is `percore`. An import inside a function counts like one at the top. An import under `if TYPE_CHECKING:` is held
to the same table, plus ONLY_FOR_TYPES, and is no part of a cycle, because it never happens.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src" / "percore"

VOCABULARY = frozenset({"_errors", "_options", "_messages", "_platform", "_points"})
# Words only: what decides touches neither the system (_platform) nor a place where tests strike (_points).
WORDS = frozenset({"_errors", "_options", "_messages"})
FRAMES = frozenset({"_ipc.memory", "_ipc.ring", "_ipc.slots", "_ipc.doorbell", "_ipc.codec", "_ipc.leases", "_ipc.channel"})
PICKLES = frozenset(
    {"_ipc.rebuild", "_ipc.reducers", "_ipc.modules", "_ipc.pickles", "_ipc.advice", "_ipc.presses", "_ipc.exceptions"}
)
BYTES = FRAMES | PICKLES
# How the parent starts processes. What the child is told of its world is written and read by one module, _worker.world.
LAUNCH = VOCABULARY | {"_engines.fds", "_worker.world"}

MAY_IMPORT: dict[str, frozenset[str]] = {
    # The package is lazy: importing it imports nothing but this.
    "percore": frozenset({"_platform"}),
    # vocabulary
    "_errors": VOCABULARY,
    "_options": VOCABULARY,
    "_messages": VOCABULARY,
    "_platform": VOCABULARY,
    "_points": VOCABULARY,
    # Errors that derive from the standard library's BrokenProcessPool, costly to import: for the parent's half alone.
    "_broken": VOCABULARY,
    "_statistics": WORDS,
    "_snapshot": WORDS | {"_statistics"},
    "_usage": WORDS,
    # decisions
    "_core": frozenset(),
    "_core.lifecycle": WORDS,
    "_core.phase": WORDS | {"_core.lifecycle"},
    "_core.map_life": WORDS | {"_core.lifecycle"},
    "_core.replacement": WORDS | {"_core.lifecycle", "_core.phase"},
    "_core.flow": WORDS,
    "_core.keys": WORDS | {"_core.names"},
    "_core.names": WORDS,
    "_core.batches": WORDS | {"_core.flow"},
    "_core.dispatch": WORDS | {"_core.batches", "_core.keys", "_core.names"},
    "_policy": WORDS | {"_broken"},
    "_results": WORDS,
    # bytes
    "_ipc": frozenset(),
    "_ipc.memory": VOCABULARY,
    "_ipc.ring": VOCABULARY,
    "_ipc.doorbell": VOCABULARY,
    "_ipc.codec": VOCABULARY,
    "_ipc.buffers": VOCABULARY,
    "_ipc.exports": VOCABULARY,
    "_ipc.slots": VOCABULARY | {"_ipc.buffers", "_ipc.memory"},
    "_ipc.leases": VOCABULARY | {"_ipc.buffers", "_ipc.exports", "_ipc.slots"},
    "_ipc.copies": VOCABULARY | {"_ipc.leases"},
    "_ipc.records": VOCABULARY | {"_ipc.rebuild", "_ipc.codec"},
    "_ipc.channel": VOCABULARY | FRAMES - {"_ipc.channel"} | {"_ipc.exports"},
    # the parent's side of the bytes: what is kept for the workers, and the channel to one of them
    "_ipc.arena": VOCABULARY | BYTES | {"_ipc.exports"},
    # the worker's side of them
    "_ipc.side": VOCABULARY | BYTES,
    "_ipc.link": VOCABULARY | FRAMES | {"_interfaces", "_ipc.arena"},
    "_ipc.rebuild": VOCABULARY,
    "_ipc.reducers": VOCABULARY,
    "_ipc.modules": VOCABULARY | {"_ipc.reducers"},
    "_ipc.pickles": VOCABULARY | {"_ipc.modules", "_ipc.reducers"},
    "_ipc.advice": VOCABULARY | {"_ipc.pickles", "_ipc.rebuild", "_ipc.reducers"},
    "_ipc.presses": VOCABULARY | {"_ipc.pickles", "_ipc.slots"},
    "_ipc.exceptions": VOCABULARY | {"_ipc.rebuild", "_ipc.reducers", "_ipc.pickles"},
    # The handle of a shared object: it exists on both sides, and knows neither.
    "_shared": WORDS,
    # the seam
    "_interfaces": VOCABULARY | {"_usage"},
    # the child
    "_worker": frozenset(),
    "_worker.context": VOCABULARY,
    "_worker.world": VOCABULARY,
    "_worker.forks": VOCABULARY,
    "_worker.siblings": VOCABULARY,
    "_worker.mainmodule": VOCABULARY | PICKLES | {"_worker.context"},
    "_worker.threads": VOCABULARY,
    "_worker.eager": WORDS,
    "_worker.terms": VOCABULARY | {"_ipc.pickles"},
    "_worker.answers": VOCABULARY | {"_ipc.advice", "_ipc.codec", "_ipc.pickles", "_ipc.side"},
    "_worker.batches": VOCABULARY | BYTES | {"_worker.answers", "_worker.terms"},
    "_worker.plain": VOCABULARY | FRAMES | {"_worker.answers", "_worker.batches", "_worker.terms", "_worker.threads"},
    "_worker.shares": VOCABULARY | {"_ipc.copies", "_ipc.side", "_shared", "_worker.context"},
    "_worker.serve": VOCABULARY
    | {
        "_ipc.codec",
        "_ipc.side",
        "_worker.answers",
        "_worker.batches",
        "_worker.eager",
        "_worker.plain",
        "_worker.shares",
        "_worker.terms",
    },
    "_worker.lifespan": VOCABULARY | {"_ipc.side", "_worker.context", "_worker.serve"},
    "_worker.logs": VOCABULARY | FRAMES | {"_ipc.records"},
    "_worker.main": VOCABULARY
    | BYTES
    | {"_ipc.side", "_worker.context", "_worker.forks", "_worker.lifespan", "_worker.logs", "_worker.mainmodule", "_worker.manners"}
    | {"_worker.plain", "_worker.serve", "_worker.siblings", "_worker.world"},
    # of the executor
    "_worker.manners": VOCABULARY | {"_ipc.advice", "_ipc.pickles", "_ipc.side", "_worker.answers"},
    "_worker.multiprocess": frozenset({"_worker.main", "_worker.manners", "_worker.world"}),
    # It finds _worker.main by the name in the request.
    "_worker.forkserver": VOCABULARY | {"_worker.world"},
    # for PyInstaller, and never imported by percore
    "_pyinstaller": frozenset(),
    "_pyinstaller.hook-percore": frozenset(),
    # the parent's ways to start processes
    "_engines": frozenset(),
    "_engines.fds": VOCABULARY | {"_ipc.memory"},
    "_engines.launch": LAUNCH,
    # _broken: an exit code in words
    "_engines.servers": LAUNCH | {"_broken", "_engines.launch", "_faults"},
    "_engines.spawn": LAUNCH | {"_engines.launch"},
    "_engines.forkserver": LAUNCH | {"_engines.launch", "_engines.servers", "_faults"},
    # _worker.logs: the size of the ring, and what is said about it and about levels.
    "_logs": VOCABULARY | FRAMES | {"_ipc.records", "_worker.logs"},
    # _worker.main and _worker.plain: the layout of what its workers are given at their start.
    "_engines.process": LAUNCH
    | BYTES
    | {"_contexts", "_core.dispatch", "_engines.forkserver", "_engines.launch", "_engines.spawn", "_interfaces", "_ipc.arena"}
    | {"_ipc.link", "_logs", "_usage", "_worker.main", "_worker.manners", "_worker.plain", "_worker.siblings"},
    # It names the function with which its workers begin.
    "_engines.multiprocess": LAUNCH | {"_engines.launch", "_worker.manners", "_worker.multiprocess"},
    # shell
    "_admission": VOCABULARY,
    "_contexts": VOCABULARY | {"_interfaces", "_ipc.pickles"},
    "_inputs": VOCABULARY,
    "_threaded": VOCABULARY,
    "_shares": VOCABULARY | {"_interfaces", "_ipc.copies", "_ipc.exports", "_shared"},
    "_functions": VOCABULARY | {"_core.flow", "_interfaces", "_ipc.advice", "_ipc.pickles", "_shares"},
    "_calls": VOCABULARY | {"_core.dispatch", "_functions", "_policy"},
    "_items": VOCABULARY | {"_ipc.codec", "_calls", "_functions", "_core.batches", "_core.dispatch", "_policy"},
    "_member": VOCABULARY | {"_calls", "_core.dispatch", "_core.lifecycle", "_functions", "_interfaces"},
    "_faults": VOCABULARY,
    "_beside": VOCABULARY | {"_calls", "_core.dispatch", "_member"},
    "_attempts": VOCABULARY | {"_faults", "_calls"},
    "_deaths": VOCABULARY | {"_faults", "_broken", "_calls", "_interfaces", "_items", "_member"},
    "_recalls": VOCABULARY,
    "_outcomes": VOCABULARY | PICKLES | {"_core.lifecycle", "_calls", "_items", "_member"},
    "_limited": VOCABULARY | {"_calls", "_core.dispatch", "_member"},
    "_lives": frozenset({"_core.lifecycle", "_member"}),
    "_pool": VOCABULARY
    | {
        "_broken",
        "_calls",
        "_core.lifecycle",
        "_core.phase",
        "_core.replacement",
        "_faults",
        "_interfaces",
        "_ipc.rebuild",
        "_items",
        "_limited",
        "_lives",
        "_member",
        "_outcomes",
    },
    "_intake": VOCABULARY | {"_calls", "_functions", "_policy", "_shares"},
    "_supervisor": VOCABULARY
    | {
        "_admission",
        "_attempts",
        "_beside",
        "_broken",
        "_calls",
        "_contexts",
        "_deaths",
        "_faults",
        "_functions",
        "_intake",
        "_interfaces",
    }
    | {"_items", "_member", "_policy", "_pool", "_recalls", "_shares", "_core.batches", "_core.dispatch", "_core.phase"},
    "_closing": VOCABULARY | {"_core.phase", "_member", "_supervisor"},
    # maps
    "_rows": VOCABULARY | {"_functions", "_core.batches", "_core.names", "_ipc.codec", "_policy", "_shares"},
    "_in_flight": VOCABULARY
    | {"_faults", "_functions", "_core.batches", "_core.dispatch", "_core.flow", "_core.map_life", "_core.names"}
    | {"_items", "_policy", "_results", "_rows", "_shares", "_supervisor"},
    "_feeder": VOCABULARY | {"_core.map_life", "_in_flight", "_inputs", "_rows", "_supervisor"},
    "_map_run": VOCABULARY | {"_core.map_life", "_faults", "_feeder", "_in_flight", "_inputs", "_results", "_rows", "_supervisor"},
    # face
    "_map": VOCABULARY | {"_functions", "_inputs", "_map_run", "_rows", "_supervisor"},
    "_map_verbs": VOCABULARY | {"_map", "_policy", "_rows", "_supervisor"},
    "_verbs": VOCABULARY | {"_calls", "_functions", "_map_verbs", "_policy", "_supervisor"},
    "_runner": VOCABULARY
    | {
        "_assembly",
        "_contexts",
        "_policy",
        "_shared",
        "_snapshot",
        "_statistics",
        "_supervisor",
        "_usage",
        "_verbs",
        "_worker.context",
    },
    # the composition root: the one module that knows the engine, the supervisor and the closing
    "_assembly": VOCABULARY
    | {"_broken", "_closing", "_interfaces", "_usage", "_engines.forkserver", "_engines.process", "_ipc.pickles", "_supervisor"},
    # executor
    "_executor_life": frozenset({"_core.lifecycle"}),
    "_jobs": VOCABULARY | {"_calls", "_functions", "_executor_life", "_supervisor", "_worker.manners"},
    "_portal": VOCABULARY | {"_assembly", "_executor_life", "_functions", "_jobs", "_member", "_supervisor"},
    "_executor": VOCABULARY
    | {"_assembly", "_functions", "_engines.multiprocess", "_engines.process", "_ipc.pickles", "_jobs", "_portal"}
    | {"_worker.context", "_worker.manners"},
}

ONLY_FOR_TYPES: dict[str, frozenset[str]] = {
    # the public names, told to type checkers; at run time they are looked up on first use
    "percore": frozenset(
        {
            "_broken",
            "_errors",
            "_executor",
            "_map",
            "_runner",
            "_shared",
            "_statistics",
            "_threaded",
            "_usage",
            "_verbs",
            "_worker.context",
        }
    ),
    # parts of the supervisor, handed their owner
    "_attempts": frozenset({"_supervisor"}),
    "_beside": frozenset({"_supervisor"}),
    "_deaths": frozenset({"_supervisor"}),
    "_ipc.copies": frozenset({"_interfaces"}),
    "_member": frozenset({"_shares"}),
    "_intake": frozenset({"_member", "_supervisor"}),
    "_recalls": frozenset({"_core.dispatch", "_member"}),
    "_outcomes": frozenset({"_pool", "_supervisor"}),
    "_pool": frozenset({"_supervisor"}),
    # it reads what the supervisor has counted
    "_snapshot": frozenset({"_pool", "_supervisor"}),
}

# Modules of the standard library (and psutil) with which a module could do what its layer must not: wait, look at the
# clock, touch the system. A name stands for all below it; a layer for all its modules.
SYSTEM = frozenset({"asyncio", "os", "select", "selectors", "signal", "socket", "subprocess", "threading", "time"})
PARENT_ONLY = frozenset({"argparse", "concurrent.futures.process", "multiprocessing", "psutil"})
MUST_NOT_IMPORT: dict[str, frozenset[str]] = {
    "_core": SYSTEM,
    "_ipc.ring": SYSTEM,
    "_ipc.slots": SYSTEM - {"threading"},  # a worker's threads take slots; its lock waits for no other process
    "_ipc.codec": SYSTEM,
    **dict.fromkeys(("_executor_life", "_items", "_policy", "_results"), SYSTEM),
    **dict.fromkeys((*sorted(VOCABULARY), "_ipc", "_interfaces", "_worker"), PARENT_ONLY),
}

# Nobody waits by sleeping. What is allowed gives way to others and is named here, call by call.
GIVES_WAY = {
    # the GIL, to the worker's loop
    "_worker.threads": ["time.sleep(_YIELD_FOR)"],
    # the loop, in the middle of a long input that is not async
    "_feeder": ["asyncio.sleep(0)"],
    # the loop, between two imports
    "_assembly": ["asyncio.sleep(0)"],
}


# Who reads the wall clock: the system tells a process's start by it, and by nothing else.
WALL_CLOCK = {"_usage": ["time.time()"]}


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


MODULES = {name_of(path): ast.parse(path.read_text(), str(path)) for path in sorted(SRC.rglob("*.py"))}


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(module: str, node: ast.AST, *, typing_only: bool = False) -> Iterator[Import]:
    """Every import below `node`; `from a import b` gives `a.b`, because b may be a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield from imports(module, ast.Module([statement], []), typing_only=True)
            yield from imports(module, ast.Module(child.orelse, []), typing_only=typing_only)
        elif isinstance(child, ast.Import):
            yield from (Import(module, alias.name, typing_only, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}, line {child.lineno}: a relative import"
            yield from (Import(module, f"{child.module}.{alias.name}", typing_only, child.lineno) for alias in child.names)
        else:
            yield from imports(module, child, typing_only=typing_only)


def within(target: str, names: frozenset[str] | set[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


def inner(target: str) -> str | None:
    """The module of percore that an import loads; None for anybody else's."""
    if target != "percore" and not target.startswith("percore."):
        return None
    path = target.removeprefix("percore").removeprefix(".")
    while path and path not in MODULES:
        path = path.rpartition(".")[0]
    return path or "percore"


IMPORTS = [found for module, tree in MODULES.items() for found in imports(module, tree)]
EDGES = [(found, target) for found in IMPORTS if (target := inner(found.target)) is not None]


def test_every_module_has_its_row_and_every_row_its_module() -> None:
    assert set(MODULES) == set(MAY_IMPORT)


def test_imports_only_what_its_row_allows(subtests: pytest.Subtests) -> None:
    for module in sorted(MODULES):
        with subtests.test(module=module):
            allowed = MAY_IMPORT.get(module, frozenset())
            for_types = allowed | ONLY_FOR_TYPES.get(module, frozenset())
            outside = [
                str(found)
                for found, target in EDGES
                if found.module == module and target not in (for_types if found.typing_only else allowed)
            ]
            assert outside == []


def test_imports_nothing_its_layer_must_not_know(subtests: pytest.Subtests) -> None:
    for module in sorted(MODULES):
        with subtests.test(module=module):
            forbidden = {name for layer, names in MUST_NOT_IMPORT.items() if within(module, {layer}) for name in names}
            known = [found for found in IMPORTS if found.module == module and not found.typing_only]
            outside = [str(found) for found in known if within(found.target, forbidden)]
            assert outside == []


def test_no_cycle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found, target in EDGES:
        if not found.typing_only:
            graph[found.module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}", pytrace=False)


def test_the_table_has_no_cycle_either() -> None:
    # But for the vocabulary, whose modules may use each other in any order that works.
    graph = {module: allowed - (VOCABULARY if module in VOCABULARY else set()) for module, allowed in MAY_IMPORT.items()}
    TopologicalSorter(graph).prepare()


def imported_names(module: str, names: set[str]) -> list[str]:
    return [str(found) for found in IMPORTS if found.module == module and found.target in names]


def calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    """Calls of anything that is called by this name, as a function or as an attribute of whatever."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]


def test_never_reads_the_wall_clock(subtests: pytest.Subtests) -> None:
    for module in sorted(MODULES):
        with subtests.test(module=module):
            # The wall clock jumps; ages and deadlines are time.monotonic's or the loop's.
            tree = MODULES[module]
            imported = imported_names(module, {"time.time", "time.time_ns"})
            # loop.time() is another clock, and allowed.
            calls = [*calls_of("time", tree), *calls_of("time_ns", tree)]
            read = [ast.unparse(call) for call in calls if ast.unparse(call.func).startswith("time.")]
            assert (imported, read) == ([], WALL_CLOCK.get(module, []))


def test_never_sleeps(subtests: pytest.Subtests) -> None:
    for module in sorted(MODULES):
        with subtests.test(module=module):
            imported = imported_names(module, {"time.sleep", "asyncio.sleep"})
            slept = [ast.unparse(call) for call in calls_of("sleep", MODULES[module])]
            assert (imported, slept) == ([], GIVES_WAY.get(module, []))
