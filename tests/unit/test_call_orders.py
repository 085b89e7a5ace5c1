"""A call's life, a worker's and a slot's, in the real supervisor: in every order of steps up to a size, and in random ones beyond.

So are the lives of streams (credits, items, users who leave, users who are slow) and of nested calls (their callers give their
places back and take them again, and callers want each other's keys).

`make test` looks at the first states of each case and at some random histories; `make long` at a hundred times as many. That the
explorer finds faults is tested with faults: parts of the supervisor that do nothing.
"""

import logging
import random
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest

from percore import Rate
from percore._calls import nested as nested_calls
from percore._calls import streams
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
    rates,
)
from tests.counts import times
from tests.unit import call_orders
from tests.unit.call_orders import Case, explore, is_alike, stroll, watched, world
from tests.unit.call_shapes import Shape
from tests.unit.stepped_calls import Ask

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
    "reload of two workers": Case({"reloads": 1}, calls=2),
    "a worker more": Case({"grows": 1}, calls=2),
    "a worker less": Case({"shrinks": 1}, calls=2),
    "a timer of two workers": Case({"time": 1}, calls=2, of_call={"hard_timeout": 1.0}),
    "SIGTERM of two workers": Case({"drains": 1}, calls=2, kind=Kind.THREAD),
}
"""Two workers and three calls, or one and two; what may happen, and how often."""

LOG: Final = logging.getLogger("tests.call_orders")
"""Tells how many states each case has: `PYTEST_ARGS="-k in_every_order_of_steps_each -o log_cli=true --log-cli-level=INFO"`."""

SMALL: Final = Case({"dies": 1}, calls=2)

FIRST: Final = frozenset({0})
BOTH: Final = frozenset({0, 1})
ANY: Final = (Ask(),)
CROSSED: Final = (Ask(key="a"), Ask(key="b"))
STREAMS: Final[dict[str, Case]] = {
    "streams": Case({"dies": 1, "leaves": 1, "closes": 1, "time": 2}, 2, 1, streams=BOTH),
    "a stream and a call": Case({"dies": 1, "leaves": 1, "cancels": 1, "time": 2}, 2, 1, streams=FIRST, items=4),
    "streams nobody closes": Case({"forgets": 1, "cancels": 1, "cuts": 1, "time": 2}, 2, 1, streams=BOTH),
    "streams that fail": Case({"leaves": 1, "raises": 1, "forgets": 1}, 1, 1, streams=FIRST),
    "streams and reload": Case({"reloads": 1, "dies": 1, "leaves": 1, "time": 2}, 2, 1, streams=FIRST),
    "streams and SIGTERM": Case({"drains": 1, "sticks": 1, "leaves": 1, "cuts": 1}, 2, streams=BOTH),
    "streams and max_tasks": Case({"dies": 1, "leaves": 1}, 2, 1, streams=FIRST, options={"max_tasks_per_worker": 1}),
    "streams and keys": Case({"dies": 1, "leaves": 1, "drains": 1}, streams=BOTH, of_call={"key": "k"}, options={"per_key": 1}),
    "streams and rate": Case({"dies": 1, "time": 3}, 2, 1, streams=BOTH, of_call={"key": "k", "rate": Rate(1, per=1.0)}),
}
NESTED: Final[dict[str, Case]] = {
    "nested": Case({"asks": 2, "dies": 1, "closes": 1}, 2, 1, asks=ANY),
    "nested in two workers": Case({"asks": 2, "dies": 1, "cancels": 1, "drops": 1, "closes": 1}, 2, asks=ANY),
    "nested twice": Case({"asks": 3, "dies": 1, "cuts": 1}, 1, 1, asks=ANY, depth=2),
    "nested of both kinds": Case({"asks": 2, "dies": 1}, 2, 1, asks=(Ask(), Ask(Kind.THREAD)), depth=2),
    "nested and reload": Case({"asks": 2, "reloads": 1, "dies": 1}, 1, 1, asks=ANY),
    "nested and max_tasks": Case({"asks": 2, "dies": 1}, 2, 1, asks=ANY, options={"max_tasks_per_worker": 1}),
    "nested and retries": Case({"asks": 2, "dies": 2}, 1, asks=(Ask(retries=1),)),
    "nested and hard_timeout": Case({"asks": 2, "time": 4, "dies": 1}, 2, 1, asks=ANY, of_call={"hard_timeout": 1.0}),
    "nested and rate": Case({"asks": 2, "dies": 1, "time": 3}, 2, 1, asks=ANY, of_call={"key": "k", "rate": Rate(1, per=1.0)}),
    "crossed keys": Case({"asks": 2, "dies": 1, "cancels": 1}, 2, asks=CROSSED, keys=("a", "b"), options={"per_key": 1}),
    "crossed keys that move": Case({"asks": 2, "dies": 1, "drains": 1, "reloads": 1}, 2, asks=CROSSED, keys=("a", "b")),
    "callers with keys": Case(
        {"asks": 3}, 2, 1, options={"concurrency": 2, "per_key": 1}, keys=("k", "other"), asks=(Ask(key="k"), Ask(key="other"))
    ),
    "a retry of a caller": Case({"asks": 1, "closes": 1, "dies": 1, "paces": 1}, 1, asks=(Ask(key="k"),), of_call={"retries": 1}),
    "nested with hard_timeout": Case({"asks": 2, "time": 4, "cancels": 1, "sticks": 1}, 1, asks=(Ask(hard_timeout=1.0),)),
    "nested with queue_timeout": Case({"asks": 2, "time": 3, "dies": 1, "reloads": 1}, 1, 1, asks=(Ask(queue_timeout=1.0),)),
    "nested that are left": Case({"asks": 2, "abandons": 1, "raises": 1, "cuts": 1}, 1, asks=ANY, depth=2),
    "nested streams": Case({"asks": 1, "dies": 1, "shuts": 1, "drops": 1, "closes": 1}, 1, asks=(Ask(prefetch=1),), items=2),
    "nested streams and calls": Case({"asks": 3, "dies": 1, "drops": 1}, 1, 1, asks=(Ask(prefetch=2), Ask()), depth=2),
    "nested streams and SIGTERM": Case(
        {"asks": 2, "reloads": 1, "drains": 1, "shuts": 1}, 1, 1, asks=(Ask(Kind.THREAD, prefetch=1),), items=2
    ),
}
"""In each worker one place for coroutines and one thread. A generator yields three items, of which two may wait."""

