"""Cancelling calls: by their future, by whoever awaits them, before and after they began."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

import percore
from percore._protocol.messages import CANCEL, DEFINE_TASK, Message
from percore._supervisor.burials import Burials
from percore._supervisor.call_registry import CallRegistry
from percore._worker.tasks import Tasks
from percore.testing import kill
from tests import jobs, nested_jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeRunner
from tests.internals import channel_of, members_of, sent_messages, supervisor_of
from tests.strikes import Strike
from tests.waiting import until

pytestmark = [
    pytest.mark.differs("uvloop", because="which callback of one iteration comes first is the loop's choice"),
    pytest.mark.differs("fallbacks", because="which callback of one iteration comes first is another bell's choice", on="fake"),
]
in_processes = pytest.mark.differs("fallbacks", because="what the other process does meanwhile is its own choice")

OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"key": "a"}, {"retries": 3, "retry_on": Exception}, {"timeout": 1e6}, {"key": "a", "retries": 3, "timeout": 1e6}],
    ids=["plain", "key", "retries", "timeout", "all"],
)
"""What `run` awaits is another kind of call under each."""


@in_processes
async def test_c2_cancelling_the_future_cancels_the_coroutine(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        sent = sent_messages(runner)
        future = runner.submit(jobs.await_, log.path, gate.path, 1)
        assert await log.next() == "1"
        assert future.cancel()
        assert future.cancelled()
        assert await log.next() == "cancelled 1"
        assert not future.cancel()
        assert sent[CANCEL] == 1
        assert await runner.run(jobs.aecho, 2) == 2


async def test_cancelling_the_awaiting_task_cancels_the_coroutine(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        sent = sent_messages(runner)
        task = asyncio.create_task(runner.run(jobs.await_, log.path, gate.path, 1))
        assert await log.next() == "1"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await log.next() == "cancelled 1"
        assert sent[CANCEL] == 1


async def test_a_timeout_cancels_the_coroutine(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await runner.run(jobs.await_, log.path, gate.path, 1)
        assert await log.take(2) == ["1", "cancelled 1"]


async def test_c5_a_task_group_cancels_its_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    async def fail_when(line: str) -> None:
        assert await log.next() == line
        raise KeyError("sibling")

    async with make() as runner:
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with asyncio.TaskGroup() as group:
                group.create_task(runner.run(jobs.await_, log.path, gate.path, 1))
                group.create_task(fail_when("1"))
        assert [type(error) for error in caught.value.exceptions] == [KeyError]
        assert await log.next() == "cancelled 1"


async def test_c1_a_call_that_waits_here_never_runs(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1) as runner:
        running = runner.submit(jobs.await_, log.path, gate.path, "first")
        waiting = runner.submit(jobs.await_, log.path, gate.path, "second")
        assert await log.next() == "first"
        waiting.cancel()
        assert runner.statistics().queued == 0
        gate.open()
        await running
        await runner.run(jobs.await_, log.path, gate.path, "third")
        assert log.rest() == ["third"]


@OPTIONS
async def test_c1_a_run_that_waits_here_never_runs(make: MakeRunner, log: Log, gate: Gate, options: dict[str, Any]) -> None:
    async with make(concurrency=1) as runner:
        view = runner.options(**options)
        running = asyncio.create_task(view.run(jobs.await_, log.path, gate.path, "first"))
        assert await log.next() == "first"
        waiting = [asyncio.create_task(view.run(jobs.await_, log.path, gate.path, "waiting")) for _ in range(3)]
        await asyncio.sleep(0)
        assert runner.statistics().queued == 3
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        assert runner.statistics().queued == 0
        gate.open()
        await running
        await view.run(jobs.await_, log.path, gate.path, "last")
        assert log.rest() == ["last"]
        assert not len(supervisor_of(runner).dispatch.keys)


@OPTIONS
async def test_c1_a_run_cancelled_in_the_iteration_of_its_turn_never_runs(
    make: MakeRunner, log: Log, gate: Gate, options: dict[str, Any]
) -> None:
    async with make(1, concurrency=1) as runner:
        view = runner.options(**options)
        running = asyncio.create_task(view.run(jobs.await_, log.path, gate.path, "first"))
        assert await log.next() == "first"
        waiting = asyncio.create_task(view.run(jobs.await_, log.path, gate.path, "second"))
        await asyncio.sleep(0)
        (member,) = members_of(runner)
        channel = channel_of(member)
        advance = channel.on_batch

        def cancel_first() -> None:
            waiting.cancel()  # 1. it is cancelled  2. a place is free, and it is the next  3. only now its task goes on
            assert advance is not None
            advance()

        channel.on_batch = cancel_first
        gate.open()
        await asyncio.wait([running, waiting])
        channel.on_batch = advance
        assert waiting.cancelled()
        assert runner.statistics().queued == runner.statistics().running == 0
        await view.run(jobs.await_, log.path, gate.path, "third")
        assert log.rest() == ["third"]
        assert not supervisor_of(runner).closing.unfinished()
        assert not len(supervisor_of(runner).dispatch.keys)


@OPTIONS
async def test_c3_a_run_cancelled_in_the_iteration_of_its_outcome_has_ended(
    make: MakeRunner, log: Log, gate: Gate, options: dict[str, Any]
) -> None:
    async with make(1) as runner:
        view = runner.options(**options)
        sent = sent_messages(runner)
        task = asyncio.create_task(view.run(jobs.await_, log.path, gate.path, "first"))
        assert await log.next() == "first"
        (member,) = members_of(runner)
        channel = channel_of(member)
        receive = channel.on_frame

        def cancel_first(messages: list[Message]) -> None:
            task.cancel()  # 1. it is cancelled  2. its outcome is there  3. only now its task goes on
            receive(messages)

        channel.on_frame = cancel_first
        gate.open()
        await asyncio.wait([task])
        channel.on_frame = receive
        assert task.cancelled()
        assert sent[CANCEL] == 0
        assert runner.statistics().running == runner.statistics().queued == 0
        assert await runner.map(jobs.aecho, range(8)) == list(range(8))
        assert not len(supervisor_of(runner).dispatch.keys)


@OPTIONS
@in_processes
async def test_c3_a_result_that_comes_in_the_iteration_of_the_cancellation_is_not_read(
    make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    read: list[None] = []
    monkeypatch.setattr(jobs, "refuse", lambda: read.append(None))
    async with make_real(1) as runner:
        view = runner.options(**options)
        assert await view.run(jobs.give, "unreadable") is None
        assert read.pop() is None
        task = asyncio.create_task(view.run(jobs.give, "unreadable"))
        (member,) = members_of(runner)
        channel = channel_of(member)
        receive = channel.on_frame

        def cancel_first(messages: list[Message]) -> None:
            task.cancel()
            receive(messages)

        channel.on_frame = cancel_first
        await asyncio.wait([task])
        channel.on_frame = receive
        assert task.cancelled()
        assert read == []
        assert await view.run(jobs.aecho, 1) == 1
        statistics = runner.statistics()
        assert (statistics.running, statistics.queued) == (0, 0)
        assert not len(supervisor_of(runner).dispatch.keys)


@OPTIONS
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_error_of_a_run_keeps_nobody_s_frames(make: MakeRunner, options: dict[str, Any]) -> None:
    """Else a collection would have to find what the callers' frames hold, in a cycle of the error and its own traceback."""
    async with make(1) as runner:
        view = runner.options(**options)
        gc.disable()
        try:
            fn: Any
            for fn in (jobs.fail, jobs.afail):
                try:
                    await view.run(fn, jobs.PageError("of its own", 1))
                except jobs.PageError as error:
                    seen = weakref.ref(error)
                await asyncio.sleep(0)  # the loop has it, too, while this iteration lasts
                assert seen() is None
        finally:
            gc.enable()


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_no_error_keeps_anybody_s_frames(make: MakeRunner, subtests: pytest.Subtests) -> None:
    """As above, for the other verbs."""
    error = jobs.PageError("of its own", 1)

    async def start() -> None:
        async with make(1, lifespan=partial(jobs.fail, error)):
            pass

    async with make(1, max_pending=1) as runner:

        async def stream(**options: Any) -> None:
            async for _ in runner.map(jobs.fail, [error, error], **options):
                pass

        uses: dict[str, Callable[[], Awaitable[Any]]] = {
            "map": lambda: runner.map(jobs.fail, [error, error]).collect(),
            "stream": stream,
            "unordered stream": lambda: stream(ordered=False),
            "broadcast": lambda: runner.broadcast(jobs.fail, error),
            "start": start,
        }
        for name, use in uses.items():
            with subtests.test(name=name):
                assert await _is_freed(use)
        running = runner.submit(asyncio.sleep, 1000)
        waiting = asyncio.create_task(_is_freed(lambda: runner.run(jobs.aecho)))
        await asyncio.sleep(0)
        await runner.aclose(grace=0)
        with pytest.raises(percore.RunnerClosed):
            await running
        with subtests.test(name="refused"):
            assert await waiting


