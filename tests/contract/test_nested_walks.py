"""Maps and streams that calls make from inside, on every engine."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from percore import Rate, RemoteError, RunnerClosed, WorkerDied
from tests import nested_jobs as jobs
from tests import nested_walks as walks
from tests.contract import stream_jobs as streams
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.contract.test_nested_ends import check_empty
from tests.internals import members_of, supervisor_of
from tests.waiting import until

passed_on = pytest.mark.differs("nodes", because="the pickles of nested calls are passed on")

MAPS = (walks.amap, walks.await_map, walks.map_)
ONE_PLACE = {"concurrency": 1, "threads": 1}


# Maps


async def test_calls_of_a_map_begin_while_its_input_keeps_the_thread_waiting(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=2) as runner:
        future = runner.submit(walks.map_over_slow_input, log.path, gate.path)
        assert await log.take(1) == ["first"]
        gate.open()
        assert await future == [None, None]
        assert await log.take(1) == ["second"]
        check_empty(runner)


async def test_a_map_that_is_closed_while_it_pulls_makes_no_further_call(make: MakeRunner) -> None:
    async with make() as runner, asyncio.timeout(20):
        assert await runner.run(walks.closed_by_its_key) == []
        check_empty(runner)


async def test_the_clean_up_of_a_longer_input_is_not_cut_off(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        assert await runner.run(walks.amap_over_unequal_inputs, log.path, gate.path) == [11]
        gate.open()
        assert await log.take(1) == ["closed"]


@passed_on
async def test_a_map_gives_its_results_in_every_way(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make(2, concurrency=2, threads=2) as runner:
        for outer in MAPS:
            for fn in (walks.double, walks.adouble):
                for window in (None, 1, 3):
                    with subtests.test(outer=outer.__name__, fn=fn.__name__, window=window):
                        assert await runner.run(outer, fn, range(50), window=window) == [2 * number for number in range(50)]
        for others in (walks.other_maps, walks.aother_maps):
            with subtests.test(others=others.__name__):
                assert await runner.run(others) == [
                    [(1, 2), (2, 4)],
                    [((1, 3), 4), ((2, 4), 6)],
                    [3, 7],
                    [0, 2, 4, 6, 8],
                    [1, 3, 5],
                    list(range(0, 40, 2)),
                    [],
                    [0, 1, 2, 3],
                ]
        check_empty(runner)


async def test_maps_of_maps_never_wait_for_themselves(make: MakeRunner) -> None:
    async with make(**ONE_PLACE) as runner:
        assert await runner.run(walks.amap_down, 5) == 32
        assert await runner.run(walks.map_down, 5) == 32
        check_empty(runner)


@passed_on
async def test_an_error_comes_at_the_place_of_its_result(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for outer in (walks.afails, walks.fails):
            with subtests.test(outer=outer.__name__):
                assert await runner.run(outer, 3, return_exceptions=False) == ["0", "1", "2", "alas 3"]
                assert await runner.run(outer, 3, return_exceptions=True) == ["0", "1", "2", "alas 3", "4", "5"]
        with pytest.raises(ValueError, match="alas"):
            await runner.run(walks.await_map, jobs.fail, ["alas"])
        assert await runner.run(walks.of_broken_inputs) == [[2, 4, "no more"]] * 2
        assert await runner.run(walks.of_a_broken_input) == [2, 4, "no more"]
        check_empty(runner)


@passed_on
async def test_a_map_holds_its_window_and_closes_its_input(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make(2) as runner:
        for window in (1, 7):
            for is_async in (False, True):
                with subtests.test(window=window, is_async=is_async):
                    most, is_closed = await runner.run(walks.most_in_window, window, is_async=is_async)
                    assert most <= window + 1  # the item that is looked at was returned
                    assert is_closed
            with subtests.test(window=window, face="thread"):
                most, is_closed = await runner.run(walks.most_in_window_of_a_thread, window)
                assert most <= window + 1
                assert is_closed
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


# Streams


@passed_on
async def test_a_stream_gives_items_of_every_kind(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make(2, concurrency=2, threads=2) as runner:
        for outer in (walks.astream, walks.stream):
            for fn in (streams.items, streams.aitems):
                for prefetch in (1, 16):
                    with subtests.test(outer=outer.__name__, fn=fn.__name__, prefetch=prefetch):
                        assert await runner.run(outer, fn, 30, prefetch=prefetch) == [streams.item(number) for number in range(30)]
            with subtests.test(outer=outer.__name__, what="nothing"):
                assert await runner.run(outer, walks.count, 0) == []
        for sums in (walks.asum_of_large, walks.sum_of_large):
            with subtests.test(sums=sums.__name__):
                assert await runner.run(sums, 12) == 8 * 1_000_000 + 4 * 10
        check_empty(runner)


async def test_a_stream_never_keeps_its_consumer_from_a_place(make: MakeRunner, subtests: pytest.Subtests) -> None:
    """Its generator waits for credits, and its consumer for a call that needs a place."""
    async with asyncio.timeout(40), make(**ONE_PLACE) as runner:
        for outer in (walks.astream_and_calls, walks.stream_and_calls):
            for fn in (walks.count, walks.acount):
                for prefetch in (1, 2, 16):
                    with subtests.test(outer=outer.__name__, fn=fn.__name__, prefetch=prefetch):
                        assert await runner.run(outer, fn, prefetch) == [2 * number for number in range(10)]
        for through in (walks.pass_on, walks.apass_on):
            for outer in (walks.astream, walks.stream):
                with subtests.test(outer=outer.__name__, through=through.__name__):
                    assert await runner.run(outer, through, 6, 5) == [6, 7, 8, 9, 10]
        assert [item async for item in runner.stream(walks.pass_on, 6, 5)] == [6, 7, 8, 9, 10]
        check_empty(runner)


async def test_a_stream_runs_ahead_by_its_prefetch_and_ends_in_a_with_block(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, subtests: pytest.Subtests
) -> None:
    async with make(2) as runner:
        for outer, fn, shut in ((walks.atake, walks.atold, gate), (walks.take, walks.told, other_gate)):
            with subtests.test(outer=outer.__name__):
                future = runner.submit(outer, fn, log.path, shut.path, 4)
                assert await log.take(4) == ["0", "1", "2", "3"]  # one was taken: the credit for the next comes with the second
                shut.open()
                await future
                assert log.rest() == ["closed", "over"]
        check_empty(runner)


async def test_a_stream_that_is_dropped_or_loses_its_consumer_closes_its_generator(
    make: MakeRunner, log: Log, gate: Gate, subtests: pytest.Subtests
) -> None:
    async with make(2) as runner:
        drops: list[tuple[Any, Any]] = [(walks.adrop, walks.atold), (walks.drop, walks.told)]
        for outer, fn in drops:
            with subtests.test(outer=outer.__name__):
                assert await runner.run(outer, fn, log.path) == "dropped"
                while await log.next() != "closed":
                    pass
        takes: list[tuple[Any, Any]] = [(walks.atake, walks.atold), (walks.take, walks.told)]
        for outer, fn in takes:
            with subtests.test(outer=outer.__name__, what="cancelled"):
                future = runner.submit(outer, fn, log.path, gate.path, 1)
                assert await log.next() == "0"
                future.cancel()
                if outer is walks.take:  # its thread runs on
                    gate.open()
                while await log.next() != "closed":
                    pass
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


async def test_a_generator_that_waits_for_its_call_is_closed(
    make: MakeRunner, log: Log, gate: Gate, subtests: pytest.Subtests
) -> None:
    """Its call is cancelled, and its clean-up may make another one."""
    async with make(2) as runner:
        for fn in (walks.waits_in_a_generator, walks.awaits_in_a_generator):
            with subtests.test(fn=fn.__name__):
                async with runner.stream(fn, log.path, gate.path) as items:
                    assert await anext(items) == 1
                    assert await log.next() == "begun"
                assert sorted(log.rest()) == ["cancelled", "cleaned up"]
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


@passed_on
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_errors_of_a_stream(make: MakeRunner) -> None:
    async with make(2) as runner:
        for outer in (walks.astream, walks.stream):
            with pytest.raises(ValueError, match="alas"):
                await runner.run(outer, walks.yield_then_fail)
            with pytest.raises(TypeError, match="is not a generator function"):
                await runner.run(outer, jobs.echo, 1)
            with pytest.raises(RemoteError, match="could not be unpickled here"):
                await runner.run(outer, streams.of_unreadable)
        assert await runner.run(walks.aclose_failing) == "at the close"
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


@passed_on
async def test_a_generator_that_dies_with_its_worker(make_real: MakeRunner) -> None:
    async with make_real(2) as runner:
        for outer in (walks.astream, walks.stream):
            for number in range(50):  # until the two have different workers
                await until(lambda: sum(member.is_ready for member in members_of(runner)) == 2)
                with pytest.raises(WorkerDied) as caught:
                    await runner.options(key="consumer").run(outer, walks.yield_then_die, key=str(number))
                if caught.value.call == "yield_then_die":
                    break
            (note,) = caught.value.__notes__
            assert re.fullmatch(rf"called by tests\.nested_walks\.{outer.__name__} in worker \d \(pid \d+\)", note)
        assert await runner.run(walks.astream, walks.count, 3) == [0, 1, 2]
        check_empty(runner)


@passed_on
async def test_a_consumer_that_dies_with_its_worker(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(2, concurrency=1) as runner:
        future = runner.submit(walks.atake, walks.atold, log.path, gate.path, 4)
        assert await log.take(4) == ["0", "1", "2", "3"]
        (consumer,) = (member for member in members_of(runner) if member.families)
        consumer.worker.kill()
        with pytest.raises(WorkerDied):
            await future
        await until(lambda: not any(member.calls for member in members_of(runner)))
        assert all(member.load == [0, 0, 0] for member in members_of(runner))


@passed_on
@pytest.mark.parametrize("grace", [None, 0])
async def test_a_runner_that_closes_over_a_stream_and_a_map(make: MakeRunner, log: Log, gate: Gate, grace: float | None) -> None:
    runner = make(2)
    await runner.start()
    members = members_of(runner)
    consumer = runner.submit(walks.atake, walks.atold, log.path, gate.path, 4)
    assert await log.take(4) == ["0", "1", "2", "3"]
    mapper = runner.submit(walks.amap, jobs.aheld, [log.path], [gate.path], ["x"])
    assert await log.take(1) == ["begun"]
    closing = asyncio.ensure_future(runner.aclose(grace=grace))
    await asyncio.sleep(0)
    if grace is None:
        gate.open()
    results: list[Any] = list(await asyncio.gather(consumer, mapper, return_exceptions=True))
    await closing
    if grace is None:
        assert results == [None, ["x"]]
    else:
        assert {type(result) for result in results} == {RunnerClosed}
    for member in members:
        member.check_empty()
    check_empty(runner)


# Options


async def test_retries(make: MakeRunner, tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases: list[dict[str, Any]] = [
        {"retry_on": ConnectionError},
        {"retry_on": (OSError,), "backoff": 0.001},
        {"retry_on": walks.is_connection, "backoff": walks.no_delay},
    ]
    async with make(2) as runner:
        for number, options in enumerate(cases):
            with subtests.test(number=number):
                path = str(tmp_path / str(number))
                assert await runner.run(walks.with_options, {"retries": 5, **options}, walks.fail_until, path, 4) == 4
                with pytest.raises(ConnectionError, match="2"):
                    await runner.run(walks.with_options, {"retries": 1, **options}, walks.fail_until, path + "x", 4)
        with pytest.raises(ValueError, match="alas"):
            await runner.run(walks.with_options, {"retries": 5, "retry_on": OSError}, jobs.fail, "alas")
        with pytest.raises(TypeError, match="retry_on and backoff do nothing without retries"):
            await runner.run(walks.with_options, {"retry_on": OSError}, jobs.echo, 1)
        check_empty(runner)


@passed_on
async def test_a_death_is_retried(make_real: MakeRunner, tmp_path: Path) -> None:
    """The caller has another worker, or is attempted again, too."""
    async with make_real(3, retries=1) as runner:
        caller = runner.options(retries=2)
        for number, options in enumerate(({}, {"retries": 3})):  # without options, the retries of the runner apply
            assert await caller.run(walks.with_options, options, walks.die_once, str(tmp_path / str(number))) == "alive"


@passed_on
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_callers_with_retries_leave_room_for_the_arguments_of_their_calls(make: MakeRunner) -> None:
    """They keep their own arguments until they have ended."""
    async with make(concurrency=1, retries=1, max_message=2**36) as runner:  # so there are few slots
        store = supervisor_of(runner).store
        assert await runner.run(walks.adown_with, 2 * store.room + 10, b"x" * 100_000) == 100_000
        check_empty(runner)


async def test_time_limits(make: MakeRunner) -> None:
    async with make(2) as runner:
        with pytest.raises(TimeoutError):
            await runner.run(walks.with_options, {"timeout": 0.05}, jobs.for_ever)
        with pytest.raises(TimeoutError, match="hard_timeout"):
            await runner.run(walks.with_options, {"hard_timeout": 0.05}, jobs.for_ever)
        check_empty(runner)


async def test_a_nested_call_that_does_not_begin_in_time(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        blocking = runner.submit(jobs.held, log.path, gate.path, "x")
        assert await log.next() == "begun"
        with pytest.raises(TimeoutError, match="echo did not begin within queue_timeout"):
            await runner.run(walks.with_options, {"queue_timeout": 0.05}, jobs.echo, 1)
        gate.open()
        assert await blocking == "x"
        await until(lambda: not any(member.calls for member in members_of(runner)))  # the worker has been told that it is too late
        check_empty(runner)


async def test_the_rate_of_a_key_counts_nested_calls(make: MakeRunner) -> None:
    async with make(2) as runner:
        runner.set_rate("slow", Rate(1, per=1000))
        assert await runner.run(walks.with_options, {"key": "slow"}, jobs.echo, 1) == 1
        with pytest.raises(TimeoutError, match="did not begin"):
            await runner.run(walks.with_options, {"key": "slow", "queue_timeout": 0.05}, jobs.echo, 1)
        assert await runner.run(walks.with_options, {"key": "fast", "queue_timeout": 20}, jobs.echo, 2) == 2
        check_empty(runner)


@passed_on
@pytest.mark.parametrize("source", ["sync", "async"])
async def test_a_map_ends_with_its_call(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, source: str) -> None:
    """Its calls are cancelled, and its inputs closed, whether the call has left it, or was cancelled."""
    async with make(2) as runner:
        future: asyncio.Future[Any] = runner.submit(walks.amap_of_waiting, log.path, gate.path, source)
        assert await log.take(2) == ["begun", "begun"]
        future.cancel()
        assert sorted(await log.take(3)) == ["cancelled", "cancelled", "input closed"]
        future = runner.submit(walks.leave_map, log.path, gate.path, other_gate.path, source)
        assert await log.take(2) == ["begun", "begun"]
        other_gate.open()
        assert await future == "left"
        assert sorted(await log.take(3)) == ["cancelled", "cancelled", "input closed"]
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


@passed_on
async def test_an_item_that_dies_with_its_worker(make_real: MakeRunner, tmp_path: Path) -> None:
    async with make_real(3) as runner:
        places = {key: await runner.options(key=key).run(walks.index) for key in ("dies", *map(str, range(50)))}
        first, third, callers, *_ = (key for key, place in places.items() if place != places["dies"])
        caller, keys = runner.options(key=callers), [first, "dies", third]
        results = await caller.run(walks.map_with_death, str(tmp_path / "one"), keys)
        assert [result if isinstance(result, str) else result[0] for result in results] == ["1", "WorkerDied", "3"]
        await until(lambda: sum(member.is_ready for member in members_of(runner)) == 3)
        assert await caller.run(walks.map_with_retries, str(tmp_path / "two"), keys) == ["1", "alive", "3"]
        check_empty(runner)


async def test_options_that_do_not_apply_are_refused(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for options, verb, text in (
            ({"timeout": 1}, "stream", "timeout limits a call"),
            ({"queue_timeout": 1}, "stream", "queue_timeout does not apply"),
            ({"retries": 1}, "stream", "does not retry a stream"),
            ({"key": "a"}, "map", "a map takes a function that gives each call's key"),
            ({"retries": -1}, "run", "retries must be"),
            ({"prefetch": 0}, "stream", "prefetch must be"),
            ({"hard_timeout": "1"}, "run", "hard_timeout must be"),
            (
                {"rate": 1},
                "run",
                "CurrentRunner.options() got an unexpected keyword argument 'rate': a key gets its rate in the program",
            ),
        ):
            with subtests.test(options=options), pytest.raises((TypeError, ValueError), match=re.escape(text)):
                await runner.run(walks.refused, options, verb)


@passed_on
async def test_streams_and_broadcasts_make_calls(make: MakeRunner) -> None:
    async with make(2, **ONE_PLACE) as runner:
        assert [item async for item in runner.stream(walks.calls_in_a_generator, 3)] == [0, 2, 4]
        assert [item async for item in runner.stream(walks.acalls_in_a_generator, 3)] == [0, 2, 4]
        assert await runner.broadcast(walks.map_, walks.double, [1, 2]) == [[2, 4]] * 2
        assert await runner.broadcast(walks.astream, walks.count, 3) == [[0, 1, 2]] * 2
        check_empty(runner)


# Keys


async def test_callers_that_want_each_others_keys_get_an_error(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, per_key=1) as runner:
        calls = [
            runner.options(key=key).submit(walks.take_key, log.path, gate.path, wanted) for key, wanted in (("a", "b"), ("b", "a"))
        ]
        assert await log.take(2) == ["begun"] * 2
        gate.open()
        async with asyncio.timeout(20):
            results = await asyncio.gather(*calls, return_exceptions=True)
        (error,) = (result for result in results if result != "x")
        assert isinstance(error, RuntimeError)
        assert re.match(
            r"calls would wait for each other for ever: take_key holds the key '.' and waits for the key '.'; take_key holds",
            str(error),
        )
        check_empty(runner)


@passed_on
@pytest.mark.own_fork_server  # a reload starts another one
@pytest.mark.parametrize("asks", ["before", "after"])
async def test_callers_whose_worker_leaves_get_an_error(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, asks: str
) -> None:
    """Without `per_key` they wait for each other once their keys have lost their worker."""
    async with make(1, concurrency=8, threads=1) as runner:
        calls = [
            runner.options(key=key).submit(walks.take_key, log.path, gate.path, wanted) for key, wanted in (("a", "b"), ("b", "a"))
        ]
        blocking = runner.submit(jobs.held, log.path, other_gate.path, "held")  # it has the thread that the nested calls need
        assert await log.take(3) == ["begun"] * 3
        (old,) = members_of(runner)
        if asks == "before":
            gate.open()
            await until(lambda: len(old.families) == 2)
        await runner.reload()
        gate.open()
        async with asyncio.timeout(20):
            results = await asyncio.gather(*calls, return_exceptions=True)
            other_gate.open()
            assert await blocking == "held"
        assert sorted(type(result).__name__ for result in results) == ["RuntimeError", "str"]
        check_empty(runner)


async def test_a_stream_with_a_key_that_its_consumer_wants(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with asyncio.timeout(40), make(2, per_key=1) as runner:
        for fn in (walks.stream_and_key, walks.astream_and_key):
            with subtests.test(fn=fn.__name__):
                # Without keys of their own, the stream and the calls do not wait for each other.
                assert await runner.options(key="a").run(fn, None, None, 2) == [0, 2, 4, 6, 8]
                assert await runner.options(key="a").run(fn, "b", "c", 2) == [0, 2, 4, 6, 8]
                with pytest.raises(RuntimeError, match="count holds the key 'b' and waits for the key 'b'"):
                    await runner.options(key="a").run(fn, "b", "b", 2)
                # The generator ends without its consumer, and its key gets free.
                assert await runner.options(key="a").run(fn, "b", "b", 16) == [0, 2, 4, 6, 8]
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


async def test_keys_in_one_order_are_no_cycle(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, per_key=1) as runner:
        calls = [
            runner.options(key=key).submit(walks.take_key, log.path, gate.path, wanted)
            for key, wanted in (("a", "b"), ("b", "c"), ("c", "d"), ("e", "a"))
        ]
        assert await log.take(4) == ["begun"] * 4
        gate.open()
        async with asyncio.timeout(20):
            assert await asyncio.gather(*calls) == ["x"] * 4
        check_empty(runner)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_wrong_face(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for fn, text in (
            (walks.for_in_a_coroutine, "`for` over a map would block the event loop"),
            (walks.async_input_in_a_thread, "a plain function cannot pull an async iterable"),
            (walks.used_twice, "a map is used once"),
            (walks.pickled_map, "a map of a call cannot be pickled"),
        ):
            with subtests.test(fn=fn.__name__), pytest.raises((RuntimeError, TypeError, RemoteError), match=re.escape(text)):
                await runner.run(fn)