EVERY: Final = CASES | STREAMS | NESTED

WHOLE: Final = {
    ("calls", Kind.TASK),
    ("retries", Kind.TASK),
    ("reload of two workers", Kind.TASK),
    ("a worker more", Kind.TASK),
    ("a worker less", Kind.TASK),
    ("a timer of two workers", Kind.TASK),
    ("SIGTERM of two workers", Kind.THREAD),
    ("streams that fail", Kind.TASK),
    ("streams that fail", Kind.THREAD),
    ("nested", Kind.TASK),
    ("callers with keys", Kind.THREAD),
}
"""The cases of which `make long` looks at all states. Of the others it looks at the first ones, in which less has happened."""

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

SOME: Final = {"dies": 1, "drains": 1, "cancels": 1, "closes": 1, "reloads": 1, "shrinks": 1, "grows": 1, "time": 3, "sticks": 1}
"""Events that leave a history time for nested calls."""

SEVERAL: Final[tuple[dict[str, Any], ...]] = ({"prefetch": 1}, {"prefetch": 2, "key": "k"}, {"retries": 1}, {"hard_timeout": 1.0})

LARGE: Final[dict[str, Case]] = {
    "calls": Case(ALL, 7, 3, options={"threads": 2, "concurrency": 2}),
    "hard_timeout": Case(ALL, 6, of_call={"hard_timeout": 1.0, "retries": 1}),
    "keys": Case(ALL, 6, options={"per_key": 1}, of_call={"key": "k", "hard_timeout": 1.0, "retries": 1, "backoff": 0.3}),
    "max_tasks_per_worker": Case(ALL, 7, options={"max_tasks_per_worker": 2}, of_call={"retries": 1}),
    "queue_timeout": Case(ALL, 6, of_call={"queue_timeout": 1.0, "retries": 1}),
    "rate": Case(ALL, 6, of_call={"key": "k", "rate": Rate(1, per=0.7), "retries": 1, "queue_timeout": 2.0}),
    "start": Case(ALL, 3, from_start=True),
    "streams": Case(ALL | {"leaves": 1, "forgets": 1, "raises": 1}, 5, streams=frozenset({0, 1, 3})),
    "options of every kind": Case({**ALL, "paces": 2}, 9, options={"threads": 2, "concurrency": 2}, of_call=MIXED),
    "and a limit of each key": Case({**ALL, "paces": 2}, 9, options={"per_key": 1, "max_tasks_per_worker": 3}, of_call=MIXED),
    "nested": Case(ALL | {"asks": 8, "drops": 1, "abandons": 1, "raises": 1}, 4, asks=(*ANY, Ask(Kind.THREAD, retries=1)), depth=3),
    "nested calls and all options": Case(
        {**ALL, "paces": 2, "asks": 8}, 6, options={"per_key": 1}, of_call=MIXED, asks=(Ask(), Ask(key="k"), Ask(key="other"))
    ),
    "nested calls with options": Case(
        SOME | {"asks": 8, "drops": 1, "cuts": 1},
        3,
        asks=(
            Ask(),
            Ask(hard_timeout=1.0),
            Ask(queue_timeout=1.0),
            Ask(retries=1, hard_timeout=1.0),
            Ask(key="k", queue_timeout=1.0),
        ),
        keys=("k",),
        depth=2,
    ),
    "streams and calls": Case(
        SOME | {"leaves": 1, "asks": 6, "shuts": 1}, 4, of_call=SEVERAL, asks=(Ask(), Ask(prefetch=1), Ask(key="k", prefetch=2))
    ),
    "nested streams": Case(
        ALL | {"asks": 6, "drops": 1, "shuts": 2}, 4, asks=(Ask(prefetch=2), Ask(Kind.THREAD, prefetch=1), Ask()), depth=2
    ),
    "crossed keys": Case(ALL | {"asks": 6}, 5, asks=CROSSED, keys=("a", "b", "a", "b", "c"), options={"per_key": 1}, depth=2),
}
"""Histories of everything at once are too many to look at all of them: these are random."""


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with watched():
        yield


