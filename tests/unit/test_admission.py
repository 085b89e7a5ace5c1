"""How many calls are let in: first come first served, nobody twice, nothing lost when a waiter is cancelled."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from percore._common.endings import settle, settle_by
from percore._common.errors import RunnerClosed, RunnerFull
from percore._supervisor.admission import Admission
from tests.strikes import Fault, Strike


def admission_of(limit: int, inside: int = 0) -> Admission:
    admission = Admission(asyncio.get_running_loop(), limit)
    for _ in range(inside):
        admission.enter_now()
    return admission


async def waiting(*coroutines: Coroutine[Any, Any, int]) -> list[asyncio.Task[int]]:
    """Tasks, each of which has come as far as it can."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    return tasks


async def turn() -> None:
    """Let everybody who was let in go on."""
    for _ in range(3):
        await asyncio.sleep(0)


def free(admission: Admission) -> int:
    """How many could enter now; they leave again."""
    count = 0
    try:
        while True:
            admission.enter_now()
            count += 1
    except RunnerFull:
        admission.leave(count)
        return count


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_so_many_are_let_in_and_no_more(limit: int) -> None:
    admission = admission_of(limit)
    for _ in range(limit):
        admission.enter_now()
    with pytest.raises(RunnerFull) as caught:
        admission.enter_now()
    assert caught.value.limit == limit
    admission.leave()
    admission.enter_now()
    with pytest.raises(RunnerFull):
        admission.enter_now()


