"""A garbage collection at any step, which runs a `__del__` of the user: no step of percore loses what that changes.

Up to 3.11 the collector runs where a container is made, even inside `list(d.items())`; later between two steps of Python code.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

import percore
from percore._calls.functions import Functions
from percore._common.system import IS_FREE_THREADED
from percore._map.in_flight import InFlight
from percore._protocol.interfaces import Fate
from percore._protocol.messages import MARK_WORDS, RECALL, Kind
from percore._scheduler.deadlines import Deadlines
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.lanes import Key
from percore._supervisor.closing import Closing
from percore._supervisor.nested import Nested
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.rates import Gate
from percore._worker.families import Family
from percore._worker.pacing import Pacing
from percore._worker.recalls import Recalls
from percore._worker.timeouts import Timeouts
from tests.unit.test_pool_worker import FrozenTurn

pytestmark = pytest.mark.skipif(IS_FREE_THREADED, reason="without a GIL collections wait for more than a threshold")

COUNT = 6
SOURCE = str(Path(percore.__file__).parent)

Story = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], bool]]
"""A step of percore, what the collection runs, and whether the result is right."""


Way = Callable[[Callable[[], Any], int, Callable[[], Any]], tuple[Any, bool]]
"""Runs a step, with the code of the user at a place of it. Returns the result, and whether there was such a place."""


def in_collection(step: Callable[[], Any], at: int, of_user: Callable[[], Any]) -> tuple[Any, bool]:
    """In one of the collections that there are if the collector runs as often as it can."""
    left = at

    def collected(phase: str, _info: dict[str, int]) -> None:
        nonlocal left
        if phase == "stop":
            left -= 1
            if left == -1:
                of_user()

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1, 10_000, 10_000)
    try:
        return step(), left < 0
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)


def before_line(step: Callable[[], Any], at: int, of_user: Callable[[], Any]) -> tuple[Any, bool]:
    """Before one of the lines of percore, or before it runs once more in a comprehension."""
    left = at

    def traced(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            left -= 1
            if left == -1:
                of_user()
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        return step(), left < 0
    finally:
        sys.settrace(before)


class Call(SimpleNamespace):
    """A plain call."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self) -> None:
        super().__init__(kind=Kind.THREAD, key=None, plan=None, outstanding=1, body=(), left=lambda: None)
        self.function = SimpleNamespace(name="f", number=1)
        self.running = lambda _fate: 1


def member_with(calls: int) -> tuple[PoolWorker, list[int]]:
    """A worker with so many plain calls, and the messages that it is sent."""
    dispatch: Dispatch[Any, PoolWorker] = Dispatch(10, 4)
    member, told = PoolWorker(0, 1, dispatch, FrozenTurn()), list[int]()
    channel = SimpleNamespace(send=lambda op, _id, _body: told.append(op), waits_since=0, has_read=lambda: True)
    member.attach(cast(Any, SimpleNamespace(channel=channel, fate=lambda _: Fate(True))), cast(Any, SimpleNamespace(held={})))
    member.defined.add(1)
    for _ in range(calls):
        member.send(cast(Any, Call()))
    return member, told


def cancelled_of(member: PoolWorker) -> Callable[[], object]:
    """What the user's code does: it cancels a call, which leaves its worker."""
    return lambda: member.take(next(iter(member.calls)))


def asked_back() -> Story:
    member, told = member_with(COUNT)
    return lambda: member.ask_back(10, 0), cancelled_of(member), lambda _: member.recalling and told[-1] == RECALL


def running() -> Story:
    member, _ = member_with(COUNT)
    return lambda: member.running(4, may_look=True), cancelled_of(member), lambda found: len(found) >= COUNT - 1


def running_in_the_dead() -> Story:
    member, _ = member_with(COUNT)
    return member.note_running, cancelled_of(member), lambda _: member._ran["f"] >= COUNT - 1


def cancelled_by_a_close() -> Story:
    member, _ = member_with(COUNT)
    cancelled: list[Any] = []
    closing = SimpleNamespace(_pool=SimpleNamespace(members={member}), _cancel=lambda _member, one: cancelled.append(one))
    step = lambda: Closing._cancel_running(cast(Any, closing))  # noqa: E731
    return step, cancelled_of(member), lambda _: len(cancelled) >= COUNT - 1


def holders_of_a_key() -> Story:
    member, _ = member_with(COUNT)
    keys = SimpleNamespace(is_taken=lambda _: True)
    nested = SimpleNamespace(_dispatch=SimpleNamespace(keys=keys), _calls=SimpleNamespace(members={member}))
    return lambda: Nested._holders(cast(Any, nested), None), cancelled_of(member), lambda found: len(found) >= COUNT - 1


def gate() -> Story:
    member, _ = member_with(COUNT)
    member.worker = cast(Any, SimpleNamespace(fate=lambda _: Fate(begun=False)))
    looked = Gate(cast(Any, SimpleNamespace(reopen=lambda _: None)), cast(Any, None))
    looked.held.update(dict.fromkeys(member.calls.values(), member))
    return looked.look, lambda: looked.held.popitem(), lambda _: len(looked.held) >= COUNT - 1