def strolls(case: Case, count: int) -> int:
    """Take so many random histories. Return how many steps they had."""
    chance = random.Random(1)
    return sum(len(stroll(case, chance.randrange)) for _ in range(count))


@pytest.mark.long
@pytest.mark.timeout(times(50, 3000))
@pytest.mark.parametrize("cases", [CASES, STREAMS, NESTED], ids=["calls", "streams", "nested"])
def test_in_every_order_of_steps_each_call_ends_and_is_told_the_truth(cases: dict[str, Case], subtests: pytest.Subtests) -> None:
    chance = random.Random(1)
    for name, case in cases.items():
        kinds = [case.kind] if cases is CASES else [Kind.TASK, Kind.THREAD][: times(1, 2)]
        for kind in kinds:
            with subtests.test(case=name, kind=kind):
                is_whole = (name, kind) in WHOLE
                found = explore(case._replace(kind=kind), times(10, 100_000 if is_whole else 5000))
                looked = "all" if found.is_whole else "the first"
                LOG.info("%s, %s: %s %s states", name, "threads" if kind else "tasks", looked, f"{found.states:,}")
                assert found.states >= 10
                assert times(1, 0) or found.is_whole or not is_whole
                for one, other in chance.sample(found.alike, min(len(found.alike), 100)):
                    assert is_alike(case._replace(kind=kind), one, other), f"not one state: {', '.join(one)} -- {', '.join(other)}"


