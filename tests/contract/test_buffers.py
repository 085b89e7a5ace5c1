"""Arrays and other large buffers: they arrive right, writable and the receiver's alone, and live as long as anything uses them."""

import asyncio
import gc
import pickle
import threading
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.counts import times

np = pytest.importorskip("numpy")

from tests.contract import buffer_jobs as arrays  # noqa: E402
from tests.internals import channel_of, is_leased, slots_used, supervisor_of  # noqa: E402

pytestmark = [
    pytest.mark.apart(because="arrays lie in memory that processes share, and each side has arrays of its own"),
    pytest.mark.warm_fork_server(imports="numpy"),
    pytest.mark.differs(
        "fallbacks", because="slots lie in files instead of memfds, and mappings are made in another way", on="fake"
    ),
    pytest.mark.differs("nodes", because="workers have views of the far half's memory, and results arrive as bytes"),
]
in_processes = pytest.mark.differs("fallbacks", because="each process maps the files, and its copies of their pages, for itself")

VIEWS = pytest.mark.local_memory(because="it counts the slots that arrays of this process use")
FEW_SLOTS = {"max_message": 1 << 36}
"""The larger a slot, the fewer there are: 16 down, 4 up; 4 and 3 of them may be leased."""

BOTH = {"plain": 0, "coroutine": 1}
LARGE = 200_000


def both(plain: Any, coroutine: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fn", [plain, coroutine], ids=list(BOTH))


async def settled(runner: percore.Runner) -> None:
    """Wait until nothing of what has ended is in use any more: neither slots nor leases, on either side."""
    async with asyncio.timeout(20):
        while slots_used(runner) or is_leased(runner):
            gc.collect()
            await runner.broadcast(arrays.adrop)


def all_leases(runner: percore.Runner) -> list[Any]:
    members = [slot.current for slot in supervisor_of(runner).slots]
    return [channel_of(member).leases for member in members if member is not None]


# What arrives


@both(arrays.describe, arrays.adescribe)
async def test_arrays_of_every_kind_there(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        for name, make_one in arrays.ARRAYS.items():
            array = make_one()
            before = arrays.described(array)
            assert arrays.is_same(await runner.run(fn, array), array), name
            assert arrays.described(array) == before, name
        await settled(runner)


@both(arrays.make_array, arrays.amake_array)
async def test_arrays_of_every_kind_back(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        for name, make_one in arrays.ARRAYS.items():
            assert arrays.is_same(arrays.described(await runner.run(fn, name)), make_one()), name
        await settled(runner)


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho], ids=list(BOTH))
async def test_several_buffers_in_one_message_and_the_same_one_twice(make: MakeRunner, fn: Callable[..., Any]) -> None:
    first, second = arrays.numbers(1), arrays.numbers(2).reshape(-1, 10)
    thing = {"first": first, "pair": [first, (second, "text", b"z" * LARGE)], "small": np.arange(3)}
    async with make() as runner:
        there = await runner.run(fn, thing)
        assert there["first"] is there["pair"][0]
        assert arrays.is_numbers(1, there["first"])
        assert arrays.described(there["pair"][1][0]) == arrays.described(second)
        assert there["pair"][1][1:] == ("text", b"z" * LARGE)
        assert there["small"].tolist() == [0, 1, 2]
        there["first"][:] = 0
        assert arrays.described(there["pair"][1][0]) == arrays.described(second)
        del there
        await settled(runner)


@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
async def test_a_pickle_buffer_arrives_as_a_memoryview(make: MakeRunner, writable: bool, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for size in (LARGE, 65_536, 65_537):
            with subtests.test(size=size):
                await _pickle_buffer_there_and_back(runner, size, writable)


async def _pickle_buffer_there_and_back(runner: percore.Runner, size: int, writable: bool) -> None:
    data = jobs.pattern(size)
    there = (memoryview, data, not writable, "B", 1)
    assert await runner.run(arrays.describe_view, arrays.make_view(data, writable)) == there
    view = await runner.run(arrays.make_view, data, writable)
    assert arrays.describe_view(view) == there
    assert arrays.describe_view(await runner.run(arrays.send_back, pickle.PickleBuffer(view))) == there
    if writable:
        view[:5] = b"12345"
        assert bytes(view) == b"12345" + data[5:]
    del view
    await settled(runner)


@pytest.mark.parametrize("thing", [memoryview(bytes(10)), [memoryview(bytearray(LARGE))]], ids=["small", "large, within a list"])
@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho], ids=list(BOTH))
async def test_a_bare_memoryview_is_refused_with_advice(make: MakeRunner, fn: Callable[..., Any], thing: Any) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match=r"pickle\.PickleBuffer"):
            await runner.run(fn, thing)
        assert slots_used(runner) == 0
        assert await runner.run(fn, 1) == 1


