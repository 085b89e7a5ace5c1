"""Clocks of machines that run for years, months of statistics, and ids that begin anew while calls are under way.

The supervisor is the real one, over workers that do one thing at a time (`stepped_workers`).
"""

import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from percore import Rate
from percore._common.measuring import Histogram
from percore._protocol.messages import ID_MASK, Kind
from percore._scheduler.buckets import Bucket
from percore._supervisor.pool_worker import PoolWorker
from tests import jobs
from tests.counts import times
from tests.unit.call_orders import Case, World, stroll, watched, world
from tests.unit.stepped_calls import Ask
from tests.unit.stepped_loop import StepLoop
from tests.unit.test_growth import HOUR, serve

pytestmark = pytest.mark.asyncio_only

YEARS: Final = (1e8, 1e9)
"""Seconds for which a machine has run: three years, and thirty, in which the clock's floats are 0.1 microseconds apart."""

EVENTS: Final = {"dies": 2, "cancels": 2, "closes": 1, "reloads": 1, "time": 8, "suspends": 1}
TIMED: Final[dict[str, Case]] = {
    "rate": Case(EVENTS, 6, of_call={"key": "k", "rate": Rate(1, per=0.7), "retries": 1, "queue_timeout": 2.0}),
    "limits": Case(EVENTS, 6, of_call=({"hard_timeout": 1.0}, {"queue_timeout": 1.0}, {"retries": 2, "backoff": 0.3})),
    "nested": Case(EVENTS | {"asks": 4}, 4, asks=(Ask(hard_timeout=1.0), Ask(queue_timeout=1.0), Ask(prefetch=1))),
}


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with watched():
        yield


def histories(case: Case, count: int) -> None:
    chance = random.Random(7)
    for _ in range(count):
        stroll(case, chance.randrange)


# Years