@pytest.mark.long
def test_two_paths_to_one_state_have_the_same_future(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """That would be noticed if a state left something out that decides: here a part of it."""
    monkeypatch.setattr(call_orders, "SAMPLED", 1)
    assert all(is_alike(SMALL, *pair) for pair in explore(SMALL, times(20, 1000)).alike)
    for part in ("_worker", *("_user", "_member")[: times(0, 2)]):
        with subtests.test(without=part), monkeypatch.context() as patch:
            patch.setattr(Shape, part, lambda *_: None)
            alike = explore(SMALL, times(10, 200)).alike
            assert not all(is_alike(SMALL, *pair) for pair in alike)


def test_a_fault_of_one_worker_alone_is_found(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """Workers count as equal in a state. A fault that only one of them has must be found all the same, whichever it is."""
    end = deaths.Deaths._end
    for index in (0, 1):
        with subtests.test(index=index), monkeypatch.context() as patch:
            patch.setattr(deaths.Deaths, "_end", lambda self, one, *rest: one.index != index and end(self, one, *rest))  # noqa: B023
            with pytest.raises(AssertionError):
                explore(SMALL, 1000)


@pytest.mark.long
@pytest.mark.timeout(times(50, 3000))
def test_in_random_histories_each_call_ends_and_is_told_the_truth(subtests: pytest.Subtests) -> None:
    for kind in (Kind.TASK, Kind.THREAD):
        for name, case in LARGE.items():
            with subtests.test(case=name, kind=kind):
                assert strolls(case._replace(kind=kind), times(10, 5000)) > 100


def test_a_close_that_waits_for_nothing_begins_no_stream() -> None:
    """It ends the last stream first: a worker with one thread would begin it when the one before ends."""
    case = EVERY["streams nobody closes"]._replace(kind=Kind.THREAD, calls=6, streams=frozenset(range(6)))
    with world(case, ()) as one:
        for number in range(6):
            one.take("submits")
            one.take(f"takes {number}")
            while one.workers[0].inbox:
                one.take("w0.1 reads")
            if not number:
                one.take("w0.1 begins")
        one.take("cuts")
        while names := [name for name, _ in one.fair() if name.startswith("w0.1 ") and "yields" not in name]:
            one.take(next((name for name in names if name != "w0.1 reads"), "w0.1 reads"))  # its thread is quick
        one.finish()
        assert one.ran == {0: 1}


FOUND: Final[dict[str, tuple[str, str]]] = {
    "a close did not wait for the retry of a caller that died while its nested call waited": (
        "a retry of a caller",
        (
            "submits, w0.1 reads, w0.1 reads, paces later, asks w0.1 0 0, s hears w0.1, "  # 1. the caller leaves the dead worker
            "closes, dies w0.1, w0.1 is gone"  # 2. its nested call is cancelled, and the close looks  3. the caller is queued again
        ),
    ),
    "a worker that was being buried was asked to end": (
        "nested",
        (
            "submits, w0.1 reads, submits, w0.1 reads, asks w0.1 0 0, s hears w0.1, w0.1 reads, closes, asks w0.1 1 0, "
            "s hears w0.1, w0.1 reads, s hears w0.1, w0.1 answers 0.0, dies w0.1, w0.1 is gone"
        ),
    ),
    "a timer of a stream outlived its runner": (
        "streams",
        "submits, takes 0, submits, closes, w0.1 reads, takes 1, w0.1 reads",
    ),
}
"""Histories in which something was wrong once, each with its case."""


def test_histories_in_which_something_was_wrong(subtests: pytest.Subtests) -> None:
    for name, (case, path) in FOUND.items():
        with subtests.test(name), world(EVERY[case], path.split(", ")) as one:
            one.finish()


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
    Fault(rates.Gate, "left", "rate"),
    Fault(rates.Rates, "_open", "rate"),
    Fault(streams.StreamCall, "_grant", "streams"),
    Fault(streams.StreamCall, "left", "streams and SIGTERM"),
    Fault(streams.StreamCall, "_look", "a stream and a call"),
    Fault(nested_answers.NestedAnswers, "_come_back", "nested"),
    Fault(nested_answers.NestedAnswers, "resume", "nested"),
    Fault(nested_answers.NestedAnswers, "end", "nested in two workers"),
    Fault(nested.Nested, "buried", "nested in two workers"),
    Fault(nested.Nested, "_knot", "callers with keys"),
    Fault(nested.Nested, "_close", "nested streams"),
    Fault(nested.Nested, "_drop", "nested in two workers"),
    Fault(nested.Nested, "_grant", "nested streams"),
    Fault(nested_calls.NestedCall, "cancel", "nested in two workers"),
]


def test_the_explorer_finds_faults(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for owner, method, case in FAULTS:
        with subtests.test(fault=method), monkeypatch.context() as patch:
            patch.setattr(owner, method, lambda *_, **__: None)
            with pytest.raises(AssertionError):
                strolls(EVERY[case], 400)
