"""A call's life, a worker's and a slot's, in the real supervisor: in every order of steps up to a size, and in random ones beyond.

`make test` looks at the first states of each case and at some random histories; `make long` at a hundred times as many. That the
explorer finds faults is tested with faults: parts of the supervisor that do nothing.
"""

import random
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest

from percore import Rate
from percore._protocol.messages import Kind
from percore._scheduler import dispatch, keys
from percore._supervisor import (
    call_registry,
    closing,
    deaths,
    hard_limits,
    lifecycles,
    nested,
    nested_answers,
    outcomes,
    pool,
    pool_changes,
)
from tests.counts import times
from tests.unit.call_orders import Case, explore, stroll, watched, world

pytestmark = pytest.mark.asyncio_only

CASES: Final[dict[str, Case]] = {
    "calls": Case({"dies": 1, "cancels": 1, "closes": 1}),
    "calls that are cut off": Case({"dies": 1, "cuts": 1, "closes": 1}, calls=2),
    "plain calls": Case({"dies": 1, "cancels": 1, "closes": 1}, kind=Kind.THREAD),
    "start": Case({"sticks": 1, "dies": 1, "fails": 1, "cuts": 1, "closes": 1, "time": 2}, calls=1, from_start=True),
    "reload": Case({"sticks": 1, "dies": 1, "reloads": 1, "closes": 1, "time": 1}, calls=2, workers=1),
    "two reloads": Case({"dies": 1, "reloads": 2, "cuts": 1}, calls=1),
    "resize": Case({"dies": 1, "grows": 1, "shrinks": 1, "closes": 1}, calls=2),
    "hard_timeout": Case({"sticks": 1, "dies": 1, "closes": 1, "time": 4, "cancels": 1}, 2, 1, of_call={"hard_timeout": 1.0}),
    "hard_timeout and reload": Case({"reloads": 1, "closes": 1, "time": 4}, 2, 1, of_call={"hard_timeout": 1.0}),
    "retries": Case({"dies": 2, "closes": 1, "cancels": 1, "time": 1}, 2, 1, of_call={"retries": 1, "backoff": 0.5}),
    "keys": Case({"dies": 1, "closes": 1, "cancels": 1, "reloads": 1}, options={"per_key": 1}, of_call={"key": "k"}),
    "SIGTERM": Case({"sticks": 1, "drains": 1, "dies": 1, "closes": 1, "cuts": 1}, kind=Kind.THREAD),
    "queue_timeout": Case({"dies": 1, "closes": 1, "time": 3, "cancels": 1}, 2, 1, of_call={"queue_timeout": 1.0}),
    "max_tasks_per_worker": Case({"dies": 1, "closes": 1, "cancels": 1}, 3, 1, options={"max_tasks_per_worker": 1}),
    "rate": Case({"dies": 1, "closes": 1, "time": 3, "cancels": 1}, of_call={"key": "k", "rate": Rate(1, per=1.0), "retries": 1}),
    "callers with keys": Case(
        {"asks": 3}, 2, 1, of_call=({"key": "k"}, {"key": "other"}), options={"per_key": 1, "concurrency": 2}
    ),
}
"""Two workers and three calls, or one and two; what may happen, and how often."""

ALL: Final = {
    "sticks": 1,
    "dies": 3,
    "fails": 1,
    "drains": 1,
    "cancels": 3,
    "closes": 1,
    "cuts": 1,
    "reloads": 2,
    "grows": 1,
    "shrinks": 1,
    "time": 8,
    "suspends": 1,
}
MIXED: Final[tuple[dict[str, Any], ...]] = (
    {"key": "k", "rate": Rate(1, per=0.7), "queue_timeout": 3.0},
    {"hard_timeout": 1.0},
    {"key": "k", "hard_timeout": 1.5, "retries": 1, "backoff": 0.3},
    {},
    {"key": "other", "queue_timeout": 1.0, "retries": 1},
    {"key": "k", "retries": 1},
    {"key": "other", "hard_timeout": 1.0},
)
"""Options of calls that share the workers."""

KEYED: Final[tuple[dict[str, Any], ...]] = ({"key": "k"}, {"key": "other"}, {"key": "k", "retries": 1}, {})
SOME: Final = {"dies": 1, "drains": 1, "cancels": 1, "closes": 1, "reloads": 1, "shrinks": 1, "grows": 1, "time": 3, "sticks": 1}
"""Events that leave a history time for nested calls."""

STREAMS: Final[tuple[dict[str, Any], ...]] = ({"prefetch": 1}, {"prefetch": 2, "key": "k"}, {"retries": 1}, {"hard_timeout": 1.0})