@both(arrays.bare_view, arrays.abare_view)
async def test_a_bare_memoryview_as_a_result_is_refused_with_advice(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        for size in (10, LARGE):
            with pytest.raises(percore.RemoteError, match=r"memoryview.*return pickle\.PickleBuffer\(view\), or bytes\(view\)"):
                await runner.run(fn, size)
        assert await runner.run(jobs.aecho, 1) == 1


@pytest.mark.asyncio_only
@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho], ids=list(BOTH))
async def test_bytes_arrive_as_they_are(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        for data in (jobs.pattern(LARGE), bytearray(jobs.pattern(LARGE)), [bytearray(b"x") * LARGE, bytearray()]):
            there: Any = await runner.run(fn, data)
            assert there == data
            assert type(there) is type(data)


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho], ids=list(BOTH))
@pytest.mark.parametrize("options", [{}, FEW_SLOTS], ids=["many slots", "few slots"])
async def test_map_and_stream_of_arrays(make: MakeRunner, fn: Callable[..., Any], options: dict[str, int]) -> None:
    async with make(2, **options) as runner:
        results = await runner.map(fn, map(arrays.numbers, range(60)))
        assert all(arrays.is_numbers(place, array) for place, array in enumerate(results))
        count = 0
        async for array in runner.map(fn, map(arrays.numbers, range(60))):
            assert arrays.is_numbers(count, array)
            array[:] = -1
            count += 1
        assert count == 60
        assert all(arrays.is_numbers(place, one) for place, one in enumerate(results))
        del results, array
        await settled(runner)


@pytest.mark.asyncio_only
@both(arrays.describe, arrays.adescribe)
async def test_arrays_that_would_fit_into_a_frame(make: MakeRunner, fn: Callable[..., Any]) -> None:
    """Between the least that travels beside a pickle, and the most that travels without a slot."""
    few = [np.full(size, size % 251, np.uint8) for size in range(64_000, 101_000, 3700)]
    async with make(**FEW_SLOTS) as runner:
        # Ones that keep their slots first: those behind them travel as private bytes.
        for things in (few, few * 4):
            assert await runner.map(fn, things) == [arrays.described(one) for one in things]
            assert await asyncio.gather(*(runner.submit(fn, one) for one in things)) == [arrays.described(one) for one in things]
        for array in await runner.map(jobs.aecho, few * 4):
            assert np.all(array == len(array) % 251)
        del array
        await settled(runner)


# Callables and exceptions


@pytest.mark.asyncio_only
async def test_callables_that_carry_an_array(make: MakeRunner) -> None:
    weights, model = arrays.numbers(7), arrays.Model(7)

    def closure(value: float) -> float:
        return float(weights[0] + value)

    async def acloses(value: float) -> float:
        return float(weights[0] + value)

    carrying: list[Callable[..., Any]] = [
        partial(arrays.weighted, weights),
        partial(arrays.aweighted, weights),
        model.apply,
        model.aapply,
        closure,
        acloses,
    ]
    async with make(2, **FEW_SLOTS) as runner:
        for fn in carrying:
            for _ in range(3):
                assert await runner.run(fn, 5) == 12
            assert await runner.map(fn, range(40)) == [7 + value for value in range(40)]
            assert await runner.broadcast(fn, 1) == [8, 8]
        del fn
        await settled(runner)


