"""Every fault that percore has to survive has a test that carries its id in its name: `test_k3_...`.

The letters: K deaths of workers, P death of the supervisor, and signals, S serialisation, B boot, C cancellation, X close, misuse,
T recycling, M maps, L threads that are all taken, R memory, rings and limits, V what others can do.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
IDS = [
    *(
        f"{letter}{number}"
        for letter, last in {"k": 16, "p": 9, "s": 8, "b": 5, "c": 6, "x": 7, "m": 3, "r": 7}.items()
        for number in range(1, last + 1)
    ),
    "t3",
    "l3",
    "r9",
    "v9",
    "v10",
    "v11",
    "v13",
]


@cache
def carried() -> Counter[str]:
    """How many tests carry each id."""
    name = re.compile(r"^ *(?:async )?def test_([a-z]\d+)_", re.MULTILINE)
    return Counter(found for path in TESTS.rglob("test_*.py") for found in name.findall(path.read_text()))


def test_each_fault_has_a_test(subtests: pytest.Subtests) -> None:
    for fault in IDS:
        with subtests.test(fault=fault):
            assert carried()[fault] > 0


def test_no_test_carries_an_id_that_does_not_exist() -> None:
    assert set(carried()) <= set(IDS)
