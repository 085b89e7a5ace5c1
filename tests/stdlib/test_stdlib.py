"""CPython's own tests of ProcessPoolExecutor, run on LoopPoolExecutor by this interpreter. `make stdlib` runs them under all."""

import json
import os
import unittest
from functools import cache

import pytest

from tests.stdlib import harness
from tests.stdlib.left_out import LEFT_OUT
from tests.stdlib.program import METHODS, PARTS, Result


@cache
def names(method: str) -> tuple[str, ...] | harness.Absent:
    try:
        return tuple(harness.names(method))
    except harness.Absent as absent:
        return absent


@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", PARTS)
def test_cpythons_own_tests_pass(part: str, method: str) -> None:
    wanted = names(method)
    if isinstance(wanted, harness.Absent):
        pytest.skip(str(wanted))
    # Before Python 3.12 all are in one module: there they run as one.
    mine = [name for name in wanted if name.startswith(f"{part}.")] or (list(wanted) if part == PARTS[0] else [])
    _, wrong = harness.judge(method, mine)
    assert wrong == []


def test_a_test_that_takes_too_long_or_ends_its_process_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(
        [
            ([("began", "a", ""), ("passed", "a", ""), ("began", "b", "")], "took too long"),
            ([("began", "c", "")], "crashed"),
            ([], "crashed"),
        ]
    )
    monkeypatch.setattr(harness, "_run", lambda *_: next(told))
    report = harness.run("percore", "fork", ["a", "b", "c", "d"])
    assert report.outcomes == {"a": "passed", "b": "took too long", "c": "crashed", "d": "failed"}


def test_a_test_on_the_list_must_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"test_x.Some.{LEFT_OUT[0].test}"
    lines = [("began", name, ""), ("passed", name, "")]
    monkeypatch.setattr(harness, "_run", lambda *_: (lines, "crashed"))
    _, wrong = harness.judge("fork", [name])
    assert wrong == [f"fork {name} passes, and is left out because: {LEFT_OUT[0].reason}"]


def test_a_test_fails_by_one_of_its_subtests() -> None:
    class Some(unittest.TestCase):
        def runTest(self) -> None:
            for number in range(3):
                with self.subTest(number=number):
                    assert number != 1, "the second"

    read_end, write_end = os.pipe()
    with open(read_end, "rb") as told:
        with open(write_end, "wb"):
            Some().run(Result(write_end))
        began, ended = map(json.loads, told)
    assert (began[0], ended[0]) == ("began", "failed")
    assert "the second" in ended[2]
