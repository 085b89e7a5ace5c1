"""Nothing that the supervisor keeps grows with the work it has done, and no step on its loop with the work that waits.

The supervisor is the real one; its workers do one thing at a time (`stepped_workers`), and its clock is the test's, so months pass.
"""

import gc
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from percore import Rate, RunnerBroken
from percore._protocol.messages import Kind
from percore._scheduler.keys import KEPT
from percore._supervisor import call_registry
from tests import jobs
from tests.contract import stream_jobs
from tests.counts import times
from tests.unit.call_orders import Case, World, stroll, watched, world

pytestmark = pytest.mark.asyncio_only

_CONTAINERS: Final = (dict, list, set, deque)
MOST_CALLS: Final = 30_000
"""Calls of functions in one iteration of the loop: 50 ms would be several times as many."""
HOUR: Final = 3600.0


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with watched():
        yield


@contextmanager
def two_workers(**options: Any) -> Iterator[World]:
    with world(Case({}, options={"concurrency": 4, "threads": 4, **options}), ()) as one:
        yield one


def sizes(root: object) -> Counter[str]:
    """How many elements the containers of percore's objects have that the root refers to, by class and attribute."""
    gc.collect()  # a key and its lanes refer to each other
    found: Counter[str] = Counter()
    todo, seen = [root], {id(root)}
    while todo:
        thing = todo.pop()
        if type(thing).__module__.startswith("percore"):
            for name, value in _attributes(thing):
                if isinstance(value, _CONTAINERS):
                    found[f"{type(thing).__name__}.{name}"] += len(value)
        for other in gc.get_referents(thing):
            kind = type(other)
            is_own = kind.__module__.startswith("percore") or kind in (*_CONTAINERS, tuple)
            if is_own and id(other) not in seen:
                seen.add(id(other))
                todo.append(other)
    return found


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def grown(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    """What has grown by more than a few elements."""
    return {name: (before[name], count) for name, count in after.items() if count > before[name] + 64}


def serve(one: World) -> None:
    """Let the workers do all that they can, and forget what the model has noted of calls that have ended."""
    for _ in range(10_000):
        steps = [step for name, step in one.fair() if not name.startswith("takes ")]
        if not steps:
            break
        with one.loop.running():
            steps[0]()
        one.loop.settle()
    one.check()
    one.ran.clear()
    for worker in one.workers:
        if worker.running or worker.inbox or worker.waiting:
            continue
        for noted in (worker.labels, worker.begun, worker.kinds, worker.deadlines):
            noted.clear()
    one.workers[:] = [worker for worker in one.workers if worker.state != "gone"]


def calls_of_all_kinds(one: World, numbers: range) -> None:
    """Make calls of every kind, with a key of its own for every second one. Cancel some."""
    made = []
    with one.loop.running():
        for number in numbers:
            options: dict[str, Any] = {"retries": number % 2}
            if number % 2:
                options["key"] = f"key {number}"
            if number % 6 == 1:
                options["rate"] = Rate(1, per=60.0)
            if number % 5 == 0:
                options["hard_timeout"] = 60.0
            fn: Any = jobs.aecho if one.kind == Kind.TASK else jobs.echo
            made.append(one.runner.options(**options).submit(fn, number))
        for number, call in enumerate(made):
            if number % 7 == 0:
                call.cancel()
    serve(one)
    assert all(call.done() for call in made)


@pytest.mark.long
def test_nothing_grows_with_calls_and_keys_used_once() -> None:
    with two_workers() as one:
        chunk = 100
        first = 2 * KEPT + 300  # as many keys as are kept
        for start in range(0, first, chunk):
            calls_of_all_kinds(one, range(start, start + chunk))
            one.loop.now += 100.0
        before = sizes(one.supervisor)
        for start in range(first, first + times(500, 200_000), chunk):
            calls_of_all_kinds(one, range(start, start + chunk))
            one.loop.now += 100.0
        assert not grown(before, sizes(one.supervisor))
        assert len(one.supervisor.dispatch.names) <= KEPT + chunk


@pytest.mark.long
def test_nothing_grows_with_streams_that_are_left(subtests: pytest.Subtests) -> None:
    for leaves in ("before it begins", "after an item", "by dropping it"):
        with subtests.test(leaves=leaves), two_workers() as one:
            for _ in range(20):
                leave_a_stream(one, leaves)
            before = sizes(one.supervisor)
            for _ in range(times(150, 10_000)):
                leave_a_stream(one, leaves)
            assert not grown(before, sizes(one.supervisor))
            assert not one.supervisor.closing.enders
            assert len(one.loop.timers()) <= 1


def leave_a_stream(one: World, leaves: str) -> None:
    with one.loop.running():
        stream: Any = one.runner.options(prefetch=2).stream(stream_jobs.anumbers, 0)
    first = one.loop.create_task(anext(stream))
    one.loop.settle()
    if leaves != "before it begins":
        serve(one)
        assert first.result() == 0
    closing = one.loop.create_task(stream.aclose()) if leaves != "by dropping it" else None
    with one.loop.running():
        del stream
    one.loop.settle()
    serve(one)
    assert closing is None or closing.done()
    assert first.done()
    if not first.cancelled():
        first.exception()


@pytest.mark.long
def test_a_month_of_deaths_changes_nothing() -> None:
    """Every hour a worker dies, of which some had a call; every week the machine is suspended."""
    with two_workers() as one:
        made = []
        before: Counter[str] = Counter()
        hours = times(60, 24 * 30)
        for hour in range(hours):
            with one.loop.running():
                made.append(one.runner.options(retries=3, key="k", rate=Rate(2, per=60.0)).submit(jobs.aecho, hour))
            victim = one.workers[hour % len(one.workers)]
            if victim.inbox and hour % 2:
                victim.read()
            victim.kill()
            serve(one)
            one.loop.now += HOUR
            one.loop.settle()
            serve(one)
            if hour % 168 == 100:
                one.loop.suspend()
                one.loop.settle()
                serve(one)
            if hour == 20:
                before = sizes(one.supervisor)
        assert [call.result() for call in made] == [*range(hours)]
        statistics = one.runner.statistics()
        assert [worker.state for worker in statistics.workers] == ["ready", "ready"]
        assert statistics.restarts == hours
        assert not grown(before, sizes(one.supervisor))


# How much one step does


def most_calls(one: World, step: Callable[[], object]) -> int:
    """How many functions the busiest iteration of the loop calls that this step causes."""
    most = count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    loop: Any = one.loop
    once = loop._run_once

    def counted() -> None:
        nonlocal most, count
        count = 0
        once()
        most = max(most, count)

    loop._run_once = counted
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with loop.running():
            step()
        most = count
        loop.settle()
    finally:
        sys.setprofile(before)
        del loop._run_once
    return most


def in_turn(*steps: Callable[[], object]) -> Callable[[], object]:
    return lambda: [step() for step in steps]


def steps_of(one: World, waiting: list[Any]) -> dict[str, Callable[[], object]]:
    first, second = one.workers
    return {
        "submit": lambda: one.runner.options(key="another").submit(jobs.aecho, 0),
        "cancel": waiting[-1].cancel,
        "answer": in_turn(lambda: next(iter(first.running.values())).answer(), first.channel.receive),
        "SIGTERM": in_turn(second._drain, second.channel.receive),
        "death": in_turn(first.kill, first.exit),
        "statistics": one.runner.statistics,
        "close": lambda: one.begin_soon("cuts", one.runner.aclose(grace=0)),
    }


@pytest.mark.long
def test_no_step_takes_longer_because_many_calls_wait(subtests: pytest.Subtests) -> None:
    for has_keys in (False, True):
        with two_workers() as one:
            waiting = []
            with one.loop.running():
                for number in range(times(3000, 300_000)):
                    view = one.runner.options(key=number) if has_keys else one.runner
                    waiting.append(view.submit(jobs.aecho, number))
            for worker in one.workers:
                while worker.inbox:
                    worker.read()
            for name, step in steps_of(one, waiting).items():
                with subtests.test(step=name, has_keys=has_keys):
                    assert most_calls(one, step) < MOST_CALLS
            one.calls[:] = waiting
            with subtests.test("the close ends them all", has_keys=has_keys):
                assert all(call.done() for call in waiting[times(3000, 300_000) // 10 :])


# Time in which nobody runs


def test_l4_a_worker_that_does_nothing_for_a_week_is_not_killed() -> None:
    """No limit was asked for: it may be stopped, or have no CPU."""
    with two_workers() as one:
        with one.loop.running():
            calls = [one.runner.submit(jobs.aecho, number) for number in range(2)]
        one.loop.settle()
        slow = one.workers[0]
        slow.stick()
        for _ in range(7 * 24):
            one.loop.now += HOUR
            one.loop.settle()
            serve(one)
        assert (slow.state, one.runner.statistics().restarts) == ("serving", 0)
        slow.is_stuck = False
        serve(one)
        assert sorted(call.result() for call in calls) == [0, 1]


@pytest.mark.parametrize("seconds", [61.0, 7 * 24 * HOUR])
def test_l5_a_loop_that_stands_still_costs_no_worker_and_no_call(seconds: float) -> None:
    """Workers go on meanwhile. Their outcomes are read after the timers, which are late: so uvloop does after a slow reader."""
    with two_workers(blocked_after=1.0) as one:
        with one.loop.running():
            limited = one.runner.options(hard_timeout=60.0, retries=1)
            calls = [(limited if number % 2 else one.runner).submit(jobs.aecho, number) for number in range(6)]
        one.loop.settle()
        for worker in one.workers:
            while worker.inbox:
                worker.read()
            for run in list(worker.running.values()):
                run.answer()
        one.loop.now += seconds
        one.loop.settle()
        serve(one)
        assert [call.result() for call in calls] == [*range(6)]
        assert one.runner.statistics().restarts == 0


def test_calls_that_wait_at_a_close_end_in_pieces_whatever_happens_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece ends one call: calls of many keys, retries and plain ones, cancellations, deaths and a second close."""
    monkeypatch.setattr(call_registry, "PIECE", 1)
    chance = random.Random(3)
    case = Case({"dies": 2, "cancels": 3, "closes": 1, "cuts": 1, "drains": 1}, 9, keys=("a", "b", "a"), of_call={"retries": 1})
    for kind in (Kind.TASK, Kind.THREAD):
        for workers in (1, 2):
            one = case._replace(kind=kind, workers=workers, options={"concurrency": 1, "threads": 1})
            for _ in range(20):
                stroll(one, chance.randrange)


def test_calls_end_in_pieces_when_no_worker_can_be_started_any_more() -> None:
    with two_workers() as one:
        count = 2 * call_registry.PIECE + 10
        with one.loop.running():
            waiting = [one.runner.submit(jobs.aecho, number) for number in range(count)]
        supervisor = one.supervisor
        with one.loop.running():
            supervisor.fail(RunnerBroken(10, None, "on purpose"))
        ended = sum(call.done() for call in waiting)
        assert ended == call_registry.PIECE
        one.loop.settle()
        assert [type(call.exception()) for call in waiting if call.done()] == [RunnerBroken] * (count - 8)
        serve(one)  # those in the workers
        assert all(call.done() for call in waiting)
