"""Shared objects: pickled once, built once per worker, on pages that all read, and freed when nobody needs them."""

import asyncio
import contextlib
import functools
import gc
import itertools
import pickle
import signal
import threading
from typing import Any

import pytest

import percore
from percore._calls import shared_objects
from tests import jobs
from tests.contract import share_jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import arena_of, slots_at_all, supervisor_of
from tests.waiting import until

pytestmark = [
    pytest.mark.warm_fork_server(imports="numpy"),
    pytest.mark.differs("fallbacks", because="the shared pages are files instead of memfds", on="fake"),
]
sent_once = pytest.mark.differs(
    "nodes", because="an object is sent to the far half once, and leaves it when all of its workers have forgotten it"
)
in_processes = pytest.mark.differs("fallbacks", because="each process maps the files for itself")

np = pytest.importorskip("numpy")

SIZE = 300_000
"""Numbers in an array: 2.4 MB."""


def arena(runner: percore.Runner) -> Any:
    return arena_of(runner)


async def until_free(runner: percore.Runner) -> None:
    """Answers come as calls do, so what was asked for before them has been done."""
    async with asyncio.timeout(20):
        while arena(runner).in_use or supervisor_of(runner).shares._shares:
            await runner.broadcast(jobs.awhere)


@sent_once
async def test_it_is_used_from_anywhere_inside_the_arguments(make: MakeRunner) -> None:
    async with make(2) as runner:
        data = {"a": [1, 2], "b": "text"}
        shared = await runner.share(data)
        assert isinstance(shared, percore.Shared)
        assert await runner.run(share_jobs.value_of, shared) == data
        assert await runner.run(share_jobs.avalue_of, shared=shared) == data
        assert await runner.run(share_jobs.inside, {"here": [(1, shared), (2, shared)]}) == [data, data]
        assert await runner.map(functools.partial(share_jobs.item_of, shared), ["a", "b"] * 50) == [[1, 2], "text"] * 50
        assert await runner.map(lambda key: shared.value[key], ["a", "b"]) == [[1, 2], "text"]
        assert await runner.starmap(share_jobs.keyed, [("a", shared), ("b", shared)]) == [[1, 2], "text"]
        assert await runner.map(share_jobs.avalue_of, [shared] * 20) == [data] * 20
        assert await runner.broadcast(share_jobs.avalue_of, shared) == [data, data]
        assert shared.value == data


@sent_once
async def test_one_of_any_size_takes_one_slot(make: MakeRunner) -> None:
    async with make() as runner:
        for size in (0, 10, 70_000, 150_000, 5_000_000):
            shared = await runner.share(jobs.pattern(size))
            assert arena(runner).in_use == 1
            assert await runner.run(share_jobs.value_of, shared) == jobs.pattern(size)
            shared.close()
            await until_free(runner)