@pytest.mark.long
@pytest.mark.timeout(times(50, 1500))
@pytest.mark.parametrize("age", YEARS)
def test_limits_and_rates_hold_on_a_machine_that_has_run_for_years(
    age: float, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    made = StepLoop.__init__

    def later(loop: StepLoop) -> None:
        made(loop)
        loop.now = age

    monkeypatch.setattr(StepLoop, "__init__", later)
    for name, case in TIMED.items():
        for kind in (Kind.TASK, Kind.THREAD):
            with subtests.test(case=name, kind=kind):
                histories(case._replace(kind=kind), times(5, 2000))


@pytest.mark.parametrize("rate", [Rate(1000, per=1.0), Rate(50, per=0.05), Rate(7, per=3600.0), Rate(100, per=1.0, burst=100)])
def test_a_rate_is_used_up_and_not_exceeded_after_years(rate: Rate) -> None:
    """The timer comes at the time that the bucket says, to the millisecond, and calls begin at once."""
    counts = []
    for age in (0.0, *YEARS):
        bucket, now = Bucket(rate), age
        began: list[float] = []
        while len(began) < 20 * rate.n:
            if bucket.free(now, 0) > 0:
                bucket.began(now)
                began.append(now)
            else:
                now = max(now + 1e-3, bucket.shut(now, 0))
                bucket.opened(now)
        counts.append(now - age)
        assert all(after - first >= rate.per - 1e-6 for first, after in zip(began, began[rate.n :], strict=False))
    assert counts[1:] == pytest.approx([counts[0]] * len(YEARS), rel=0.02, abs=0.01)


# Months of statistics


@pytest.mark.long
def test_the_statistics_of_months_add_up() -> None:
    """Every hour calls end, fail, are cancelled or die with their worker; every week the machine is suspended."""
    with world(Case({}, options={"concurrency": 4, "threads": 4}), ()) as one:
        chance, hours, ended = random.Random(3), times(40, 24 * 90), 0
        before = one.runner.statistics()
        for hour in range(hours):
            ended += an_hour(one, chance)
            if hour % 168 == 20:
                one.loop.suspend()
                one.loop.settle()
                serve(one)
            now = one.runner.statistics()
            check_sums(now)
            assert now.functions[0].ended == now.done == ended
            assert now.done >= before.done
            assert now.failed >= before.failed
            assert now.restarts >= before.restarts
            before = now
        assert (before.running, before.queued) == (0, 0)


def test_a_cancelled_call_that_dies_with_its_worker_counts_in_all_statistics() -> None:
    path = ["submits", "w0.1 reads", "w0.1 reads", "cancels 0", "dies w0.1", "w0.1 is gone"]
    with world(Case({"cancels": 1, "dies": 1}), path) as one:
        now = one.runner.statistics()
        check_sums(now)
        assert (now.functions[0].ended, now.done, now.failed) == (1, 1, 1)


def an_hour(one: World, chance: random.Random) -> int:
    """Let some calls end in some way, and an hour pass. Return how many began."""
    one.ran.clear()
    with one.loop.running():
        calls = [one.runner.submit(jobs.aecho, number) for number in range(chance.randrange(1, 6))]
        if chance.random() < 0.3:
            calls[-1].cancel()
    victim = chance.choice(one.workers)
    while victim.inbox:
        victim.read()
    for run in list(victim.running.values()):
        if chance.random() < 0.3:
            run.fail()
    if chance.random() < 0.2:
        victim.kill()
    begun: set[Any] = set(one.ran)
    for _ in range(1000):
        begun |= set(one.ran)
        steps = [step for _, step in one.fair()]
        if not steps:
            break
        with one.loop.running():
            steps[0]()
        one.loop.settle()
        begun |= set(one.ran)
    one.loop.now += HOUR
    one.loop.settle()
    serve(one)
    for call in calls:
        assert call.done()
        if not call.cancelled():
            call.exception()
    return len(begun)


def check_sums(now: Any) -> None:
    (of_function,) = now.functions
    assert of_function.begun == of_function.ended + of_function.running
    assert now.done == sum(worker.done for worker in now.workers)
    assert of_function.ended == sum(one.ended for worker in now.workers for one in worker.functions)
    assert of_function.failed == sum(one.failed for worker in now.workers for one in worker.functions)


def test_percentiles_of_more_calls_than_a_float_can_count_are_right() -> None:
    histogram = Histogram()
    for value, share in ((1000, 50), (2000, 40), (4000, 9), (100_000, 1)):
        histogram.add(value, share * 10**18 + 1)
    found = histogram.percentiles(0.4, 0.8, 0.985, 0.999)
    assert found == pytest.approx([1000, 2000, 4000, 100_000], rel=0.07)
    assert histogram.count == 100 * 10**18 + 4


# Ids


@pytest.mark.long
@pytest.mark.timeout(times(50, 1500))
def test_ids_begin_anew_while_calls_are_under_way(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """Each place begins anew by itself, when its id would need a 49th bit: those of the same worker are under way meanwhile."""
    make = PoolWorker.__init__
    highest: list[int] = []

    def almost_used_up(member: PoolWorker, *given: Any) -> None:
        make(member, *given)
        last = (ID_MASK + 1) // member.stride - 1
        member.free[:] = [(last - place % 2) * member.stride + place for place in (one % member.stride for one in member.free)]
        highest.append(max(member.free))

    monkeypatch.setattr(PoolWorker, "__init__", almost_used_up)
    case = Case(
        {"dies": 1, "cancels": 2, "drains": 1, "time": 2}, 7, 1, options={"concurrency": 2, "threads": 2}, of_call={"retries": 1}
    )
    for kind in (Kind.TASK, Kind.THREAD):
        for asks in ((), (Ask(),)):
            with subtests.test(kind=kind, asks=asks):
                events = case.events | ({"asks": 3} if asks else {})
                histories(case._replace(kind=kind, asks=asks, events=events), times(10, 3000))
    assert ID_MASK - max(highest) < 1 << 16
