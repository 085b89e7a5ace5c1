"""How a stream ends: by its generator, by its consumer, by the runner, by a death. In each case the generator hears of it."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import AsyncIterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import percore
import percore._calls.streams
import percore._supervisor.streams
from tests import jobs
from tests.contract import stream_jobs as streams
from tests.contract.conftest import MakeRunner, kill_arrived, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.contract.test_streams import all_of, take
from tests.internals import close_call, items_ready, slots_used, supervisor_of

pytestmark = [
    pytest.mark.differs("uvloop", because="the loop finalises async generators, and orders the callbacks of an end"),
    pytest.mark.differs("nodes", because="a cancellation crosses items on their way"),
    pytest.mark.differs("threads", because="items are the objects themselves, and generators run on where nothing ends them"),
]

untyped: Any = streams

PAIR = (streams.told, streams.atold)


async def until_error(stream: AsyncIterable[Any]) -> tuple[list[Any], BaseException]:
    """The items that come before the error, and the error."""
    items = []
    try:
        async for item in stream:
            items.append(item)  # noqa: PERF401  # a list of those before the error
    except BaseException as error:
        return items, error
    raise AssertionError


# By its generator


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_an_error_comes_at_its_place(make: MakeRunner, subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, type[BaseException], str]] = [
        (partial(ValueError, "wrong"), ValueError, "^wrong$"),
        (partial(StopIteration, 1), RuntimeError, "StopIteration"),
        (partial(StopAsyncIteration, 1), RuntimeError, "StopAsyncIteration"),
        (partial(SystemExit, 1), percore.RemoteError, "SystemExit"),
        (partial(asyncio.CancelledError, 1), percore.RemoteError, "CancelledError"),
        (partial(jobs.give, "lock"), percore.RemoteError, "lock"),
        (jobs.RefusesPickle, percore.RemoteError, r"the item is a RefusesPickle, .* yield plain data instead"),
        (partial(jobs.give, "generator"), percore.RemoteError, r"the item is a generator, .*; yield a list"),
        (jobs.RefusesUnpickle, percore.RemoteError, "the item could not be unpickled here"),
        (partial(bytes, 2 << 20), percore.PayloadTooLarge, "max_message=1048576"),
    ]
    async with make(max_message=1 << 20) as runner:
        for fn in (streams.failing, streams.afailing):
            for make_error, kind, text in cases:
                with subtests.test(fn=fn.__name__, error=str(make_error)):
                    stream = runner.stream(fn, 20, make_error)
                    assert await take(stream, 20) == list(range(20))
                    with pytest.raises(kind, match=text):
                        await anext(stream)
                    with pytest.raises(RuntimeError, match="used once"):
                        aiter(stream)
                    await stream.aclose()
        assert runner.statistics().running == 0
        assert not slots_used(runner)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_an_error_carries_the_workers_traceback(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(ValueError, match="wrong") as caught:
            await all_of(runner.stream(streams.failing, 1, partial(ValueError, "wrong")))
        assert "in failing" in str(caught.value.__cause__)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_arguments_that_cannot_be_pickled_are_named(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises((TypeError, percore.PercoreError), match="the argument 'count'"):
            await anext(runner.stream(untyped.numbers, (_ for _ in ())))
        assert await all_of(runner.stream(streams.numbers, 1)) == [0]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_error_of_a_stream_forms_no_cycle_with_it(make: MakeRunner) -> None:
    """The cycle would keep the locals of the consumer alive."""

    class Local:
        """A local of the consumer."""

    async def consume() -> weakref.ref[Local]:
        local = Local()
        try:
            await all_of(runner.stream(streams.failing, 1, partial(ValueError, "wrong")))
        except ValueError:
            return weakref.ref(local)
        raise AssertionError

    async with make() as runner:
        gc.disable()
        try:
            assert (await consume())() is None
        finally:
            gc.enable()


# By its consumer


async def test_aclose_waits_for_the_remote_finally(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make() as runner:
        for fn, its_gate in ((streams.slow_to_close, gate), (streams.aslow_to_close, other_gate)):
            stream = runner.stream(fn, log.path, its_gate.path)
            assert await anext(stream) == 1
            closers = [asyncio.create_task(stream.aclose()) for _ in range(3)]
            assert await log.next() == "closing"
            await runner.run(jobs.aecho)
            assert not any(closer.done() for closer in closers)
            closers[0].cancel()  # this one leaves, the generator is closed all the same
            assert runner.statistics().running == 1
            its_gate.open()
            await asyncio.wait(closers)
            assert closers[0].cancelled()
            assert await log.next() == "closed"
            assert runner.statistics().running == 0
            await stream.aclose()
            with pytest.raises(RuntimeError, match="used once"):
                aiter(stream)


async def _break_in_a_block(stream: percore.Stream[int]) -> None:
    async with stream:
        async for number in stream:
            if number == 20:
                break


async def _raise_in_a_block(stream: percore.Stream[int]) -> None:
    with suppress(LookupError):
        async with stream:
            assert await anext(stream) == 0
            raise LookupError


async def _drop(stream: percore.Stream[int]) -> None:
    async for number in stream:
        if number == 20:
            break


async def _be_cancelled_at_work(stream: percore.Stream[int]) -> None:
    async def consume() -> None:
        async with stream:
            async for _ in stream:
                consuming.set()
                await asyncio.Event().wait()

    consuming = asyncio.Event()
    task = asyncio.create_task(consume())
    await consuming.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_consumer_that_leaves_closes_the_generator(make: MakeRunner, log: Log, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for fn in PAIR:
            for leave in (_break_in_a_block, _raise_in_a_block, _drop, _be_cancelled_at_work):
                with subtests.test(fn=fn.__name__, leave=leave.__name__):
                    await leave(runner.stream(fn, log.path))
                    while (said := await log.next()).isdigit():
                        pass
                    assert [said, await log.next()] == ["GeneratorExit", "closed"]
                    while runner.statistics().running:
                        await runner.run(jobs.aecho)


async def test_a_cancelled_wait_for_an_item_closes_the_stream(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        # A plain generator cannot be cancelled: its stream ends at once, and it is closed when it yields next.
        for fn in (streams.agated, streams.gated):
            stream = runner.stream(fn, log.path, gate.path, 3)
            assert await take(stream, 3) == [0, 1, 2]
            assert await log.next() == "waits"
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            if fn is streams.agated:
                assert await log.next() == "CancelledError"
            else:
                assert runner.statistics().running == 1
                gate.open()
            await stream.aclose()
            assert await log.next() == "closed"


async def test_a_generator_that_swallows_its_cancellation_is_closed_when_it_yields(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        stream = runner.stream(streams.stubborn, log.path, gate.path)
        assert await anext(stream) == 0
        assert await log.next() == "waits"
        await stream.aclose()
        assert await log.take(2) == ["CancelledError", "closed"]


async def test_an_error_while_it_is_closed_reaches_aclose_or_the_loop(make: MakeRunner, subtests: pytest.Subtests) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    async with make() as runner:
        for fn in (streams.fails_to_close, streams.afails_to_close):
            with subtests.test(fn=fn.__name__):
                stream = runner.stream(fn)
                await anext(stream)
                with pytest.raises(LookupError, match="failed to close"):
                    await stream.aclose()
                await stream.aclose()
                with pytest.raises(LookupError, match="failed to close"):
                    await _break_in_a_block(runner.stream(fn))
                assert not reports
                async for _ in runner.stream(fn):
                    break
                while not reports:
                    await runner.run(jobs.aecho)
                report = reports.pop()
                assert report["message"].startswith("a generator failed while its stream was closed")
                assert isinstance(report["exception"], LookupError)
                assert not reports
        for refuses in (streams.refuses_to_close, streams.arefuses_to_close):
            stream = runner.stream(refuses)
            await anext(stream)
            with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
                await stream.aclose()


async def test_a_stream_is_lazy_and_is_used_once(make: MakeRunner, log: Log) -> None:
    async with make() as runner:
        stream = runner.stream(streams.told, log.path, 3)
        await runner.run(jobs.echo)
        assert log.rest() == []
        assert await all_of(stream) == [0, 1, 2]
        with pytest.raises(RuntimeError, match="a stream is used once"):
            await all_of(stream)
        with pytest.warns(RuntimeWarning, match="a stream was never used"):
            runner.stream(streams.told, log.path)
        async with runner.stream(streams.told, log.path) as stream:
            """Entered, and left."""
        assert await log.take(4) == ["0", "1", "2", "closed"]
        assert log.rest() == []
        with pytest.raises(RuntimeError, match="used once"):
            aiter(stream)


async def test_one_task_at_a_time_may_wait_for_an_item(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        stream = runner.stream(streams.agated, log.path, gate.path, 0)
        first = asyncio.ensure_future(anext(stream))
        assert await log.next() == "waits"
        with pytest.raises(RuntimeError, match="already running"):
            await anext(stream)
        gate.open()
        assert await first == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_another_task_may_close_a_stream(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        stream = runner.stream(streams.agated, log.path, gate.path, 3)
        consumer = asyncio.create_task(all_of(stream))
        assert await log.next() == "waits"
        await runner.run(jobs.aecho)
        await stream.aclose()
        assert await consumer == [0, 1, 2]
        assert await log.take(2) == ["CancelledError", "closed"]


# By the runner


async def test_a_runner_that_closes_ends_its_streams(
    make: MakeRunner, log: Log, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (percore._calls.streams, percore._supervisor.streams):
        monkeypatch.setattr(module, "PATIENCE", 60.0)  # else a slow machine lets the second stream begin in the place of the first
    for grace in (None, 30, 0):
        for fn in PAIR:
            with subtests.test(fn=fn.__name__, grace=grace):
                runner = make(concurrency=1, threads=1)
                await runner.start()
                running = runner.options(prefetch=4).stream(fn, log.path)
                assert await anext(running) == 0
                assert await log.take(4) == ["0", "1", "2", "3"]
                waiting = asyncio.ensure_future(anext(runner.stream(fn, log.path)))
                await asyncio.sleep(0)
                unused = runner.stream(fn, log.path)
                await runner.aclose(grace=grace)
                got, error = await until_error(running)
                assert got == [1, 2, 3]
                assert isinstance(error, percore.RunnerClosed)
                with pytest.raises(percore.RunnerClosed):
                    await waiting
                with pytest.raises(percore.RunnerClosed):
                    await anext(unused)
                await running.aclose()
                assert await log.take(2) == ["GeneratorExit", "closed"]
                assert log.rest() == []


async def test_a_map_over_a_stream_ends_with_the_runner(make: MakeRunner) -> None:
    for fn in (streams.numbers, streams.anumbers):
        runner = make(threads=2)
        await runner.start()
        results = runner.map(jobs.aecho, runner.stream(fn, 1_000_000))
        assert await anext(results) == 0
        await runner.aclose()
        _, error = await until_error(results)
        assert isinstance(error, percore.RunnerClosed)
        await results.aclose()


async def test_a_close_waits_for_a_generator_that_is_being_closed(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        async for _ in runner.stream(streams.aslow_to_close, log.path, gate.path):
            break
        assert await log.next() == "closing"
        closing = asyncio.create_task(runner.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await closing
        assert await log.next() == "closed"


async def test_a_worker_that_drains_ends_its_streams_first(make: MakeRunner, log: Log) -> None:
    async with make(2) as runner:
        for fn in PAIR:
            stream = runner.options(key="same", prefetch=2).stream(fn, log.path, 50)
            assert await anext(stream) == 0
            place = await runner.options(key="same").run(jobs.awhere)
            worker_of(runner, place.index).kill(signal.SIGTERM)
            assert await all_of(stream) == list(range(1, 50))
            assert (await log.take(51))[-1] == "closed"


async def test_a_cancelled_close_ends_streams_at_once(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make_real()
    await runner.start()
    stream = runner.stream(streams.aslow_to_close, log.path, gate.path)
    assert await anext(stream) == 1
    closing = asyncio.create_task(runner.aclose())
    assert await log.next() == "closing"
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(percore.RunnerClosed):
        await all_of(stream)
    await stream.aclose()


# By a death


async def test_a_death_gives_what_was_sent_then_worker_died(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(retries=3) as runner:
        for fn in (streams.agated, streams.gated):
            stream = runner.options(prefetch=100).stream(fn, log.path, gate.path, 50)
            assert await anext(stream) == 0
            while await log.next() != "waits":  # a worker without a process is cancelled when it is killed, and says so
                pass
            while items_ready(stream) < 49:
                await runner.run(jobs.aecho)
            worker = worker_of(runner)
            worker.kill()
            await kill_arrived(worker)
            got, error = await until_error(stream)
            assert got == list(range(1, 50))
            assert isinstance(error, percore.WorkerDied)
            assert (error.started, error.attempts, error.call) == (True, 1, fn.__name__)
            await stream.aclose()
            await runner.run(jobs.aecho)
        statistics = runner.statistics()
        assert (statistics.failed, statistics.retried) == (2, 0)
        gate.open()
        await threads_ended(worker)


async def test_aclose_returns_when_the_worker_dies(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real() as runner:
        stream = runner.stream(streams.aslow_to_close, log.path, gate.path)
        assert await anext(stream) == 1
        closing = asyncio.create_task(stream.aclose())
        assert await log.next() == "closing"
        worker_of(runner).kill()
        await closing
        assert await runner.run(jobs.aecho, 1) == 1


async def test_a_stream_that_has_not_begun_moves_to_another_worker(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        blocking = asyncio.ensure_future(runner.run(jobs.wait, log.path, gate.path, 1))
        await log.next()
        items = asyncio.ensure_future(all_of(runner.stream(streams.numbers, 30)))
        await runner.broadcast(jobs.aecho)
        worker = worker_of(runner)
        worker.kill()
        await kill_arrived(worker)
        with pytest.raises(percore.WorkerDied):
            await blocking
        gate.open()
        assert await items == list(range(30))
        await threads_ended(worker)


async def test_a_forked_child_leaves_the_stream_alone(make_real: MakeRunner, log: Log) -> None:
    async with make_real() as runner:
        stream = runner.options(prefetch=2).stream(streams.told, log.path, 10)
        assert await anext(stream) == 0
        pid = os.fork()
        if not pid:
            try:
                close_call(stream)
            finally:
                os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        assert await all_of(stream) == list(range(1, 10))
        assert not supervisor_of(runner).closing.enders
