"""Changes percore's source by one small fault at a time, and asks whether the tests notice.

    python scripts/mutants.py 300 --seed 1 --jobs 2 --rooms _scheduler _protocol _transport

Each mutant is a copy of the package in which one expression or statement differs: a comparison, an operator, a number, a condition,
or a statement that is left out. Three stages look for it, the cheapest first: the unit tests that name the changed module; the unit
tests that run a whole part, such as the supervisor; and tests of the contract in real runs, which depend on the room. A mutant that
no stage notices survives; the script prints it. Some cannot be noticed, since they change only how fast something is, or a text.
Ctrl-C and SIGTERM end the script, which then says how many were noticed so far.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "src" / "percore"
TESTS: Final = ROOT / "tests"
UNIT: Final = TESTS / "unit"
PARTS: Final = {
    "_scheduler": ["test_dispatch.py", "test_call_orders.py", "test_rebalancing.py"],
    "_protocol": ["test_broken_workers.py", "test_options.py"],
    "_transport": ["test_channel_orders.py", "test_channel.py", "test_broken_workers.py"],
}
"""Unit tests of whole parts that a room decides about."""

LINK: Final = ("wire", "wire_proof", "connection", "proven", "certificates")
"""The modules of a connection between machines."""
RUNS: Final = {
    "_scheduler": (
        "fake",
        ["test_calls", "test_keys", "test_batches", "test_nested", "test_rates", "test_recycling", "test_turns"],
    ),
    "_protocol": ("forkserver and not uvloop", ["test_calls", "test_nested", "test_share", "test_deaths"]),
    "_transport": ("forkserver and not uvloop", ["test_calls", "test_share", "test_payloads", "test_buffers", "test_logs"]),
    "link": ("nodes and not uvloop", ["test_nodes", "test_calls", "test_payloads"]),
}
"""The tests of the contract for a room: an expression for `-k`, and the files."""

_LONGEST: Final = 600.0
"""Seconds that the tests of a file may take without a fault."""
SHORTEST: Final = 20.0
"""Seconds that a stage has, at the least."""
TIMES: Final = 4
"""How many times as long as without a fault a stage may take. Beyond it a mutant counts as noticed: a test hangs."""

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


class Place(NamedTuple):
    """A node of a module, whose text may change meanwhile, by its number in the order of `ast.walk`, and what is done to it."""

    module: Path
    text: str
    number: int
    line: int
    change: str

    @property
    def where(self) -> str:
        """The module and the line."""
        return f"{self.module.relative_to(SOURCE)}:{self.line}"


class Stage(NamedTuple):
    """Tests that look for a mutant."""

    name: str
    files: tuple[Path, ...]
    chosen: str = ""

    def by_file(self) -> list["Stage"]:
        """Return a stage for each of its files, whichever stage they belong to."""
        return [Stage("", (path,), self.chosen) for path in self.files]


def main() -> int:
    """Run the mutants. Return 1 if fewer are noticed than asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="*", default=["_scheduler", "_protocol", "_transport"])
    parser.add_argument("--only", nargs="*", default=[], help="those of these lines, such as _transport/wire.py:50, alone")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants are tested at once")
    parser.add_argument("--least", type=float, default=0.0, help="the share that must be noticed")
    asked = parser.parse_args()
    places = [place for room in asked.rooms for path in sorted((SOURCE / room).rglob("*.py")) for place in places_in(path)]
    if asked.only:
        places = [place for place in places if place.where in asked.only]
    chosen = random.Random(asked.seed).sample(places, min(asked.count, len(places)))
    print(f"{len(chosen)} of {len(places)} mutants, seed {asked.seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Run(asked.jobs).run(chosen, asked.least)


class Run:
    """Tests mutants, several at once."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] | None = set()
        """Those that run; None: no more may begin."""
        self._seconds: dict[Stage, float] = {}
        """Of stages of one file: how long its tests take without a fault."""

    def run(self, places: list[Place], least: float) -> int:
        """Test these mutants. Return 1 if less than this share is noticed, or interrupted; 2 if a test fails without."""
        files = {one for place in places for stage in stages_of(place.module) for one in stage.by_file()}
        noticed: Counter[str] = Counter()
        is_whole = True
        with ThreadPoolExecutor(self._jobs) as threads:
            try:
                is_whole = all([*threads.map(self._measure, sorted(files))])
                tests = {threads.submit(self._stage_that_notices, place): place for place in places}
                for tested, test in enumerate(as_completed(tests), 1):
                    noticed[test.result()] += 1
                    if not test.result():
                        print(f"survives: {tests[test].where}: {tests[test].change}", flush=True)
                    if tested % 50 == 0:
                        print(_rate(noticed), flush=True)
            except KeyboardInterrupt:
                least = 1.0
                print("interrupted", flush=True)
            finally:
                self._end(threads)
        print(_rate(noticed))
        return 2 if not is_whole else int(noticed.total() - noticed[""] < least * len(places))

    def _measure(self, file: Stage) -> bool:
        """Learn how long the tests of a file take without a fault. Return whether they pass."""
        begun = time.monotonic()
        if not self._fails(file, None, "", _LONGEST):
            self._seconds[file] = time.monotonic() - begun
            return True
        if self._processes is not None:
            print(f"left out, because it fails without a mutant: {file.files[0].relative_to(ROOT)}", flush=True)
        return False

    def _stage_that_notices(self, place: Place) -> str:
        """Return the name of the first stage that notices a mutant; empty: none does."""
        text = changed(place)
        for stage in stages_of(place.module):
            files = [file for file in stage.by_file() if file in self._seconds]
            limit = max(SHORTEST, TIMES * sum(map(self._seconds.__getitem__, files)))
            whole = stage._replace(files=tuple(file.files[0] for file in files))
            if files and self._fails(whole, place.module, text, limit):
                return stage.name
        return ""

    def _fails(self, stage: Stage, module: Path | None, text: str, limit: float) -> bool:
        """Whether a test of a stage fails, or hangs, if a module has this text."""
        with tempfile.TemporaryDirectory(prefix="percore-mutant-", ignore_cleanup_errors=True) as folder:
            copy = Path(folder, "src", "percore")
            shutil.copytree(SOURCE, copy, symlinks=True)  # with the compiled modules: those whose source is the same are valid
            if module is not None:
                (copy / module.relative_to(SOURCE)).write_text(text)
            options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=30", *(["-k", stage.chosen] if stage.chosen else [])]
            command = [sys.executable, "-m", "pytest", *options, *map(str, stage.files)]
            environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
            with self._lock:
                if self._processes is None:
                    return True
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._processes.add(process)
            try:
                return process.wait(limit) != 0
            except subprocess.TimeoutExpired:
                return True
            finally:
                _kill(process)
                with self._lock:
                    if self._processes is not None:
                        self._processes.remove(process)

    def _end(self, threads: ThreadPoolExecutor) -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            running, self._processes = self._processes, None
        for process in running or ():
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a run of tests, and what it has left: a mutant may break the promise that workers end with their program."""
    with contextlib.suppress(ProcessLookupError):  # its whole session has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rate(noticed: Counter[str]) -> str:
    tested = noticed.total()
    by_stage = ", ".join(f"{count} by {name}" for name, count in sorted(noticed.items()) if name)
    return f"noticed: {tested - noticed['']} of {tested}, {1 - noticed[''] / max(1, tested):.1%} ({by_stage})"


def places_in(path: Path) -> Iterator[Place]:
    """Yield the mutants of a module."""
    text = path.read_text()
    tree = ast.parse(text)
    said = {id(part) for one in ast.walk(tree) for part in _annotations(one)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in said:
            continue
        found = deepcopy(node)
        before = ast.unparse(found) if isinstance(found, ast.expr | ast.stmt) else ""
        if _change(found):
            after = "left out" if isinstance(found, ast.Pass) or _is_left_out(node) else ast.unparse(found)
            yield Place(
                path, text, number, getattr(node, "lineno", 0), f"{before.splitlines()[0][:60]} -> {after.splitlines()[0][:60]}"
            )


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of the annotations of this node, which change nothing when the code runs."""
    for name in ("annotation", "returns"):
        if (annotation := getattr(node, name, None)) is not None:
            yield from ast.walk(annotation)


def _is_left_out(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr | ast.AugAssign)


def _change(node: Any) -> bool:
    """Change a node. Return whether it can be changed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        node.ops[0] = _COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATED:
        node.op = _OPERATED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return False
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        node.value += 1
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.AugAssign):
        node.value = ast.Constant(0)
    else:
        return False
    return True


def changed(place: Place) -> str:
    """Return the text of the module with this mutant."""
    tree = ast.parse(place.text)
    for number, node in enumerate(ast.walk(tree)):
        if number == place.number:
            _change(node)
    return ast.unparse(ast.fix_missing_locations(tree))


def stages_of(module: Path) -> list[Stage]:
    """Return the tests that look for a mutant of a module, the cheapest first."""
    room = module.relative_to(SOURCE).parts[0]
    name = ".".join(("percore", *module.relative_to(SOURCE).with_suffix("").parts))
    parent, _, own = name.rpartition(".")
    naming = [path for path in sorted(UNIT.glob("test_*.py")) if _names(path.read_text(), name, parent, own)]
    naming.sort(key=lambda path: path.stem != f"test_{own}")
    parts = [UNIT / one for one in PARTS.get(room, []) if UNIT / one not in naming]
    chosen, names = RUNS["link" if own in LINK else room]
    runs = [TESTS / "contract" / f"{one}.py" for one in names]
    stages = [
        Stage("the module's tests", tuple(naming)),
        Stage("tests of a part", tuple(parts)),
        Stage("runs", tuple(runs), chosen),
    ]
    return [stage for stage in stages if stage.files]


def _names(text: str, name: str, parent: str, own: str) -> bool:
    return name in text or any(line.startswith(f"from {parent} import") and own in line for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
