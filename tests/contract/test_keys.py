"""Equal keys are never on two workers at once, at most `per_key` calls of one key run at once, and keys are fair to each other."""

import asyncio
import functools
import itertools
import signal
from collections import Counter
from typing import Any

import pytest

import percore
from percore._scheduler.keys import PIECE
from tests import jobs
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.counts import times
from tests.internals import sent_by, supervisor_of
from tests.waiting import until


class Story:
    """What calls of `jobs.hold` have told."""

    def __init__(self) -> None:
        self.running: Counter[tuple[str, str]] = Counter()
        """By key and pid."""
        self.most: Counter[str] = Counter()
        self.dead: set[int] = set()

    def hear(self, line: str) -> None:
        """Check one line."""
        word, key, pid, _ = line.split()
        if word == "out":
            self.running[key, pid] -= 1
            return
        self.running[key, pid] += 1
        if int(pid) not in self.dead:  # else it has said so before it died, and was heard too late
            pids = {other for (one, other), count in self.running.items() if one == key and count and int(other) not in self.dead}
            assert pids == {pid}, f"key {key} is on workers {pids} at once"
        self.most[key] = max(self.most[key], self.running[key, pid])


async def _key_at(runner: percore.Runner, index: int, beside: Any = None) -> int:
    """A key whose home is this worker."""
    for key in itertools.count():
        if key != beside and (await runner.options(key=key).run(jobs.awhere)).index == index:
            return key
    raise AssertionError


# One worker at a time


