"""Messages that no healthy worker sends, to the real supervisor: the worker that sends them dies, its calls end, and nothing else.

What a frame and a payload may contain is tested with the ring and the codec. Here the frames are whole, and the messages in them
lie: about calls that another worker has, that have ended, that never were, and about what has become of them.
"""

import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from percore import WorkerDied
from percore._protocol.messages import ITEM_SHIFT, RETURNED, TIMED_OUT, UNPICKLED, VALUE, Kind
from tests.counts import times
from tests.unit.call_orders import FAULTS, Case, World, watched, world
from tests.unit.stepped_calls import Ask
from tests.unit.stepped_workers import StepWorker

pytestmark = pytest.mark.asyncio_only

OPS: Final = range(-32, 34)
"""All messages, those of the other direction, and some that do not exist."""

BODIES: Final[list[Any]] = [
    *(None, True, 0, 1, -1, 7, 2**63, 1.5, float("nan"), "text", b"", b".", b"garbage", b"\x80\x04N.", (), (1,), [1], {}),
    *((0, 0.1, [1], []), (0, 0.1, [1, 2, 3, 4], [9]), (5, 1.0, [1], [0]), (0, "a", [], []), ("x",) * 9, (None,) * 12),
]
IDS: Final = [0, 1, -1, 7, 1 << ITEM_SHIFT, (1 << ITEM_SHIFT) + 3, 1 << 63]


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with watched():
        yield


def two_workers_with_calls(one: World, reads: int = 3) -> tuple[StepWorker, StepWorker]:
    """Let each worker have a call and some messages read. Return both."""
    for _ in range(one.case.calls):
        one.take("submits")
    for worker in one.workers:
        for _ in range(reads):
            if worker.inbox:
                worker.read()
    return one.workers[0], one.workers[1]


def lies(one: World, liar: StepWorker, *messages: tuple[int, int, Any]) -> bool:
    """Let a worker send messages. Return whether the channel has broken, as a real one does when they are handled."""
    channel, broke = liar.channel, False
    with one.loop.running():
        try:
            channel.on_frame(messages)
        except Exception as error:
            broke, channel.is_open = True, False
            channel.on_broken(error)
    one.loop.settle()
    FAULTS[:] = [fault for fault in FAULTS if "its channel broke" not in fault]
    return broke


def test_v9_a_call_that_has_begun_does_not_come_back() -> None:
    """It would run twice."""
    with world(Case({}, calls=2), ()) as one:
        liar, _ = two_workers_with_calls(one)
        (number,) = liar.running
        assert lies(one, liar, (RETURNED, number, None))
        one.finish()
        with pytest.raises(WorkerDied):
            one.call(liar.labels[number]).result()


@pytest.mark.parametrize("ends", ["dies", "returns"])
def test_v9_a_call_whose_arguments_were_read_runs_nowhere_else(ends: str) -> None:
    """They were released: it would run without them."""
    with world(Case({}, calls=2, as_pickle=True), ()) as one:
        liar, _ = two_workers_with_calls(one, reads=0)
        number = next(number for op, number, _ in liar.inbox if op > 0)
        assert not lies(one, liar, (UNPICKLED, number, None))
        if ends == "dies":
            liar.kill()
        else:
            assert lies(one, liar, (RETURNED, number, None))
        one.go_on(lambda: all(call.done() for call in one.calls))
        call = one.call(liar.labels[number])
        assert isinstance(call.exception(), WorkerDied)
        assert call.exception().started


def test_v9_arguments_that_need_no_reading_are_kept_whatever_a_worker_says() -> None:
    with world(Case({}, calls=2), ()) as one:
        liar, _ = two_workers_with_calls(one, reads=0)
        number = next(number for op, number, _ in liar.inbox if op > 0)
        assert not lies(one, liar, (UNPICKLED, number, None))
        liar.kill()
        one.finish()
        assert [call.result() for call in one.calls] == [0, 1]


@pytest.mark.parametrize("of_call", [{}, {"key": "k"}], ids=["awaited", "planned"])
def test_v9_a_call_that_is_answered_before_its_nested_calls_are_dropped_takes_no_place_twice(of_call: dict[str, Any]) -> None:
    """It has given its place back: a load of -1 would stay, and the worker could not be buried."""
    with world(Case({"asks": 1, "dies": 1}, calls=1, workers=1, asks=(Ask(),), of_call=of_call), ()) as one:
        for step in ("submits", "w0.1 reads", "w0.1 reads", "asks w0.1 0 0", "s hears w0.1"):
            one.take(step)
        (liar,) = one.workers
        (number,) = (number for number, label in liar.labels.items() if label == 0)
        (member,) = one.supervisor.members
        assert member.load == [1, 0, 0]  # the nested call has the place
        assert not lies(one, liar, (VALUE, number, 0))
        assert member.families == {}
        assert member.load[Kind.TASK] == len(member.calls)  # the nested call was cancelled, and may go on for a while
        liar.kill()
        one.go_on(lambda: one.calls[0].done() and liar.state == "gone")
        assert one.calls[0].result() == 0
        one.close("cuts")
        one.loop.settle()
        one.go_on(lambda: all(task.done() for task in one.tasks.values()) and not one.living())


def test_v9_a_call_without_a_timeout_does_not_exceed_it() -> None:
    with world(Case({}, calls=2, of_call={"hard_timeout": 100.0}), ()) as one:
        liar, _ = two_workers_with_calls(one)
        (number,) = liar.running
        assert lies(one, liar, (TIMED_OUT, number, None))
        one.finish()
        with pytest.raises(WorkerDied):
            one.call(liar.labels[number]).result()


@pytest.mark.long
@pytest.mark.timeout(times(50, 3000))
def test_v9_lies_cost_their_worker_alone() -> None:
    chance = random.Random(9)
    broken = sum(_one_history(chance) for _ in range(times(200, 200_000)))
    assert broken > 100


def _one_history(chance: random.Random) -> bool:
    """Let one of two workers lie. Return whether it was found out at once."""
    case = Case({}, calls=3, kind=chance.choice((Kind.TASK, Kind.THREAD)))
    with world(case, ()) as one:
        workers = list(two_workers_with_calls(one, chance.randrange(4)))
        chance.shuffle(workers)
        liar, other = workers
        ids = [*IDS, *liar.labels, *liar.labels, *other.labels, *(number | (1 << ITEM_SHIFT) for number in liar.labels)]
        messages = [(chance.choice(OPS), chance.choice(ids), chance.choice(BODIES)) for _ in range(chance.choice((1, 1, 2, 3)))]
        try:
            broke = lies(one, liar, *messages)
            assert not broke or liar.state == "dying"
            liar.stick()
            one.go_on(lambda: all(call.done() for call in one.calls if call not in _held(one, liar)))
            one.close("cuts")
            one.loop.settle()
            one.go_on(lambda: all(task.done() for task in one.tasks.values()) and not one.living())
            for number in set(other.labels.values()) - set(liar.labels.values()):
                call = one.call(number)
                assert call.cancelled() or call.exception() is not None or call.result() == number
            assert not one.loop.timers()
        except BaseException as error:
            error.add_note(f"worker {liar.index} has sent {messages}; its calls: {liar.labels}, those of the other: {other.labels}")
            raise
        return broke


def _held(one: World, worker: StepWorker) -> list[Any]:
    return [call for member in one.supervisor.members if member.worker is worker for call in member.calls.values()]
