"""Changes percore's source by one small fault at a time, and asks whether the unit tests notice.

    python scripts/mutants.py 300 --seed 1 --rooms _scheduler _protocol _transport

Each mutant is a copy of the package in which one expression or statement differs: a comparison, an operator, a number, a condition,
or a statement that is left out. The tests are those of tests/unit that name the changed module, and, for the decisions, those that
run the whole supervisor. A mutant that no test notices survives; the script prints it. Some cannot be noticed, since they change
only how fast something is, or a text.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "src" / "percore"
TESTS: Final = ROOT / "tests" / "unit"
WHOLE: Final = {
    "_scheduler": ["test_call_orders.py"],
    "_protocol": ["test_broken_workers.py"],
    "_transport": ["test_channel_orders.py"],
}
"""Tests of whole parts that a room decides about."""

LONGEST: Final = 120.0
"""Seconds after which a mutant counts as noticed: a test hangs."""

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


def main() -> int:
    """Run the mutants. Return 1 if fewer are noticed than asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="*", default=["_scheduler", "_protocol", "_transport"])
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants are tested at once")
    parser.add_argument("--least", type=float, default=0.0, help="the share that must be noticed")
    asked = parser.parse_args()
    places = [place for room in asked.rooms for path in sorted((SOURCE / room).rglob("*.py")) for place in places_in(path)]
    chosen = random.Random(asked.seed).sample(places, min(asked.count, len(places)))
    print(f"{len(chosen)} of {len(places)} mutants, seed {asked.seed}", flush=True)
    with ThreadPoolExecutor(asked.jobs) as threads:
        modules = sorted({place.module for place in chosen})
        for path, fail in zip(modules, threads.map(lambda path: fails(path, path.read_text()), modules), strict=True):
            if fail:
                print(f"the tests of {path.relative_to(SOURCE)} fail without a mutant")
                return 2
    noticed = 0
    with ThreadPoolExecutor(asked.jobs) as threads:
        for tested, (place, is_seen) in enumerate(zip(chosen, threads.map(is_noticed, chosen), strict=True), 1):
            noticed += is_seen
            if tested % 100 == 0:
                print(f"{noticed} of {tested} noticed", flush=True)
            if not is_seen:
                print(f"survives: {place.module.relative_to(SOURCE)}:{place.line}: {place.change}", flush=True)
    print(f"noticed: {noticed} of {len(chosen)}, {noticed / max(1, len(chosen)):.1%}")
    return int(noticed < asked.least * len(chosen))


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


def is_noticed(place: Place) -> bool:
    """Whether a test fails with this mutant."""
    tree = ast.parse(place.text)
    for number, node in enumerate(ast.walk(tree)):
        if number == place.number:
            _change(node)
    return fails(place.module, ast.unparse(ast.fix_missing_locations(tree)))


def fails(module: Path, text: str) -> bool:
    """Whether a test of a module fails, or hangs, if the module has this text."""
    with tempfile.TemporaryDirectory(prefix="percore-mutant-") as folder:
        copy = Path(folder, "src", "percore")
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        (copy / module.relative_to(SOURCE)).write_text(text)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "timeout=30",
            *tests_of(module),
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=LONGEST, check=False)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def tests_of(module: Path) -> list[str]:
    """Return the files of the unit tests that name a module, and those of whole parts."""
    room = module.relative_to(SOURCE).parts[0]
    name = ".".join(("percore", *module.relative_to(SOURCE).with_suffix("").parts))
    parent, _, own = name.rpartition(".")
    naming = [path for path in sorted(TESTS.glob("test_*.py")) if _names(path.read_text(), name, parent, own)]
    whole = [TESTS / one for one in WHOLE.get(room, [])]
    return list(map(str, dict.fromkeys([*naming, *whole])))


def _names(text: str, name: str, parent: str, own: str) -> bool:
    return name in text or any(line.startswith(f"from {parent} import") and own in line for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