LARGE: Final[dict[str, Case]] = {
    "calls": Case(ALL, 7, 3, options={"threads": 2, "concurrency": 2}),
    "hard_timeout": Case(ALL, 6, of_call={"hard_timeout": 1.0, "retries": 1}),
    "keys": Case(ALL, 6, options={"per_key": 1}, of_call={"key": "k", "hard_timeout": 1.0, "retries": 1, "backoff": 0.3}),
    "max_tasks_per_worker": Case(ALL, 7, options={"max_tasks_per_worker": 2}, of_call={"retries": 1}),
    "queue_timeout": Case(ALL, 6, of_call={"queue_timeout": 1.0, "retries": 1}),
    "rate": Case(ALL, 6, of_call={"key": "k", "rate": Rate(1, per=0.7), "retries": 1, "queue_timeout": 2.0}),
    "start": Case(ALL, 3, from_start=True),
    "nested calls": Case({**SOME, "asks": 8}, 3),
    "nested calls with keys": Case({**SOME, "asks": 8, "pulls": 2}, 4, options={"per_key": 1}, of_call=KEYED),
    "streams": Case({**SOME, "asks": 3, "pulls": 4, "leaves": 1}, 4, of_call=STREAMS),
    "nested calls and all options": Case({**ALL, "paces": 2, "asks": 8}, 6, options={"per_key": 1}, of_call=MIXED),
    "options of every kind": Case({**ALL, "paces": 2}, 9, options={"threads": 2, "concurrency": 2}, of_call=MIXED),
    "and a limit of each key": Case({**ALL, "paces": 2}, 9, options={"per_key": 1, "max_tasks_per_worker": 3}, of_call=MIXED),
}
"""Histories of everything at once are too many to look at all of them: these are random."""


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with watched():
        yield


def strolls(case: Case, count: int) -> int:
    """Take so many random histories. Return how many steps they had."""
    chance = random.Random(1)
    return sum(stroll(case, chance.randrange) for _ in range(count))


@pytest.mark.long
def test_in_every_order_of_steps_each_call_ends_and_is_told_the_truth(subtests: pytest.Subtests) -> None:
    for name, case in CASES.items():
        with subtests.test(case=name):
            assert explore(case, times(20, 5000)) >= 20


@pytest.mark.long
def test_in_random_histories_each_call_ends_and_is_told_the_truth(subtests: pytest.Subtests) -> None:
    for kind in (Kind.TASK, Kind.THREAD):
        for name, case in LARGE.items():
            with subtests.test(case=name, kind=kind):
                assert strolls(case._replace(kind=kind), times(20, 5000)) > 100


def test_a_close_waits_for_the_retry_of_a_caller_that_dies_while_its_nested_call_waits() -> None:
    """1. The caller leaves the dead worker  2. its nested call is cancelled, and the close looks  3. the caller is queued again."""
    events = {"asks": 1, "closes": 1, "dies": 1, "paces": 1}
    path = [
        "submits",
        "w0.1 reads",
        "w0.1 reads",
        "paces later",
        "asks w0.1 0 k",
        "s hears w0.1",
        "closes",
        "dies w0.1",
        "w0.1 is gone",
    ]
    with world(Case(events, calls=1, of_call={"retries": 1}), path) as one:
        one.finish()
        assert one.calls[0].result() == 0


class Fault(NamedTuple):
    """A part of the supervisor that does nothing, and the case that shows it."""

    owner: Any
    method: str
    case: str


FAULTS: Final = [
    Fault(deaths.Deaths, "_requeue", "calls"),
    Fault(closing.Closing, "look", "calls"),
    Fault(dispatch.Dispatch, "unseat", "calls"),
    Fault(outcomes.Outcomes, "_returned", "plain calls"),
    Fault(pool_changes.PoolChanges, "look", "reload"),
    Fault(lifecycles.Lifecycles, "look", "hard_timeout"),
    Fault(call_registry.CallRegistry, "again", "retries"),
    Fault(keys.Keys, "left", "keys"),
    Fault(pool.Pool, "stop_timers", "retries"),
    Fault(pool.Pool, "_retire", "reload"),
    Fault(hard_limits.HardLimits, "_step", "hard_timeout"),
    Fault(hard_limits.HardLimits, "look", "hard_timeout"),
    Fault(nested.Nested, "_grant", "streams"),
    Fault(nested.Nested, "_close", "streams"),
    Fault(nested.Nested, "_knot", "callers with keys"),
    Fault(nested_answers.NestedAnswers, "resume", "streams"),
]


def test_the_explorer_finds_faults(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for owner, method, case in FAULTS:
        with subtests.test(fault=method), monkeypatch.context() as patch:
            patch.setattr(owner, method, lambda *_, **__: None)
            with pytest.raises(AssertionError):
                strolls((LARGE | CASES)[case], 400)
