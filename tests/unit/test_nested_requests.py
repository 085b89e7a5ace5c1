"""The request of a nested call: which bodies of an ASK are one. A worker that sends another one is broken."""

from typing import Any

import pytest

from percore._protocol.messages import BrokenFrame, Kind
from percore._protocol.nested_calls import NestedRequest, RequestOptions

GOOD = NestedRequest(7, Kind.TASK, "fetch", "jobs", "host", False, 0, None, None, (), b"pickle")
OPTIONS = tuple(RequestOptions(1, b"retry", 1.0, 2, None))


def test_what_a_worker_sends(subtests: pytest.Subtests) -> None:
    rights: list[dict[str, Any]] = [
        {},
        {"kind": Kind.THREAD, "key": None, "inherits": True, "pickle": None},
        {"prefetch": 16, "key": ("a", 1, (b"b", None)), "context": {0: 1, "x": "y"}},
        {"options": OPTIONS, "shares": (1, 2**60), "context": b"pickle"},
    ]
    for changes in rights:
        with subtests.test(**changes):
            request = GOOD._replace(**changes)
            assert NestedRequest.checked(tuple(request)) == request


def test_what_no_worker_sends(subtests: pytest.Subtests) -> None:
    """Each field by itself, with all others right: no right one makes up for a wrong one."""
    lies: list[dict[str, Any]] = [
        {"caller": "7"},
        {"kind": 2},
        {"kind": -1},
        {"kind": 2, "prefetch": 5},
        {"kind": "task"},
        {"name": b"fetch"},
        {"module": None},
        {"key": ["a"]},
        {"key": ("a", ["b"])},
        {"key": "k" * 10**6},
        {"key": tuple(range(10_000))},
        {"inherits": 1},
        {"prefetch": -1},
        {"prefetch": 1.0},
        {"options": OPTIONS[:-1]},
        {"options": (*OPTIONS, None)},
        {"options": ()},
        {"context": [1]},
        {"shares": (1, "2")},
        {"shares": (1.0,)},
        {"shares": [1]},
        {"pickle": "text"},
    ]
    for lie in lies:
        with subtests.test(**{name: str(value)[:30] for name, value in lie.items()}), pytest.raises(BrokenFrame):
            NestedRequest.checked(tuple(GOOD._replace(**lie)))
    for body in (None, b"", (), tuple(GOOD)[:-1], (*GOOD, None), list(GOOD)):
        with subtests.test(body=str(body)[:30]), pytest.raises(BrokenFrame):
            NestedRequest.checked(body)