@pytest.mark.parametrize("fn", [jobs.hold, jobs.hold_thread])
async def test_calls_of_one_key_are_on_one_worker(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    gate.open()
    story = Story()
    async with make(3, concurrency=4, threads=4) as runner:
        calls = [runner.options(key=i % 5).submit(fn, log.path, gate.path, i % 5, i) for i in range(200)]
        for line in await log.take(400):
            story.hear(line)
        pids = await asyncio.gather(*calls)
        assert all(len({pids[i] for i in range(200) if i % 5 == key}) == 1 for key in range(5))
        assert not len(supervisor_of(runner).dispatch.keys)


async def test_a_map_with_keys(make: MakeRunner, log: Log, gate: Gate) -> None:
    gate.open()
    story = Story()
    async with make(3, concurrency=4) as runner:
        repeated = itertools.repeat(log.path), itertools.repeat(gate.path)
        mapped = runner.map(jobs.hold, *repeated, (i % 7 for i in range(200)), range(200), key=lambda _log, _gate, key, _i: key)
        pids = await mapped
        lines = log.rest()
        for line in lines:
            story.hear(line)
        assert len(lines) == 400
        assert all(len({pids[i] for i in range(200) if i % 7 == key}) == 1 for key in range(7))


async def test_equal_keys_of_maps_and_calls_are_one_key(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=10, per_key=1) as runner:
        first = runner.options(key=1.0).submit(jobs.hold, log.path, gate.path, "k", 0)
        assert (await log.next()).startswith("in k")
        task = asyncio.create_task(
            runner.map(jobs.hold, [log.path] * 3, [gate.path] * 3, ["k"] * 3, range(1, 4), key=lambda *_: True).collect()
        )
        second = runner.options(key=1).submit(jobs.hold, log.path, gate.path, "k", 9)
        await runner.run(jobs.aecho)
        assert log.rest() == []
        gate.open()
        await asyncio.gather(first, task, second)
        story = Story()
        for line in ["in k 0 0", "out k 0 0"]:
            story.hear(line)
        for line in log.rest()[1:]:
            story.hear(line)
        assert story.most["k"] == 1


# per_key


@pytest.mark.parametrize("per_key", [1, 3])
@pytest.mark.parametrize("fn", [jobs.hold, jobs.hold_thread])
async def test_per_key_bounds_calls_of_one_key(make: MakeRunner, log: Log, gate: Gate, per_key: int, fn: Any) -> None:
    story = Story()
    async with make(2, concurrency=20, threads=8, per_key=per_key) as runner:
        calls = [runner.options(key=key).submit(fn, log.path, gate.path, key, i) for i in range(10) for key in ("a", "b")]
        for line in await log.take(2 * per_key):
            story.hear(line)
        assert await runner.run(jobs.echo, 1) == await runner.run(jobs.aecho, 1) == 1  # nobody else is held up
        assert log.rest() == []
        gate.open()
        for line in await log.take(2 * 20 - 2 * per_key):
            story.hear(line)
        await asyncio.gather(*calls)
    assert story.most == {"a": per_key, "b": per_key}


async def test_cancelled_calls_of_a_key_make_way(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, per_key=1) as runner:
        view = runner.options(key="k")
        first = view.submit(jobs.hold, log.path, gate.path, "k", 0)
        await log.next()
        waiting = [view.submit(jobs.hold, log.path, gate.path, "k", i) for i in range(1, 300)]
        for call in waiting[:-1]:
            call.cancel()
        first.cancel()  # it runs: its place is free when it has ended
        said = await log.take(2)
        assert [line.split()[0] for line in said] == ["out", "in"]
        assert said[1].endswith(" 299")
        gate.open()
        await waiting[-1]
        assert runner.statistics().queued == 0


# Fairness and spread


@pytest.mark.long
@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_thousands_of_calls_of_one_key_hold_nobody_up(make: MakeRunner, fn: Any) -> None:
    count = times(3_000, 10_000)
    async with make(2, concurrency=4, threads=2) as runner:
        with sent_by(runner) as sent:
            many = [runner.options(key="many").submit(fn, i) for i in range(count)]
            others = [runner.options(key=f"other {i}").submit(fn, i) for i in range(4)]
            single = runner.submit(fn, 0)
            await asyncio.gather(*others, single)
        assert max(map(sent.index, (*others, single))) < 50
        await asyncio.gather(*many)


async def test_per_key_calls_that_never_end_hold_nobody_up(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, concurrency=5, per_key=2) as runner:
        stuck = [runner.options(key="stuck").submit(jobs.await_, log.path, gate.path, i) for i in range(10_000)]
        await log.take(2)
        assert await asyncio.gather(*(runner.options(key=i).run(jobs.aecho, i) for i in range(100))) == list(range(100))
        for call in stuck[2:]:
            call.cancel()
        gate.open()
        assert await asyncio.gather(*stuck[:2]) == [0, 1]


async def test_many_keys_spread_evenly(make: MakeRunner) -> None:
    async with make(4) as runner:
        where = await runner.map(jobs.awhere_of, range(2000), key=lambda key: key)
        counts = Counter(worker.index for worker in where)
        assert sorted(counts) == [0, 1, 2, 3]
        assert min(counts.values()) > 400


# Deaths


@pytest.fixture(params=[1, PIECE])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many lanes are listed anew at once."""
    monkeypatch.setattr("percore._scheduler.keys.PIECE", request.param)


@pytest.mark.usefixtures("piece")
async def test_waiting_calls_of_a_dead_worker_s_keys_go_on(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=2) as runner:
        key = await _key_at(runner, 0)
        other = await _key_at(runner, 1)
        view = runner.options(key=key)
        calls = [view.submit(jobs.hold, log.path, gate.path, "k", i) for i in range(6)]
        beside = runner.options(key=other).submit(jobs.hold, log.path, gate.path, "other", 0)
        await log.take(3)
        worker_of(runner).kill()
        results = await asyncio.gather(*calls[:2], return_exceptions=True)
        assert [type(result) for result in results] == [percore.WorkerDied] * 2
        assert not beside.done()
        gate.open()
        assert len({*await asyncio.gather(*calls[2:])}) == 1
        await beside
        assert runner.statistics().failed == 2


@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_a_key_moves_only_when_none_of_it_runs(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(2, concurrency=1) as runner:
        key = await _key_at(runner, 0)
        pid = worker_of(runner).pid
        view = runner.options(key=key)
        first = view.submit(jobs.hold, log.path, gate.path, "k", 0)
        await log.next()
        second = view.submit(jobs.hold, log.path, other_gate.path, "k", 1)
        worker_of(runner).kill(signal.SIGTERM)
        while runner.statistics().workers[0].generation == 1 or runner.statistics().workers[0].state != "ready":
            await runner.run(jobs.awhere)
        assert log.rest() == []  # there are free places, but the old worker still has a call of the key
        gate.open()
        assert await first == pid
        assert [line.split()[0] for line in await log.take(2)] == ["out", "in"]
        other_gate.open()
        assert await second != pid


@pytest.mark.usefixtures("piece")
async def test_many_keys_wait_while_the_only_worker_dies(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, concurrency=1) as runner:
        first = runner.options(key="first").submit(jobs.hold, log.path, gate.path, "first", 0)
        calls = [runner.options(key=key).submit(jobs.aecho, key) for key in range(20)]
        await log.next()
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await first
        assert await asyncio.gather(*calls) == list(range(20))
        assert supervisor_of(runner).dispatch.is_settled()


@pytest.mark.usefixtures("piece")
async def test_keys_over_deaths_at_any_time(make: MakeRunner, log: Log, gate: Gate) -> None:
    gate.open()
    story = Story()
    async with make(3, concurrency=3, retries=50, per_key=2) as runner:
        calls = [runner.options(key=i % 6).submit(jobs.hold, log.path, gate.path, i % 6, i) for i in range(120)]
        said = 0
        for index in (0, 1, 2, 1, 0):
            for _ in range(10):
                story.hear(await log.next())
                said += 1
            await until(lambda place: runner.statistics().workers[place].state == "ready", index)
            worker = worker_of(runner, index)
            story.dead.add(worker.pid)
            worker.kill()
        await asyncio.gather(*calls)
        for line in log.rest():
            story.hear(line)
        assert max(story.most.values()) <= 2
        assert not len(supervisor_of(runner).dispatch.keys)


async def test_closing_ends_waiting_calls_of_keys(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, per_key=1)
    await runner.start()
    calls = [runner.options(key=i % 3).submit(jobs.hold, log.path, gate.path, i % 3, i) for i in range(30)]
    await log.take(3)
    await runner.aclose(grace=0)
    assert {type(call.exception()) for call in calls} == {percore.RunnerClosed}


# Recall


@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_a_keyed_call_is_not_recalled_while_its_key_runs_there(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate
) -> None:
    async with make(2, threads=1) as runner:
        key = await _key_at(runner, 0)
        pid = worker_of(runner).pid
        view = runner.options(key=key)
        keyed = [view.submit(jobs.hold_thread, log.path, gate.path, "k", 0)]
        await log.next()
        other = runner.submit(jobs.wait, log.path, other_gate.path, "other")
        assert await log.next() == "other"
        keyed += [view.submit(jobs.hold_thread, log.path, gate.path, "k", i) for i in (1, 2)]
        await runner.run(jobs.aecho)  # an outcome: what may be queued ahead, is
        free = [runner.submit(jobs.wait, log.path, other_gate.path, i) for i in range(6)]
        other_gate.open()
        assert await asyncio.gather(other, *free) == ["other", *range(6)]  # also those behind the keyed ones
        assert sorted(await log.take(6)) == [str(i) for i in range(6)]
        assert log.rest() == []
        gate.open()
        assert await asyncio.gather(*keyed) == [pid] * 3


# Bad keys


async def test_a_key_with_a_map_is_a_type_error(make: MakeRunner) -> None:
    async with make() as runner:
        view = runner.options(key="k")
        for verb in (view.map, view.map_items, view.starmap):
            with pytest.raises(TypeError, match="key=host_of"):
                _ = verb(jobs.aecho, [(1,)])


async def test_an_unhashable_key_is_a_type_error(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match="hashable"):
            runner.options(key=["host"])  # type: ignore[arg-type]
        results = await runner.map(jobs.aecho, [1, 2], key=lambda value: [value], return_exceptions=True)  # type: ignore[arg-type, return-value]
        assert [type(result) for result in results] == [TypeError, TypeError]


class Fickle:
    """A key whose hash changes and whose equality raises, once it was given to percore."""

    def __init__(self) -> None:
        self.hash = 1
        self.is_given = False

    def __hash__(self) -> int:
        if self.is_given and self.hash == 1:
            raise ZeroDivisionError("the hash of a key that was given already")
        return self.hash

    def __eq__(self, other: object) -> bool:
        if self.is_given:
            raise ZeroDivisionError("the equality of a key that was given already")
        return self is other


@pytest.mark.parametrize("new_hash", [1, 2], ids=["raises", "changes"])
@pytest.mark.parametrize("end", ["ends", "is cancelled", "is retried", "dies", "is closed"])
async def test_a_key_is_handled_only_where_it_is_given(make: MakeRunner, log: Log, gate: Gate, end: str, new_hash: int) -> None:
    """Its hash changes, or raises, after `submit`: no worker and no other call hears of that."""
    async with make(per_key=1, concurrency=3, kill_after=0.1, lifespan=jobs.counter) as runner:
        other = runner.submit(jobs.await_, log.path, gate.path, 7)
        key = Fickle()
        view = runner.options(key=key, retries=0 if end == "dies" else 1)
        call, waiting = (view.submit(jobs.await_, log.path, gate.path, i) for i in range(2))
        await log.take(2)
        key.is_given, key.hash = True, new_hash
        if end == "is cancelled":
            waiting.cancel()
            call.cancel()
            await log.next()
        elif end in ("is retried", "dies"):
            worker = worker_of(runner)
            worker.kill()
            await threads_ended(worker)
        elif end == "is closed":
            await runner.aclose(grace=0)
            assert {type(call.exception()) for call in (call, waiting, other)} == {percore.RunnerClosed}
            return
        gate.open()
        if end == "dies":
            with pytest.raises(percore.WorkerDied):
                await call
        elif end != "is cancelled":
            assert [await call, await waiting] == [0, 1]
        if end in ("ends", "is cancelled"):
            assert await other == 7
            assert runner.statistics().restarts == 0
        else:
            with pytest.raises(percore.WorkerDied):
                await other
            assert runner.statistics().restarts == 1
        assert await asyncio.wait_for(runner.options(key=Fickle()).run(jobs.aecho, 3), 30) == 3


async def test_no_key_is_no_key(make: MakeRunner) -> None:
    async with make(per_key=1, concurrency=2, lifespan=jobs.counter) as runner:
        assert await runner.map(jobs.aecho, range(50), key=lambda _: None) == list(range(50))


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_b5_a_key_function_that_raises_is_that_item_s_error(make: MakeRunner, fn: Any) -> None:
    async with make() as runner:
        results = await runner.map(fn, [1, 0, 2], key=lambda value: 1 // value, return_exceptions=True)
        assert [results[0], type(results[1]), results[2]] == [1, ZeroDivisionError, 2]
        with pytest.raises(ZeroDivisionError):
            await runner.map(fn, [1, 0, 2], key=lambda value: 1 // value)
        seen = []
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async for value in runner.map(fn, [1, 2, 0, 3], key=lambda value: 1 // value):
                seen.append(value)  # noqa: PERF401  # what came before the error is what matters
        assert seen == [1, 2]


async def test_a_key_that_is_no_function(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match="key must be a function"):
            _ = runner.map(jobs.aecho, [1], key="host")  # type: ignore[call-overload]


class _Asynchronous:
    async def key(self, value: int) -> int:
        return value

    async def __call__(self, value: int) -> int:
        return value


async def test_a_key_function_that_is_not_plain(make: MakeRunner) -> None:
    async def give(value: int) -> int:
        return value

    wrong: dict[Any, str] = dict.fromkeys([give, functools.partial(give, 1), _Asynchronous(), _Asynchronous().key], "an async one")
    wrong |= dict.fromkeys([jobs.numbers, jobs.anumbers], "a generator function")
    async with make() as runner:
        for fn, kind in wrong.items():
            with pytest.raises(TypeError, match=f"key must be a plain function, not {kind}"):
                _ = runner.map(jobs.aecho, [1], key=fn)
        hidden: Any = lambda value: give(value)  # noqa: E731
        results = await runner.map(jobs.aecho, [1, 2], key=hidden, return_exceptions=True)
        assert {str(result).partition(":")[0] for result in results} == {"key must be a plain function"}
