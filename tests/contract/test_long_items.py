"""Items of a map whose function is known to take long go alone, as calls do: in order, failing, cancelled and dying one by one."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import percore
from percore._calls.calls import PendingCall
from percore._calls.items import Item
from percore._map.in_flight import _MEASURED
from percore._scheduler.windows import Cost
from percore._supervisor.pool_worker import PoolWorker
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log

COUNT = 4 * _MEASURED
"""As many as the first window holds, and a few."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """What is sent, by its type. Every function takes a second, as far as that is known."""

    def send(member: PoolWorker, call: PendingCall) -> None:
        sent[type(call)] += 1
        original(member, call)

    def take_a_second(cost: Cost, *_: Any) -> None:
        cost.seconds = 1.0

    sent: Counter[type] = Counter()
    original = PoolWorker.send
    monkeypatch.setattr(PoolWorker, "send", send)
    monkeypatch.setattr(Cost, "__init__", take_a_second)
    monkeypatch.setattr(Cost, "measured", take_a_second)
    return sent


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("what", [int, jobs.Place, lambda place: [place]], ids=["scalars", "objects", "lists"])
async def test_all_but_a_few_go_alone_and_have_their_results(
    make: MakeRunner, sent: Counter[type], what: Callable[[int], Any], ordered: bool
) -> None:
    async with make(threads=2) as runner:
        inputs = [what(place) for place in range(COUNT)]
        results = await runner.map(jobs.echo, inputs, ordered=ordered)
        assert len(results) == COUNT
        assert all(value in inputs for value in results)
        assert not ordered or results == inputs
        assert (sent.total(), sent[Item]) == (COUNT, COUNT - COUNT // _MEASURED)
        assert (runner.statistics().done, runner.statistics().queued) == (COUNT, 0)


async def test_errors_are_at_their_places(make: MakeRunner, sent: Counter[type]) -> None:
    async with make(2) as runner:
        fn = partial(jobs.odd, KeyError)
        results = await runner.map(fn, range(COUNT), return_exceptions=True)
        assert [type(result) for result in results] == [int, KeyError] * (COUNT // 2)
        with pytest.raises(KeyError, match=r"^\d*[13579]$"):  # of two workers, either's first one may be the first
            await runner.map(fn, range(COUNT))
        assert sent[Item]


async def test_a_map_that_is_left_begins_nothing_more(make: MakeRunner, sent: Counter[type], log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        task = asyncio.create_task(runner.map(partial(jobs.wait_at, log.path, gate.path, 3), range(COUNT)).collect())
        assert await log.take(4) == ["0", "1", "2", "3"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await runner.run(jobs.aecho)  # by then the worker has read that the others are cancelled
        gate.open()
        assert await runner.run(jobs.echo, 1) == 1
        assert log.rest() == []
        assert (runner.statistics().running, runner.statistics().queued) == (0, 0)
        assert sent[Item]


async def test_what_a_worker_has_begun_and_no_more_dies_with_it(make_real: MakeRunner, sent: Counter[type], log: Log) -> None:
    async with make_real(threads=1) as runner:
        results = await runner.map(partial(jobs.die_at, log.path, 20), range(COUNT), return_exceptions=True)
        error = results[20]
        assert isinstance(error, percore.WorkerDied)
        assert (error.call, error.started, error.attempts, error.exitcode) == ("die_at", True, 1, 3)
        # Those before it had ended, but their results had not left the worker yet.
        died = {place for place, result in enumerate(results) if isinstance(result, percore.WorkerDied)}
        assert died == set(range(min(died), 21))
        assert [result for place, result in enumerate(results) if place not in died] == [p for p in range(COUNT) if p not in died]
        assert Counter(map(int, log.rest())) == Counter(range(COUNT))
        assert sent[Item]
