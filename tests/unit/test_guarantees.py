"""What percore promises, and the invariants between its modules: each one names the tests that hold it, and these exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join((ROOT / "docs" / "explanation" / name).read_text(encoding="utf-8") for name in ("guarantees.md", "invariants.md"))
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| promise ", "| invariant "))]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_has_its_bound_and_its_test() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        promise, bound, held_by = row.strip("|").split("|")
        assert promise.strip(), row
        assert bound.strip(), row
        assert TEST.search(held_by), row


def test_a_named_test_exists(subtests: pytest.Subtests) -> None:
    for path, name in sorted(set(TEST.findall(PAGE))):
        with subtests.test(path=path, name=name):
            assert (ROOT / path).exists()
            assert name in functions_of(ROOT / path)


def test_every_mention_of_a_test_is_one_that_was_looked_at() -> None:
    assert len(re.findall(r"::test_", PAGE)) == len(TEST.findall(PAGE))