async def test_what_a_held_function_writes_into_its_array_stays_in_its_worker(make: MakeRunner) -> None:
    model = arrays.Model(0)
    async with make(threads=1) as runner:
        assert await runner.map(model.change, [1] * 20) == list(range(1, 21))
        assert await runner.map(model.change, [1] * 3) == [1, 2, 3]
        assert arrays.is_numbers(0, model.weights)
        await settled(runner)


@pytest.mark.asyncio_only
@both(arrays.raise_with, arrays.araise_with)
async def test_exceptions_that_carry_arrays(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        with pytest.raises(ValueError, match="with arrays") as caught:
            await runner.run(fn, 3)
        text, array, (other,) = caught.value.args
        assert text == "with arrays"
        assert arrays.is_numbers(3, array)
        assert arrays.is_numbers(4, other)
        array[:] = 0
        with pytest.raises(LookupError) as arrived:
            await runner.run(jobs.afail, LookupError(other))
        assert arrays.is_numbers(4, arrived.value.args[0])
        await settled(runner)


# Writable, and the receiver's alone


@in_processes
@both(arrays.fill, arrays.afill)
async def test_what_a_worker_writes_the_sender_does_not_see(make: MakeRunner, fn: Callable[..., Any]) -> None:
    array = arrays.numbers(1)
    async with make() as runner:
        there = await runner.run(fn, 5, array)
        assert np.all(there == 5)
        assert arrays.is_numbers(1, array)
        there[:] = 6
        assert np.all(await runner.run(fn, 7, there) == 7)
        assert np.all(there == 6)
        del there
        await settled(runner)


@in_processes
@both(arrays.use_up, arrays.ause_up)
async def test_pages_that_were_written_to_show_what_is_sent_next(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make(threads=1, **FEW_SLOTS) as runner:
        for place in range(40):
            assert await runner.run(fn, place, arrays.numbers(place))
        places = range(40)
        assert all(await runner.map(fn, places, map(arrays.numbers, places)))
        for place in places:
            array = await runner.run(arrays.anumbers, place)
            assert arrays.use_up(place, array)
        del array
        await settled(runner)


@in_processes
async def test_each_worker_of_a_broadcast_writes_into_its_own(make: MakeRunner, gate: Gate, log: Log) -> None:
    array = arrays.numbers(0)
    async with make(3) as runner:
        told = asyncio.ensure_future(runner.broadcast(arrays.mark_and_wait, log.path, gate.path, array))
        assert await log.take(3) == ["marked"] * 3
        gate.open()
        assert await told == [(0.0, zlib.crc32(array.tobytes()))] * 3
        assert arrays.is_numbers(0, array)
        await settled(runner)


@in_processes
async def test_a_retry_sends_the_original_bytes_after_a_death(make: MakeRunner, gate: Gate, log: Log) -> None:
    """The first attempt writes into its array, and is then killed."""
    async with make() as runner:
        call = runner.options(retries=3).submit(arrays.use_up_and_wait, log.path, gate.path, 1, arrays.numbers(1))
        for _ in range(2):
            assert await log.next() == "True"
            worker_of(runner).kill()
        assert await log.next() == "True"
        gate.open()
        assert await call
        await settled(runner)


@both(arrays.keep_and_fail, arrays.akeep_and_fail)
async def test_a_retry_where_the_first_attempt_still_has_its_array(make: MakeRunner, fn: Callable[..., Any]) -> None:
    """Both attempts run in one worker, and the first has kept its array and written into it."""
    async with make() as runner:
        assert await runner.options(retries=3, retry_on=ValueError).run(fn, 3, arrays.numbers(0))
        await settled(runner)


async def test_calls_that_are_taken_back_from_a_worker_keep_their_arrays(make: MakeRunner, gate: Gate, log: Log) -> None:
    async with make(2, threads=1, **FEW_SLOTS) as runner:
        blocked = runner.submit(arrays.wait_with, log.path, gate.path, -1, arrays.numbers(-1))
        assert await log.next() == "-1"
        calls = [runner.submit(arrays.use_up, place, arrays.numbers(place)) for place in range(40)]
        assert all(await asyncio.gather(*calls))
        gate.open()
        assert await blocked
        await settled(runner)


# Kept


@VIEWS
@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fn", [arrays.numbers, arrays.anumbers], ids=list(BOTH))
async def test_a_consumer_that_keeps_them_all_does_not_stop_the_traffic(make: MakeRunner, fn: Callable[..., Any]) -> None:
    count, size = times(400, 10_000), 8192
    async with make() as runner:
        kept = [array async for array in runner.map(fn, range(count), [size] * count)]
        assert all(arrays.is_numbers(place, array) for place, array in enumerate(kept))
        (leases,) = all_leases(runner)
        assert leases.count == leases._limit
        for array in kept:
            array += 1
        assert all(arrays.is_numbers(place + 1, array) for place, array in enumerate(kept))
        del kept, array
        assert arrays.is_numbers(5, await runner.run(fn, 5, size))
        await settled(runner)


@pytest.mark.long
@pytest.mark.timeout(200)
@both(arrays.keep, arrays.akeep)
async def test_a_worker_that_keeps_them_all_does_not_stop_the_traffic(make: MakeRunner, fn: Callable[..., Any]) -> None:
    count, size = times(400, 10_000), 8192
    async with make(**(FEW_SLOTS if count < 1000 else {})) as runner:
        places = range(count)
        counts = await runner.map(fn, places, (arrays.numbers(place, size) for place in places))
        assert sorted(counts) == list(range(1, count + 1))
        assert await runner.run(arrays.are_kept_right)
        assert await runner.map(jobs.alength, [jobs.pattern(LARGE)] * 20) == [LARGE] * 20
        assert await runner.run(arrays.are_kept_right)
        assert await runner.run(arrays.adrop) == count
        await settled(runner)


@in_processes
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_s7_results_that_are_kept_while_later_calls_use_the_memory(make: MakeRunner) -> None:
    async with make(2) as runner:
        kept = await runner.map(arrays.anumbers, range(20))
        view = await runner.run(arrays.make_view, jobs.pattern(LARGE), True)
        later = times(500, 1_000_000)
        async for array in runner.map(arrays.numbers, range(later), [8192] * later):
            array[:] = -1
        assert all(arrays.is_numbers(place, array) for place, array in enumerate(kept))
        assert bytes(view) == jobs.pattern(LARGE)
        del kept, view, array
        await settled(runner)


@in_processes
async def test_all_slots_in_use_fails_nothing(make: MakeRunner, gate: Gate, log: Log) -> None:
    """Calls that wait hold their arrays, results are kept: what comes behind them is copied, and arrives."""
    async with make(concurrency=40, **FEW_SLOTS) as runner:
        kept = [await runner.run(arrays.anumbers, place) for place in range(12)]
        waiting = [runner.submit(arrays.await_with, log.path, gate.path, place, arrays.numbers(place)) for place in range(20)]
        assert sorted(map(int, await log.take(20))) == list(range(20))
        for place in range(20):
            assert arrays.is_numbers(place, await runner.run(jobs.aecho, arrays.numbers(place)))
        gate.open()
        assert await asyncio.gather(*waiting) == [True] * 20
        assert all(arrays.is_numbers(place, array) for place, array in enumerate(kept))
        del kept
        await settled(runner)


async def test_a_view_outlives_its_runner(make: MakeRunner) -> None:
    async with make() as runner:
        leased = await runner.run(arrays.anumbers, 1)
        view = await runner.run(arrays.make_view, jobs.pattern(LARGE), True)
    assert arrays.is_numbers(1, leased)
    leased += 1
    view[:3] = b"new"
    assert arrays.is_numbers(2, leased)
    assert bytes(view) == b"new" + jobs.pattern(LARGE)[3:]
    del leased, view
    gc.collect()


@in_processes
def test_a_view_outlives_the_loop(make: MakeRunner) -> None:
    async def receive() -> Any:
        async with make() as runner:
            return await runner.run(arrays.anumbers, 1)

    array = asyncio.run(receive())
    assert arrays.is_numbers(1, array)
    held = [array]
    del array
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


@in_processes
async def test_s7_a_view_outlives_its_worker(make: MakeRunner) -> None:
    async with make() as runner:
        kept = [await runner.run(arrays.anumbers, place) for place in range(5)]
        dead = worker_of(runner)
        dead.kill()
        with pytest.raises(percore.WorkerDied):
            await runner.broadcast(jobs.aecho, 1)
        for place in range(60):
            assert arrays.is_numbers(place, await runner.run(arrays.anumbers, place))
        assert worker_of(runner) is not dead
        assert all(arrays.is_numbers(place, array) for place, array in enumerate(kept))
        kept[0] += 1
        assert arrays.is_numbers(1, kept[0])
        del kept
        await settled(runner)


@in_processes
@pytest.mark.local_memory(because="it counts the slots that arrays of a worker use")
async def test_a_worker_that_dies_with_arrays_gives_its_slots_back(make: MakeRunner) -> None:
    async with make(**FEW_SLOTS) as runner:
        for place in range(20):
            await runner.run(arrays.akeep, place, arrays.numbers(place))
        assert slots_used(runner) == 4
        arrays.drop()  # where the worker is in this process, its death takes nothing along
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await runner.broadcast(jobs.aecho, 1)
        assert await runner.run(jobs.aecho, 1) == 1
        assert slots_used(runner) == 0
        assert all(await runner.map(arrays.ause_up, range(20), map(arrays.numbers, range(20))))
        await settled(runner)


# Let go of


@VIEWS
async def test_the_last_reference_may_go_in_any_thread(make: MakeRunner) -> None:
    async with make(**FEW_SLOTS) as runner:
        for _ in range(8):
            held = [await runner.run(arrays.anumbers, place) for place in range(3)]
            assert all_leases(runner)[0].count == 3
            await asyncio.to_thread(held.clear)
            await settled(runner)


@VIEWS
async def test_the_last_reference_may_go_in_a_collection(make: MakeRunner) -> None:
    async with make(**FEW_SLOTS) as runner:
        for in_thread in (False, True):
            arrays.keep_in_cycle(await runner.run(arrays.anumbers, 1))
            assert all_leases(runner)[0].count == 1
            if in_thread:
                await asyncio.to_thread(gc.collect)
            else:
                gc.collect()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert all_leases(runner)[0].count == 0
        for _ in range(40):
            await runner.run(arrays.keep_in_cycle, arrays.numbers(1))
        await settled(runner)


@VIEWS
async def test_a_slot_comes_back_when_the_last_of_its_arrays_goes(make: MakeRunner) -> None:
    async with make() as runner:
        first, second = await runner.run(jobs.aecho, [arrays.numbers(1), arrays.numbers(2)])
        gone = weakref.ref(first)
        del first
        await asyncio.sleep(0)
        assert gone() is None
        assert all_leases(runner)[0].count == 1
        part = second[5:6]
        del second
        await runner.run(jobs.aecho, 1)
        assert all_leases(runner)[0].count == 1
        assert part[0] == 7
        del part
        await settled(runner)


@in_processes
@pytest.mark.parametrize("fn", [arrays.await_with, arrays.wait_with], ids=["coroutine", "plain"])
async def test_c1_cancelled_calls_with_arrays_leave_no_lease(
    make: MakeRunner, gate: Gate, log: Log, fn: Callable[..., Any]
) -> None:
    async with make(concurrency=5, threads=5, **FEW_SLOTS) as runner:
        for round_ in range(4):
            calls = [runner.submit(fn, log.path, gate.path, place, arrays.numbers(place)) for place in range(30)]
            if round_ < 3:  # some run, some are ahead in the worker, some wait for a slot, and some have not even been sent
                await log.next()
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            assert all(call.cancelled() for call in calls)
        gate.open()  # plain functions run on
        assert all(await runner.map(arrays.ause_up, range(20), map(arrays.numbers, range(20))))
        await settled(runner)


async def test_c3_results_that_nobody_wants_any_more_leave_no_lease(make: MakeRunner, gate: Gate, log: Log) -> None:
    async with make(**FEW_SLOTS) as runner:
        calls = [runner.submit(arrays.await_numbers, log.path, gate.path, place) for place in range(30)]
        await log.take(30)
        gate.open()
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(arrays.is_numbers(calls.index(call), call.result()) for call in done)
        del calls, call, done
        await settled(runner)
