"""Which callers would wait for each other's keys for ever."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._scheduler.key_waits import Knot, knot

HOLDERS = st.dictionaries(st.integers(0, 5), st.lists(st.integers(10, 16), max_size=3, unique=True), max_size=6)
WANTED = st.dictionaries(st.integers(10, 16), st.sets(st.integers(0, 5), max_size=3), max_size=7)


def found(key: Any, holders: dict[Any, list[Any]], wanted: dict[Any, set[Any]]) -> list[Any]:
    """The callers in the knot, sorted."""
    return sorted({one.caller for one in knot(key, lambda name: holders.get(name, ()), lambda call: wanted.get(call, set()))})


@pytest.mark.parametrize(
    ("holders", "wanted", "stuck"),
    [
        ({}, {}, []),
        ({"a": ["A"]}, {}, []),
        ({"a": ["A"]}, {"A": {"a"}}, ["A"]),
        ({"a": ["A"], "b": ["B"]}, {"A": {"b"}}, []),
        ({"a": ["A"], "b": ["B"]}, {"A": {"b"}, "B": {"a"}}, ["A", "B"]),
        ({"a": ["A"], "b": ["B"], "c": ["C"]}, {"A": {"b"}, "B": {"c"}, "C": {"a"}}, ["A", "B", "C"]),
        ({"a": ["A"], "b": ["B"], "c": ["C"]}, {"A": {"b"}, "B": {"c"}, "C": {"d"}}, []),
        ({"a": ["A", "other"], "b": ["B"]}, {"A": {"b"}, "B": {"a"}}, []),
        ({"a": ["A", "other"], "b": ["B"]}, {"A": {"b"}, "other": {"b"}, "B": {"a"}}, ["A", "B", "other"]),
        ({"a": ["A"], "b": ["B"]}, {"A": {"b", "x"}, "B": {"a", "x"}}, ["A", "B"]),
        ({"a": ["A"], "b": ["B"], "c": ["C"]}, {"A": {"b"}, "B": {"c"}, "C": {"b"}}, ["A", "B", "C"]),
    ],
    ids=["free", "held", "self", "chain", "two", "three", "free end", "another holder", "all holders", "one of many", "beyond"],
)
def test_a_knot(holders: dict[str, list[str]], wanted: dict[str, set[str]], stuck: list[str]) -> None:
    assert found("a", holders, wanted) == stuck


def test_a_knot_tells_what_each_caller_holds_and_never_gets() -> None:
    holders: dict[Any, list[str]] = {"a": ["A"], "b": ["B"]}
    wanted: dict[str, set[Any]] = {"A": {"b", "free"}, "B": {"a"}}
    assert knot("a", lambda name: holders.get(name, ()), wanted.__getitem__) == [Knot("a", "A", {"b"}), Knot("b", "B", {"a"})]


def ends(holders: dict[int, list[int]], wanted: dict[int, set[int]]) -> Callable[[int], bool]:
    """Let calls end, one after the other, as long as any can. Return whether a key is free at some time."""
    left = {call for calls in holders.values() for call in calls}

    def is_free(key: int) -> bool:
        calls = holders.get(key, [])
        return not calls or not left.issuperset(calls)

    while can := [call for call in left if all(map(is_free, wanted.get(call, ())))]:
        left.discard(can[0])
    return is_free


@given(HOLDERS, WANTED)
def test_a_knot_is_what_remains_when_all_have_ended_that_can(holders: dict[int, list[int]], wanted: dict[int, set[int]]) -> None:
    is_free = ends(holders, wanted)
    for key in range(6):
        assert bool(found(key, holders, wanted)) is not is_free(key)
