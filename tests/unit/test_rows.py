"""Which rows `make test` runs: every way has the tests that differ in it, with a reason. See tests/rows.py."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from percore._common.system import default_start_method
from tests import rows

CONTRACT = Path(__file__).parent.parent / "contract"

LEAST = {
    "uvloop": {"test_cancellation", "test_closing", "test_deaths", "test_map_ends", "test_timeouts", "test_turns"},
    "spawn": {"test_closing", "test_deaths", "test_inside", "test_lives", "test_logs", "test_recycling", "test_usage"},
    "nodes": {"test_batches", "test_buffers", "test_closing", "test_deaths", "test_payloads", "test_share", "test_statistics"},
    "threads": {"test_closing", "test_deaths", "test_lives", "test_nested", "test_stream_ends"},
    "fallbacks": {
        "test_buffers",
        "test_cancellation",
        "test_closing",
        "test_deaths",
        "test_payloads",
        "test_recycling",
        "test_share",
    },
}
"""Launching, exits, descriptors, timers and the order of callbacks: the modules whose subject is what differs."""


def marked() -> dict[str, set[str]]:
    """The modules of the contract that have tests which differ, by way."""
    found: dict[str, set[str]] = {way: set() for way in rows.WAYS}
    for path in CONTRACT.glob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.differs":
                for way in call.args:
                    found[ast.literal_eval(way)].add(path.stem)
    return found


def collected(*arguments: str, **variables: str) -> dict[str, Counter[str]]:
    """How many tests a run would have: of each module, by engine and loop."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    output = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=40, check=True).stdout
    found: dict[str, Counter[str]] = {}
    for path, name in re.findall(r"(\w+)\.py::(.*)", output):
        engine = next((engine for engine in ("fake", "forkserver", "spawn", "nodes", "threads") if engine in name), "none")
        found.setdefault(path, Counter())[f"{engine} uvloop" if "uvloop" in name else engine] += 1
    return found


class Marked:
    """A test with one mark."""

    nodeid = "tests/contract/test_it.py::test_it"

    def __init__(self, mark: pytest.MarkDecorator) -> None:
        self._mark = mark.mark

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [self._mark] if self._mark.name == name else []


def test_every_way_has_its_modules() -> None:
    """Each push runs what differs in a way in that way."""
    found = marked()
    assert set(LEAST) == set(rows.WAYS)
    for way, least in LEAST.items():
        assert least <= found[way], way


@pytest.mark.skipif(default_start_method() != "forkserver", reason="spawned interpreters are the first way here")
def test_the_rows_of_each_run() -> None:
    """What differs runs in the other ways as well, another module does not, and a full run has them all."""
    files = [str(CONTRACT / "test_closing.py"), str(CONTRACT / "test_pending.py")]
    push, full = collected(*files), collected(*files, "--rows=full")
    assert set(push["test_pending"]) - {"none"} == {"fake", "forkserver"}
    ways = {"fake", "forkserver", "forkserver uvloop", "spawn", "nodes", "threads"}
    assert set(push["test_closing"]) - {"none", "none uvloop"} == ways
    assert push["test_closing"]["spawn"] < full["test_closing"]["spawn"]
    for rows_of in full.values():
        assert rows_of["forkserver"] == rows_of["spawn"] == rows_of["nodes"]
        assert rows_of["forkserver uvloop"] == rows_of["spawn uvloop"] >= rows_of["fake uvloop"] > 0


def test_the_rows_without_the_system_s_calls() -> None:
    """A run for the fallbacks has the modules that differ there alone, on spawned interpreters and the fake engine."""
    files = [str(CONTRACT / "test_share.py"), str(CONTRACT / "test_pending.py")]
    (found,) = collected(*files, "--rows=fallbacks", PERCORE_WITHOUT="pidfd,uvloop").values()
    assert set(found) - {"none"} == {"fake", "spawn"}


@pytest.mark.parametrize(
    "mark", [pytest.mark.differs, pytest.mark.differs("uvloop"), pytest.mark.differs("greenlets", because="so")]
)
def test_a_mark_without_a_way_or_a_reason_is_refused(mark: pytest.MarkDecorator) -> None:
    """The reason stands beside the mark."""
    text = r'test_it: differs\(\) takes some of uvloop, spawn, nodes, threads, fallbacks, and because="..."'
    with pytest.raises(pytest.UsageError, match=text):
        rows.differing(cast(pytest.Item, Marked(mark)))