async def _is_freed(use: Callable[[], Awaitable[Any]]) -> bool:
    """Return whether the error that this raises is freed without a garbage collection."""
    seen: Any = None
    gc.disable()
    try:
        try:
            await use()
        except percore.PercoreError as error:
            seen = weakref.ref(error)
        except jobs.PageError as error:
            seen = weakref.ref(error)
        for _ in range(3):  # the loop has it, too, while this iteration lasts
            await asyncio.sleep(0)
        return seen() is None
    finally:
        gc.enable()


async def test_peers_15_a_call_queued_ahead_on_a_thread_never_runs(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        running = runner.submit(jobs.wait, log.path, gate.path, "first")
        ahead = [runner.submit(jobs.wait, log.path, gate.path, f"ahead {i}") for i in range(3)]
        assert await log.next() == "first"
        ahead[1].cancel()
        await runner.run(jobs.aecho)  # whatever was sent before has been read now
        gate.open()
        await asyncio.gather(running, ahead[0], ahead[2])
        assert log.rest() == ["ahead 0", "ahead 2"]


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
@in_processes
async def test_c5_calls_cancelled_at_once_give_their_places_back(make: MakeRunner, fn: Any) -> None:
    async with make(concurrency=2, threads=2) as runner:
        for _ in range(20):
            futures = [runner.submit(fn, i) for i in range(5)]
            for future in futures:
                future.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await runner.map(fn, range(10)) == list(range(10))
        assert runner.statistics().queued == 0


@in_processes
async def test_c1_a_call_cancelled_before_its_worker_read_it_never_runs(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(concurrency=4) as runner:
        blocking = runner.submit(jobs.block_loop, log.path, gate.path)
        assert await log.next() == "blocked"
        unread = runner.submit(jobs.await_, log.path, gate.path, "unread")
        await asyncio.sleep(0)
        unread.cancel()
        await asyncio.sleep(0)
        gate.open()
        await blocking
        async with asyncio.timeout(10):
            assert await runner.map(jobs.aecho, range(8)) == list(range(8))
        assert log.rest() in ([], ["unread", "cancelled unread"])
        assert runner.statistics().running == 0


async def test_c2_cleaning_up_goes_on_and_holds_the_place(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(concurrency=1) as runner:
        sent = sent_messages(runner)
        future = runner.submit(jobs.clean_up, log.path, gate.path, other_gate.path)
        assert await log.next() == "began"
        future.cancel()
        assert await log.next() == "cleaning"
        following = runner.submit(jobs.say, log.path, "plain")
        await following
        waiting = runner.submit(jobs.await_, log.path, other_gate.path, "following")
        assert runner.statistics().running == 1
        other_gate.open()
        await waiting
        assert log.rest() == ["plain", "clean", "following"]
        assert sent[CANCEL] == 1


async def test_c6_closing_does_not_cancel_a_second_time(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    runner = make(concurrency=1)
    await runner.start()
    sent = sent_messages(runner)
    future = runner.submit(jobs.clean_up, log.path, gate.path, other_gate.path)
    assert await log.next() == "began"
    closing = [asyncio.create_task(runner.aclose(grace=0)) for _ in range(2)]
    assert await log.next() == "cleaning"
    future.cancel()
    await asyncio.sleep(0)
    other_gate.open()
    await asyncio.gather(*closing)
    assert log.rest() == ["clean"]
    assert sent[CANCEL] == 1


async def test_c6_close_waits_for_the_clean_up_of_a_cancelled_call(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate
) -> None:
    async with make() as runner:
        future = runner.submit(jobs.clean_up, log.path, gate.path, other_gate.path)
        assert await log.next() == "began"
        future.cancel()
        assert await log.next() == "cleaning"
        asyncio.get_running_loop().call_soon(other_gate.open)
    assert log.rest() == ["clean"]


@in_processes
async def test_c4_a_plain_call_that_began_runs_on_and_holds_its_thread(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        task = asyncio.create_task(runner.run(jobs.wait, log.path, gate.path, "running"))
        assert await log.next() == "running"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        following = runner.submit(jobs.say, log.path, "following")
        await runner.run(jobs.aecho)
        assert log.rest() == []
        gate.open()
        await following
        assert log.rest() == ["following"]


async def test_an_awaitable_of_a_plain_function_is_cancelled(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        path, shut = log.path, gate.path
        future = runner.submit(lambda: jobs.await_(path, shut, 1))
        assert await log.next() == "1"
        future.cancel()
        assert await log.next() == "cancelled 1"


async def test_c3_what_comes_after_the_cancellation_is_dropped(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    async with make(concurrency=2) as runner:
        stubborn = runner.submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
        failing = runner.submit(jobs.fail_when_cancelled, log.path, gate.path)
        assert await log.take(2) == ["began", "began"]
        stubborn.cancel()
        failing.cancel()
        assert await log.next() == "ignored"
        other_gate.open()
        assert await runner.map(jobs.aecho, range(6)) == list(range(6))
        assert stubborn.cancelled()
        assert failing.cancelled()
    del stubborn, failing
    gc.collect()
    assert reports == []


async def test_c3_a_call_that_is_done_cannot_be_cancelled(make: MakeRunner) -> None:
    async with make() as runner:
        sent = sent_messages(runner)
        future = runner.submit(jobs.aecho, 1)
        assert await future == 1
        assert not future.cancel()
        assert sent[CANCEL] == 0


@in_processes
async def test_one_of_many_is_cancelled_alone(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2) as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(10)]
        await log.take(10)
        futures[4].cancel()
        assert await log.next() == "cancelled 4"
        gate.open()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [result for result in results if not isinstance(result, BaseException)] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


async def test_c3_a_cancel_that_is_read_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(1, threads=1)
    make_task = Tasks._await

    def cancel_at_once(tasks: Tasks, call_id: int) -> None:
        make_task(tasks, call_id)
        server = tasks.families.runs.__self__  # type: ignore[attr-defined]  # a bound method
        server._cancel(call_id, None)  # as if it had been read in the same iteration of the loop

    monkeypatch.setattr(Tasks, "_await", cancel_at_once)
    async with runner:
        future = runner.submit(jobs.later, 1)
        async with asyncio.timeout(10):
            await asyncio.wait([future])
        assert not supervisor_of(runner).closing.unfinished()


async def test_c1_a_call_cancelled_while_its_function_is_sent_does_not_stay() -> None:
    """As by a `__del__`, in a garbage collection at that moment."""
    async with FakeRunner(1, concurrency=1) as runner:
        (member,) = members_of(runner)
        first, second = runner.submit(jobs.aecho, 1), runner.submit(jobs.apattern, 2)
        tell, sent = member.tell, []

        def send(op: int, call_id: int, body: Any) -> None:
            sent.append((op, call_id))
            if op == DEFINE_TASK:
                second.cancel()
            tell(op, call_id, body)

        member.tell = send
        assert await first == 1
        assert second.cancelled()
        assert sent[0][0] == DEFINE_TASK
        assert await runner.run(jobs.aecho, 3) == 3
        assert not supervisor_of(runner).closing.unfinished()


async def test_c2_a_call_cancelled_before_its_message_was_sent_does_not_run_on() -> None:
    """As by a `__del__`, in a garbage collection at that moment. A CANCEL that comes before its call is dropped."""
    async with FakeRunner(1) as runner:
        (member,) = members_of(runner)
        tell = member.tell

        def send(op: int, call_id: int, body: Any) -> None:
            if op > 0:
                for call in supervisor_of(runner).calls.pending():
                    call.cancel()  # type: ignore[attr-defined]  # a call of `submit` is a future
            tell(op, call_id, body)

        member.tell = send
        future = runner.submit(nested_jobs.for_ever)
        member.tell = tell
        assert future.cancelled()
        for _ in range(20):
            await asyncio.sleep(0)
        assert member.calls == {}


@pytest.mark.parametrize("makes_call", [False, True], ids=["cancels", "calls-and-cancels"])
@pytest.mark.parametrize("key", [None, "a"])
async def test_c1_a_call_cancelled_at_any_step_of_its_sending_does_not_run_on(
    monkeypatch: pytest.MonkeyPatch, key: str | None, makes_call: bool
) -> None:
    """As by a `__del__` that a garbage collection runs there, and that may make another call first."""
    send_waiting = CallRegistry.send_waiting
    strike = Strike(0, lambda _: False)

    def struck(calls: CallRegistry, kind: int) -> None:
        with strike.on():
            send_waiting(calls, kind)

    monkeypatch.setattr(CallRegistry, "send_waiting", struck)
    async with FakeRunner(1, concurrency=1) as runner:
        (member,) = members_of(runner)
        calls = supervisor_of(runner).calls
        bodies: list[Any] = []
        tell = member.tell

        def send(op: int, call_id: int, body: Any) -> None:
            bodies.append(body)
            tell(op, call_id, body)

        member.tell = send
        await runner.run(jobs.echo, 0)
        for at in itertools.count():
            others: list[asyncio.Future[Any]] = []
            first = runner.submit(nested_jobs.for_ever, "first")
            call = runner.options(key=key).submit(nested_jobs.for_ever, "second")

            def attack(call: asyncio.Future[Any] = call, others: list[asyncio.Future[Any]] = others) -> None:
                if makes_call:
                    others.append(runner.submit(jobs.echo, 1))
                call.cancel()

            strike = Strike(at, lambda code: "percore" in code.co_filename, attack)
            first.cancel()
            await until(lambda first=first: first not in member.calls.values())
            call.cancel()
            assert await asyncio.gather(*others) == [1] * len(others)
            try:
                async with asyncio.timeout(5):
                    await until(lambda: not member.calls and not calls.waiting())
            except TimeoutError:
                raise AssertionError(f"struck in {strike.name}: {calls.waiting()} calls wait, {member.calls} run on") from None
            assert () not in bodies, f"struck in {strike.name}: sent without its arguments"
            if not strike.name:
                break
        assert at > 20


@pytest.mark.parametrize("has_begun", [False, True], ids=["not-begun", "begun"])
@pytest.mark.parametrize("key", [None, "a"])
async def test_c6_a_call_cancelled_at_any_step_of_a_death_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, key: str | None, has_begun: bool
) -> None:
    """As by a `__del__` that a garbage collection runs there."""
    exited = Burials.exited
    strike = Strike(0, lambda _: False)

    def struck(burials: Burials, *args: Any) -> Any:
        with strike.on():
            return exited(burials, *args)

    monkeypatch.setattr(Burials, "exited", struck)
    files = ("deaths.py", "retries.py", "call_registry.py", "pool_worker.py")  # not those of the audit, which asks the dispatch
    async with FakeRunner(1) as runner:
        calls = supervisor_of(runner).calls
        for at in itertools.count():
            await runner.run(jobs.aecho, 1)
            call = runner.options(key=key, retries=1).submit(nested_jobs.for_ever, "call")
            member = members_of(runner)[0]
            if has_begun:
                await until(lambda member=member: runner.statistics().running and member.has_read())
            strike = Strike(at, lambda code: code.co_filename.endswith(files), call.cancel)
            kill(runner)
            await until(lambda member=member: member not in members_of(runner))
            call.cancel()
            try:
                async with asyncio.timeout(5):
                    await until(lambda: not calls.waiting() and not any(one.calls for one in members_of(runner)))
            except TimeoutError:
                raise AssertionError(f"struck in {strike.name}: {calls.waiting()} calls wait, or one runs on") from None
            if not strike.name:
                break
        assert at > 10