class CountedFuture(asyncio.Future[None]):
    """Counts how often one is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedFuture.compared += 1
        return self is other

    __hash__ = asyncio.Future.__hash__


@pytest.mark.parametrize("order", ["first", "last"])
async def test_many_that_wait_are_cancelled_without_a_search_for_each(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = admission_of(1, inside=1)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(CountedFuture, "compared", 0)
    with monkeypatch.context() as patch:
        patch.setattr(admission, "_loop", SimpleNamespace(create_future=lambda: CountedFuture(loop=loop)))
        tasks = await waiting(*(admission.enter() for _ in range(1000)))
    last = tasks.pop()
    for task in tasks if order == "first" else reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    assert CountedFuture.compared < 1000
    admission.leave()
    assert await last == 1
    assert free(admission) == 0


async def test_who_has_room_does_not_wait() -> None:
    admission = admission_of(3)
    assert await admission.enter() == 1
    assert await admission.enter(100) == 2
    assert free(admission) == 0


@pytest.mark.parametrize(("most", "entered"), [(1, 1), (3, 3), (4, 4), (5, 4), (1000, 4)])
async def test_several_are_let_in_as_far_as_there_is_room(most: int, entered: int) -> None:
    admission = admission_of(10, 6)
    assert await admission.enter(most) == entered
    assert free(admission) == 4 - entered


async def test_first_come_first_served() -> None:
    admission = admission_of(1, 1)
    order: list[int] = []

    async def enter(number: int) -> int:
        count = await admission.enter()
        order.append(number)
        return count

    tasks = await waiting(*(enter(number) for number in range(5)))
    for number in range(5):
        assert order == list(range(number))
        admission.leave()
        await turn()
    assert order == list(range(5))
    assert [await task for task in tasks] == [1] * 5


async def test_who_cannot_wait_does_not_overtake_who_does() -> None:
    admission = admission_of(2, 2)
    (task,) = await waiting(admission.enter())
    admission.leave()  # this room is the waiter's, though it has not run yet
    with pytest.raises(RunnerFull):
        admission.enter_now()
    assert await task == 1
    with pytest.raises(RunnerFull):
        admission.enter_now()


async def test_who_comes_later_and_wants_several_does_not_overtake() -> None:
    admission = admission_of(4, 4)
    first, second = await waiting(admission.enter(1), admission.enter(10))
    admission.leave(3)
    assert await first == 1
    assert await second == 2
    assert free(admission) == 0


async def test_while_others_wait_one_of_several_is_let_in() -> None:
    admission = admission_of(4, 4)
    first, second, third = await waiting(admission.enter(10), admission.enter(10), admission.enter(1))
    admission.leave(2)
    assert await first == 1
    assert await second == 1
    assert not third.done()
    admission.leave()
    assert await third == 1


async def test_leaving_as_the_callback_of_a_future() -> None:
    admission = admission_of(1, 1)
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call.add_done_callback(admission.left)
    (task,) = await waiting(admission.enter())
    call.cancel()
    assert await task == 1


@pytest.mark.parametrize("after_builtins", [False, True], ids=["entry", "return"])
async def test_a_ctrl_c_while_others_are_let_in_loses_nobody(after_builtins: bool) -> None:
    """Who waited is let in then, or by the next call that leaves; and no room is counted that nobody has."""
    codes = (settle.__code__, Admission.leave.__code__) if after_builtins else (settle.__code__,)
    for at in itertools.count():
        admission = admission_of(2, 2)
        tasks = await waiting(admission.enter(), admission.enter())
        strike = Strike(at, lambda code: code in codes, after_builtins=after_builtins)
        with contextlib.suppress(Fault), strike.on():
            admission.leave()
        admission.leave()
        await turn()
        ended = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        await turn()
        assert ended == [True, True], at
        admission.leave(2)
        assert free(admission) == 2, at
        if not strike.name:
            break
    assert at > 0


@pytest.mark.parametrize("after_builtins", [False, True], ids=["entry", "return"])
async def test_a_refusal_that_a_ctrl_c_ends_goes_on_when_it_is_called_again(after_builtins: bool) -> None:
    codes = (settle_by.__code__, *(() if not after_builtins else (Admission.refuse.__code__,)))
    for at in itertools.count():
        admission = admission_of(1, 1)
        tasks = await waiting(admission.enter(), admission.enter(), admission.enter())
        strike = Strike(at, lambda code: code in codes, after_builtins=after_builtins)
        with contextlib.suppress(Fault), strike.on():
            admission.refuse(lambda: RunnerClosed("closed"))
        admission.refuse(lambda: RunnerClosed("closed"))
        await turn()
        ended = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert ended == [True] * 3, at
        assert [type(task.exception()) for task in tasks] == [RunnerClosed] * 3
        if not strike.name:
            break
    assert at > 0


# Cancellation


async def test_cancelled_while_waiting_it_takes_no_room() -> None:
    admission = admission_of(1, 1)
    first, second = await waiting(admission.enter(), admission.enter())
    first.cancel()
    await turn()
    assert first.cancelled()
    admission.leave()
    assert await second == 1
    admission.leave()
    assert free(admission) == 1


async def test_cancelled_when_it_was_let_in_it_gives_the_room_to_the_next() -> None:
    # 1. a call leaves, and its room is the first waiter's; 2. that is cancelled before it runs.
    admission = admission_of(1, 1)
    first, second = await waiting(admission.enter(), admission.enter())
    admission.leave()
    first.cancel()
    assert await second == 1
    assert first.cancelled()
    assert free(admission) == 0
    admission.leave()
    assert free(admission) == 1


async def test_cancelled_just_before_a_room_is_free_it_does_not_get_it() -> None:
    # 1. the first waiter is cancelled; 2. before it runs, a call leaves.
    admission = admission_of(1, 1)
    first, second = await waiting(admission.enter(), admission.enter())
    first.cancel()
    admission.leave()
    assert await second == 1
    await turn()
    assert first.cancelled()
    assert free(admission) == 0
    admission.leave()
    assert free(admission) == 1


async def test_all_waiters_cancelled_leave_all_room() -> None:
    admission = admission_of(2, 2)
    tasks = await waiting(*(admission.enter(3) for _ in range(5)))
    for task in tasks:
        task.cancel()
    admission.leave(2)
    await turn()
    assert all(task.cancelled() for task in tasks)
    assert free(admission) == 2
    assert await admission.enter(5) == 2


async def test_whatever_happens_the_room_is_kept(subtests: pytest.Subtests) -> None:
    for seed in range(20):
        with subtests.test(seed=seed):
            numbers = random.Random(seed)
            limit = numbers.randint(1, 5)
            admission = admission_of(limit)
            tasks: list[asyncio.Task[int]] = []
            inside = 0
            for _ in range(300):
                what = numbers.random()
                if what < 0.4:
                    tasks.append(asyncio.ensure_future(admission.enter(numbers.randint(1, 4))))
                elif what < 0.6 and tasks:
                    numbers.choice(tasks).cancel()
                elif what < 0.8 and inside:
                    count = numbers.randint(1, inside)
                    admission.leave(count)
                    inside -= count
                else:
                    await turn()
                inside += sum(task.result() for task in tasks if task.done() and not task.cancelled())
                tasks = [task for task in tasks if not task.done()]
                assert inside <= limit
            for task in tasks:
                task.cancel()
            await turn()
            inside += sum(task.result() for task in tasks if task.done() and not task.cancelled())
            assert free(admission) == limit - inside