def deadlines() -> Story:
    kept: Deadlines[int] = Deadlines()
    for number in range(11):
        kept.add(float(number % 8), number)
    kept._enough = 10

    def step() -> set[int]:
        kept.sweep(lambda number: number < 9)
        kept.add(1.0, 200)
        kept.add(300.0, 201)
        return set(kept.due(1000.0))

    def of_user() -> None:
        kept.sweep(lambda _: False)
        for number, when in enumerate((1.0, 2.0, 5.0, 61.0, 300.0)):
            kept.add(when, 100 + number)

    added = set(range(100, 105))
    return step, of_user, lambda due: due >= {9, 10, 200, 201} and due & added in (set(), added)


def ends_of_maps() -> Story:
    ended: list[Any] = []
    family = Family(cast(Any, SimpleNamespace(channel=SimpleNamespace(loop=SimpleNamespace(call_soon_threadsafe=ended.append)))), 1)
    family.enders = {partial(int, number): None for number in range(COUNT)}
    return family.end, lambda: family.enders.popitem(), lambda _: len(ended) >= COUNT - 1


def numbers_in_use() -> Story:
    told: list[int] = []
    worker = SimpleNamespace(calls={}, defined={99}, tell=lambda _op, number, _body: told.append(number))
    known = {number: SimpleNamespace(number=number) for number in range(COUNT)}
    functions = SimpleNamespace(known=known, _held=set(), _workers=[worker])
    step = lambda: Functions._undefine_forgotten(cast(Any, functions))  # noqa: E731
    return step, lambda: known.update({100: SimpleNamespace(number=100)}), lambda _: told == [99]


def items_of_a_map() -> Story:
    cancelled: list[int] = []

    def item(number: int) -> Any:
        return SimpleNamespace(number=number, cancel=lambda: cancelled.append(number), member=None)

    in_flight = SimpleNamespace(batches=None, _alive={number: item(number) for number in range(COUNT)}, _sent={})
    step = lambda: InFlight.cancel_from(cast(Any, in_flight), 0)  # noqa: E731
    return step, lambda: in_flight._alive and in_flight._alive.popitem(), lambda _: len(cancelled) >= COUNT - 2


def lanes_of_a_key() -> Story:
    lanes = {number: SimpleNamespace(calls=[]) for number in range(COUNT)}
    key = SimpleNamespace(running=0, lanes=lanes)
    step = lambda: Key.is_idle(cast(Any, key))  # noqa: E731
    return step, lambda: lanes.update({len(lanes): SimpleNamespace(calls=[])}), lambda idle: idle is True


def calls_of_threads() -> Story:
    waiting = dict.fromkeys(range(COUNT), (None, None, None))
    threads = SimpleNamespace(free=lambda: 0, pacing=None, waiting=waiting)
    batches = {number: SimpleNamespace(items=[], begun_at=0.0, give_up=lambda _count: 0, end=0) for number in range(COUNT)}
    channel = SimpleNamespace(loop=None, send=lambda *_: None)
    recalls = Recalls(cast(Any, channel), cast(Any, threads), cast(Any, batches), {}, 63)

    def step() -> int:
        recalls._split(1)
        return len(recalls._unbegun())

    return step, lambda: (waiting.popitem(), batches.popitem()), lambda count: count >= COUNT - 1


def times_of_threads() -> Story:
    expired: list[int] = []
    loop = SimpleNamespace(call_later=lambda *_: SimpleNamespace(cancel=lambda: None))
    timeouts = Timeouts(cast(Any, loop), cast(Any, [0] * 64 * MARK_WORDS), lambda call_id, _: expired.append(call_id))
    for number in range(COUNT):
        timeouts.begin(number, 1e-9)
    return timeouts.look, lambda: timeouts.end(COUNT - 1), lambda _: len(expired) >= COUNT - 1


def paces() -> Story:
    pacing = Pacing(2, has_spare=False)
    pace = pacing.new()
    for number in range(COUNT):
        pacing.holds(number, pace)
    for number in list(pace.admitted):
        pacing.began(number)
    return pacing.look, lambda: pacing.left(next(iter(pace.admitted), 0)), lambda due: pacing.held + len(due) >= COUNT - 3


STORIES: Iterable[Callable[[], Story]] = (
    *(asked_back, running, running_in_the_dead, cancelled_by_a_close, holders_of_a_key, gate, deadlines, ends_of_maps),
    *(numbers_in_use, items_of_a_map, lanes_of_a_key, calls_of_threads, times_of_threads, paces),
)


@pytest.mark.parametrize("run", [in_collection, before_line])
def test_code_of_the_user_at_any_step_loses_nothing(run: Way, subtests: pytest.Subtests) -> None:
    for make in STORIES:
        with subtests.test(make.__name__):
            at, is_hit = 0, True
            while is_hit:
                step, of_user, is_right = make()
                result, is_hit = run(step, at, of_user)
                assert is_right(result), (at, result)
                at += 1