@sent_once
@in_processes
async def test_it_is_built_once_per_worker(make_real: MakeRunner) -> None:
    async with make_real(2, threads=4) as runner:
        shared = await runner.share(share_jobs.Counted("text"))
        answers = await asyncio.gather(*(runner.run(share_jobs.builds, shared) for _ in range(60)))
        assert {(text, times) for text, _, times in answers} == {("text", 1)}
        assert await runner.run(share_jobs.is_same_twice, shared)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_what_fails_to_be_built_fails_the_call_that_asks(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(share_jobs.Unloadable())
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be built"):
                await runner.run(share_jobs.value_of, shared)
        with pytest.raises(ValueError, match="cannot be built"):
            _ = shared.value
        shared.close()
        await until_free(runner)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_arrays_can_only_be_read(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(np.arange(SIZE))
        for fn in (share_jobs.write_to, share_jobs.force_writable):
            with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
                await runner.run(fn, shared)
        assert not shared.value.flags.writeable
        assert (shared.value == np.arange(SIZE)).all()


@in_processes
async def test_all_workers_read_the_same_pages(make_real: MakeRunner, real_engine: str) -> None:
    workers, size = 3, 32 << 20
    readers = 2 if real_engine == "nodes" else workers  # on each node, with the host, which has written them there
    async with make_real(workers) as runner:
        shared = await runner.share(np.full(size, 7, np.uint8))
        await runner.broadcast(share_jobs.pages_of, shared)
        for rss, pss, private in await runner.broadcast(share_jobs.pages_of, shared):
            assert rss >= size
            # The supervisor has written them through another mapping, and counts as one more.
            assert pss <= size / readers + (1 << 20)
            assert private <= 1 << 20


@sent_once
@in_processes
async def test_a_replaced_worker_sees_it(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(np.arange(SIZE))
        assert (await runner.run(share_jobs.avalue_of, shared)).sum() == shared.value.sum()
        worker_of(runner).kill(signal.SIGKILL)
        await until(lambda: runner.statistics().restarts)
        assert (await runner.run(share_jobs.avalue_of, shared)).sum() == shared.value.sum()
        shared.close()
        await until_free(runner)


@sent_once
async def test_a_recycled_worker_lets_go_of_it(make: MakeRunner) -> None:
    async with make(max_tasks_per_worker=3) as runner:
        shared = await runner.share(np.arange(SIZE))
        for _ in range(10):
            assert (await runner.run(share_jobs.avalue_of, shared)).sum() == shared.value.sum()
        shared.close()
        await until_free(runner)


# Its end


@sent_once
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_close_refuses_new_calls_and_lets_those_under_way_go_on(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        shared = await runner.share(np.ones(SIZE))
        call = runner.submit(share_jobs.wait_and_sum, log.path, gate.path, shared)
        waiting = [runner.submit(share_jobs.wait_and_sum, log.path, gate.path, shared) for _ in range(40)]
        assert await log.next() == "runs"
        shared.close()
        shared.close()
        with pytest.raises(RuntimeError, match="was closed"):
            _ = shared.value
        with pytest.raises(RuntimeError, match="was closed"):
            await runner.run(share_jobs.value_of, shared)
        with pytest.raises(RuntimeError, match="was closed"):
            await runner.map(share_jobs.value_of, [shared])
        assert arena(runner).in_use == 1
        gate.open()
        assert await asyncio.gather(call, *waiting) == [SIZE] * 41
        await until_free(runner)


class Closes:
    """Closes a shared object as it is pickled, and takes the slot that this leaves."""

    def __init__(self, runner: percore.Runner, shared: percore.Shared[Any]) -> None:
        self.runner = runner
        self.shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        self.shared.close()
        _ = self.runner.submit(jobs.alength, b"of another call" * 20_000)
        return int, ()


@pytest.mark.apart(because="nothing is pickled there")
async def test_s6_closed_as_a_later_argument_is_pickled_it_stays_until_the_call_has_ended(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share([1, 2])
        assert await runner.run(share_jobs.first, shared, Closes(runner, shared)) == [1, 2]
        shared = await runner.share([3, 4])
        assert await runner.map(functools.partial(share_jobs.first, shared), [Closes(runner, shared)]) == [[3, 4]]
        await until_free(runner)


@sent_once
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_it_is_freed_when_the_handle_has_gone_and_no_call_uses_it(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        call = runner.submit(share_jobs.wait_and_sum, log.path, gate.path, await runner.share(np.ones(SIZE)))
        partial = functools.partial(share_jobs.item_of, await runner.share({1: 2}))
        mapped = runner.map(partial, [1] * 10)
        del partial
        gc.collect()
        assert await log.next() == "runs"
        assert await runner.run(jobs.aecho, 1) == 1
        assert arena(runner).in_use == 2
        assert await mapped == [2] * 10
        del mapped
        gc.collect()
        gate.open()
        assert await call == SIZE
        await until_free(runner)


@sent_once
async def test_cancelled_failed_and_withdrawn_calls_let_go_of_it(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        shared = await runner.share(np.ones(SIZE))
        calls = [runner.submit(share_jobs.wait_and_sum, log.path, gate.path, shared) for _ in range(60)]
        failing = runner.submit(share_jobs.item_of, shared, "no such key")
        assert await log.next() == "runs"
        for call in calls:
            call.cancel()
        gate.open()
        with pytest.raises(IndexError):
            await failing
        shared.close()
        await until_free(runner)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_call_with_what_cannot_be_pickled_holds_nothing(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(1)
        with pytest.raises(TypeError, match="lock"):
            await runner.run(jobs.echo, (shared, threading.Lock()))
        shared.close()
        await until_free(runner)


@sent_once
@in_processes
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_retries_and_deaths_keep_it_for_the_next_attempt(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(retries=3) as runner:
        call = runner.submit(share_jobs.wait_and_sum, log.path, gate.path, await runner.share(np.ones(SIZE)))
        gc.collect()
        assert await log.next() == "runs"
        worker_of(runner).kill(signal.SIGKILL)
        assert await log.next() == "runs"
        gate.open()
        assert await call == SIZE
        await until_free(runner)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_handle_that_a_call_has_left_behind_says_that_it_is_closed(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share({1: 2})
        await runner.run(share_jobs.keep, shared)
        shared.close()
        await until_free(runner)
        with pytest.raises(RuntimeError, match="was closed"):
            await runner.run(share_jobs.kept_value)
        await runner.run(share_jobs.let_go)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_what_a_worker_keeps_of_it_stays_as_it_was(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(np.ones(SIZE))
        await runner.run(share_jobs.keep_value, shared)
        shared.close()
        for _ in range(20):
            assert (await runner.run(jobs.aecho, np.zeros(SIZE))).sum() == 0
        assert await runner.run(share_jobs.kept_sum) == SIZE
        assert len(supervisor_of(runner).shares._shares) == 1
        await runner.run(share_jobs.let_go)
        await until_free(runner)


@sent_once
@in_processes
async def test_what_is_kept_here_outlives_the_runner(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(np.ones(SIZE))
        value = shared.value
    assert value.sum() == SIZE
    with pytest.raises(RuntimeError, match="was closed"):
        _ = shared.value
    shared.close()


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_it_comes_back_as_the_same_handle(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(1)
        (other,) = await runner.run(share_jobs.back, shared)
        assert other is shared


# Misuse


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_it_travels_in_calls_of_its_runner_alone(make: MakeRunner) -> None:
    async with make() as runner, make() as other:
        shared = await runner.share(1)
        with pytest.raises(TypeError, match="arguments of its own runner's calls"):
            pickle.dumps(shared)
        with pytest.raises(TypeError, match=r"share them as one: `await runner.share\(\(a, b\)\)`"):
            await runner.share([shared])
        with pytest.raises(TypeError, match="its own runner"):
            await other.run(jobs.echo, shared)
        assert await runner.run(share_jobs.value_of, shared) == 1


async def test_parts_of_one_travel_as_anything_does(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share({"a": np.arange(SIZE)})
        part = shared.value["a"][10:20]
        assert (await runner.run(jobs.echo, part)).tolist() == [*range(10, 20)]
        again = await runner.share(part)
        assert (await runner.run(share_jobs.value_of, again)).tolist() == [*range(10, 20)]


async def test_a_worker_cannot_close_it(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(1)
        with pytest.raises(RuntimeError, match="only in the program that shared it"):
            await runner.run(share_jobs.close, shared)
        assert await runner.run(share_jobs.value_of, shared) == 1


async def test_another_thread_reads_it_and_cannot_close_it(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share([1])
        assert await asyncio.to_thread(lambda: shared.value) == [1]
        with pytest.raises(RuntimeError, match="in the thread"):
            await asyncio.to_thread(shared.close)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_share_of_a_closed_runner_and_of_too_much(make: MakeRunner) -> None:
    runner = make(max_message=1 << 20)
    with pytest.raises(percore.RunnerClosed):
        await runner.share(1)
    async with runner:
        with pytest.raises(percore.PayloadTooLarge):
            await runner.share(bytes(2 << 20))
        with pytest.raises(TypeError, match="lock"):
            await runner.share(threading.Lock())
        assert arena(runner).in_use == 0
    with pytest.raises(percore.RunnerClosed):
        await runner.share(1)


@sent_once
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_there_is_a_limit_and_calls_go_on_at_it(make: MakeRunner) -> None:
    async with make(max_message=1 << 36) as runner:
        assert slots_at_all(runner) == 16
        shared = [await runner.share(i) for i in range(4)]
        with pytest.raises(RuntimeError, match=r"4 shared objects are open.*this runner has room for 4"):
            await runner.share(5)
        assert await runner.map(share_jobs.value_of, shared) == [0, 1, 2, 3]
        arrays = await asyncio.gather(*(runner.run(jobs.aecho, np.full(SIZE, i)) for i in range(30)))
        assert [int(array[0]) for array in arrays] == [*range(30)]
        shared.pop().close()
        assert await runner.run(share_jobs.value_of, await runner.share(6)) == 6


@sent_once
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_functions_and_shared_objects_leave_room_for_arguments(make: MakeRunner) -> None:
    """Whatever the user keeps: large functions of maps, shared objects, closed ones with views, and arguments in workers."""
    async with make(max_message=1 << 36) as runner, contextlib.AsyncExitStack() as stack:
        assert slots_at_all(runner) == 16
        for number in range(10):
            function = functools.partial(share_jobs.size_with, np.full(SIZE, number))
            results = await stack.enter_async_context(runner.map(function, itertools.count(), window=1))
            assert await anext(results) == SIZE
        views: list[Any] = []
        shared: list[percore.Shared[Any]] = []
        with contextlib.suppress(RuntimeError):
            while len(shared) < 16:
                shared.append(await runner.share(np.full(SIZE, len(shared))))
                if len(shared) > 2:
                    views.append(shared[-1].value)
                    shared[-1].close()
        assert len(shared) > 2
        arrays = await asyncio.gather(*(runner.run(share_jobs.keep_array, np.full(SIZE, i)) for i in range(30)))
        assert arrays == [*range(30)]
        assert await runner.map(jobs.aecho, [bytes(300_000)] * 30) == [bytes(300_000)] * 30
        assert [int(view[0]) for view in views] == [*range(2, len(shared))]
    share_jobs.kept.clear()  # of the fake engine's workers


@pytest.mark.local_memory(because="it takes all slots of the arena itself")
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_it_waits_for_a_slot(make: MakeRunner, log: Log, gate: Gate) -> None:
    data = jobs.pattern(1 << 20)
    async with make(max_message=1 << 36, threads=40) as runner:
        slots = [arena(runner).take() for _ in range(16)]
        sharing = asyncio.create_task(runner.share(data))
        withdrawn = asyncio.create_task(runner.share(data))
        await until(lambda: len(arena(runner)._waiters) == 2)
        withdrawn.cancel()
        for slot in slots:
            assert slot is not None
            arena(runner).give(slot, 0)
        shared = await sharing
        with pytest.raises(asyncio.CancelledError):
            await withdrawn
        assert arena(runner).in_use == 1
        assert await runner.run(share_jobs.value_of, shared) == data


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_cancelled_it_keeps_nothing(make: MakeRunner) -> None:
    async with make() as runner:
        for _ in range(5):
            task = asyncio.create_task(runner.share(np.ones(SIZE)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(20):
            await until(lambda: not arena(runner).in_use)  # a thread gives it back


@sent_once
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_cancelled_when_it_has_just_been_stored_it_keeps_nothing(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The object is stored  2. the task is cancelled  3. the task resumes."""
    async with make() as runner:
        store = supervisor_of(runner).store
        share = store.share

        def cancelled_when_stored(obj: object, waiter: asyncio.Future[int]) -> None:
            waiter.add_done_callback(lambda _: task.cancel())
            share(obj, waiter)

        monkeypatch.setattr(store, "share", cancelled_when_stored)
        task = asyncio.create_task(runner.share(np.ones(SIZE)))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert arena(runner).in_use == 0


class Slow:
    """Pickling it takes until the gate opens."""

    def __init__(self, log: str, gate: str) -> None:
        self.paths = log, gate

    def __reduce__(self) -> tuple[Any, ...]:
        log, gate = self.paths
        jobs.say(log, "pickling")
        jobs.pass_gate(gate)
        return Slow, self.paths


@sent_once
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_closing_the_runner_ends_it(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        sharing = asyncio.create_task(runner.share(Slow(log.path, gate.path)))
        assert await log.next() == "pickling"
    with pytest.raises(percore.RunnerClosed, match="before the object was shared"):
        await sharing
    gate.open()


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_loop_goes_on_while_it_is_pickled(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        sharing = asyncio.create_task(runner.share(Slow(log.path, gate.path)))
        assert await log.next() == "pickling"
        assert await runner.run(jobs.aecho, 1) == 1
        gate.open()
        await sharing


async def test_its_repr_tells_what_it_is(make: MakeRunner) -> None:
    async with make() as runner:
        shared = await runner.share(bytes(1000))
        assert repr(shared).startswith("<percore.Shared number ")
        assert "bytes>" in repr(shared)
        shared.close()
        assert repr(shared).endswith("closed>")
        assert "in a worker" in (await runner.run(repr, await runner.share(1)))


@sent_once
@in_processes
async def test_x6_a_runner_in_a_worker_numbers_its_objects_otherwise(make_real: MakeRunner) -> None:
    """Handles of both runners are unpickled in that worker, which finds them by their numbers."""
    async with make_real() as runner:
        there = await runner.run(share_jobs.next_number)
        assert there >> 32 != share_jobs.next_number() >> 32


def test_x5_a_fork_numbers_its_objects_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_objects, "_numbers", shared_objects._numbers)
    before = share_jobs.next_number()
    shared_objects._begin()  # as each fork does
    assert share_jobs.next_number() >> 32 != before >> 32


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_pickle_of_it_that_outlives_it_leads_nowhere(make: MakeRunner) -> None:
    # The pickle has the number of the object and no place in memory, where another object may lie by now.
    async with make() as runner:
        shared = await runner.share(bytes(100))
        assert await runner.run(share_jobs.keep_pickle, shared) < 80
        shared.close()
        await until_free(runner)
        with pytest.raises(RuntimeError, match="was closed, or belongs to another program"):
            await runner.run(share_jobs.load_pickle)


@pytest.mark.apart(because="nothing is pickled there")
async def test_unpickling_that_waits_for_a_call_does_not_block_the_loop_that_wants_the_same_object(
    make: MakeRunner, log: Log, gate: Gate
) -> None:
    """The loop would wait for the thread that builds it, and the thread for an answer that the loop brings."""
    async with make(1, threads=1) as runner:
        shared = await runner.share(share_jobs.Asking(jobs.await_, log.path, gate.path, "of the thread"))
        in_thread = runner.submit(share_jobs.text_of, shared)
        await log.take(1)
        text, number = await runner.run(share_jobs.atext_of, shared)
        assert text == "of the loop"
        gate.open()
        assert await in_thread == (text, number), "all get the one that was ready first"
        assert await runner.run(share_jobs.text_of, shared) == (text, number)
