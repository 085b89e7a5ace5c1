"""Every kind of message that the two sides send, at its largest: each fits into the ring, or it would stop its channel for ever."""

import asyncio
import logging
import os
import pickle
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from percore import PayloadTooLarge
from percore._calls.context_variables import Contexts
from percore._calls.functions import Function
from percore._calls.items import Batch
from percore._common.system import HAS_EVENTFD
from percore._map.rows import Rows, Spec
from percore._protocol import messages as _messages
from percore._protocol.messages import ID_MASK, ITEM_SHIFT, Body, Kind
from percore._scheduler.batching import Batches, Run
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.key_names import Names
from percore._scheduler.places import places_for, room_of
from percore._scheduler.windows import MOST_OF_ONE
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import Turn
from percore._transport import codec
from percore._transport.codec import encode, is_inline
from percore._transport.doorbell import EventBell
from percore._transport.frames import LARGEST_FRAME, MAX_FRAME, RING_SIZE
from percore._transport.log_records import pack
from percore._transport.ring import HEADER_SIZE
from percore._transport.slots import INLINE_LIMIT, SLOT_BITS, SLOT_MASK
from percore._worker_process.log_forwarding import LOG_RING_SIZE

LARGEST_ID: Final = (1 << 15) << ITEM_SHIFT | ID_MASK
SLOT: Final = (1 << 36) << SLOT_BITS | SLOT_MASK
WIDE: Final = "\U0001f600"
HEAVY_ROWS: Final[list[tuple[Any, ...]]] = [
    (2**255,) * 32,
    (-(2**256) + 1,) * 32,
    (WIDE * 4096,),
    (WIDE * 4064, *[2**255] * 31),
    (b"x" * 4096, *[0.5] * 31),
    (0.5,) * 32,
    (None,),
    (1,),
    (),
    (1, [1]),  # pickled, as the next one
    ("x" * 16_300, []),
]


NO_SHARES: Final = cast("Any", SimpleNamespace(held={}))
STORE: Final = cast("Any", SimpleNamespace(**vars(codec), passes=is_inline, pickled=pickle.dumps))


class Wire:
    """A channel of which only the messages count."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, Body]] = []

    def send(self, op: int, call_id: int, body: Body) -> None:
        self.sent.append((op, call_id, body))


class Taker:
    """A map that takes what its rows become."""

    names = Names()

    def __init__(self) -> None:
        self.batches: Batches[Run] = Batches(lambda run: run, codec.HEAVIEST_BATCH)
        self.batches.cost.measured(1000, 1e-6)  # batches are as large as can be

    def is_done(self) -> bool:
        return False

    def take_run(self, run: Run, _size: int) -> None:
        self.batches.append(run)

    def take_item(self, *_: object) -> None:
        raise AssertionError("it travels in batches")

    take_failure = take_item


def batches_of(rows: list[Any], *, is_single: bool) -> list[bytes]:
    """The messages of a map over these rows, of a function that takes no time."""
    taker = Taker()
    function = Function(print, Kind.THREAD)
    function.number = 1 << 40
    functions = SimpleNamespace(
        store=STORE,
        pickle=lambda _fn, args, kwargs: (pickle.dumps((args, kwargs)), []),
        discard=lambda _body: None,
        size_of=lambda body: len(body) if type(body) is bytes else 0,
    )
    spec = Spec(ordered=True, window=None, key=None, return_exceptions=False, pairs=False, star=not is_single, policy=None)
    Rows(cast("Any", functions), function, spec, taker, is_single=True, is_batched=True).submit(0, rows)
    flow = cast("Any", SimpleNamespace(function=function, queue=None, store=STORE))
    messages: list[Any] = []
    while (run := taker.batches.pop(1)) is not None:
        messages.append(Batch(flow, run, None).message())
    return messages


def largest_recall() -> bytes:
    """Its body, of a worker that is full of calls with keys, all places of which were used for years."""
    loop = asyncio.new_event_loop()
    try:
        concurrency, threads = 1_000_000, 10_000
        member = PoolWorker(0, 1, Dispatch(concurrency, threads), Turn(loop))
    finally:
        loop.close()
    wire = Wire()
    member.attach(cast("Any", SimpleNamespace(channel=wire)), NO_SHARES)
    room, stride = room_of(concurrency, threads), places_for(room_of(concurrency, threads))
    call = cast("Any", SimpleNamespace(key="key", kind=Kind.THREAD))
    member.calls = dict.fromkeys(range(stride * 2**25, stride * 2**25 + room - concurrency), call)
    member.ask_back(1, 0)
    (message,) = wire.sent
    assert message[:2] == (_messages.RECALL, 1)
    assert isinstance(message[2], bytes)
    assert set(memoryview(message[2]).cast("I")) == set(range(room - concurrency))
    return message[2]


LARGEST_ARGUMENTS: Final = (WIDE * 4065, *[2**255] * 31)
PICKLE: Final = b"x" * INLINE_LIMIT
LARGEST: Final[dict[str, Any]] = {
    "DEFINE_TASK": PICKLE,
    "DEFINE_THREAD": PICKLE,
    "UNDEFINE": None,
    "CANCEL": MOST_OF_ONE,
    "BEGIN_BY": 1e9 / 3,
    "TIMEOUT": 1e9 / 3,
    "WITHDRAW": None,
    "RELEASE": 1 << 36,
    "RECALL": largest_recall,
    "FINISH": None,
    "ONCE_TASK": PICKLE,
    "ONCE_THREAD": PICKLE,
    "BATCH": lambda: max((batches_of([row] * 5000, is_single=False)[0] for row in HEAVY_ROWS), key=len),
    "TERMS": lambda: (1e9, heaviest_context(), True, 1_000_000, 1e9 / 3, True, True),
    "DRAIN": None,
    "FORGET": None,
    "SHARE": SLOT,
    "CREDIT": 1_000_000,
    "ANSWER_VALUE": WIDE * 4096,
    "ANSWER_RESULT": PICKLE,
    "ANSWER_ERROR": PICKLE,
    "ANSWER_ITEMS": lambda: ([b"x" * 48] * 1000, [*range(1000)]),
    "ANSWER_ITEM": PICKLE,
    "ASK": lambda: (
        *(1, 1, WIDE * 256, WIDE * 256, WIDE * 4096, True, 1_000_000, (1_000_000, b"x" * 4096, 1e9, 1e9, 1e9)),
        *(heaviest_context(), (), b"x" * 16_384),
    ),
    "ASKED": PICKLE,
    "DROP": None,
    "TAKEN": None,
    "GRANT": 1_000_000,
    "CLOSE": None,
    "VALUE": WIDE * 4096,
    "RESULT": PICKLE,
    "ERROR": PICKLE,
    "CANCELLED": None,
    "STARTED": None,
    "RETURNED": MOST_OF_ONE,
    "UNPICKLED": None,
    "READY": 1 << 31,
    "UNREADY": PICKLE,
    "DRAINING": None,
    "HOLDING": True,
    "VALUES": PICKLE,
    "TIMED_OUT": None,
    "LEASED": SLOT,
    "UNLEASED": SLOT,
    "FORGOTTEN": None,
    "FAILED": PICKLE,
    "ITEMS": PICKLE,
    "ITEM": PICKLE,
    "ENDED": None,
    "MEASURED": lambda: (WIDE * 256, ((1 << 10, 1 << 40),) * 400, *((1 << 62,) * 5)),
}
"""By the name of each kind, the largest body: a pickle or results of a batch of more than INLINE_LIMIT bytes go through a slot."""

NO_KINDS: Final = {"ITEM_SHIFT", "ID_MASK", "MARK_WORDS"}


def heaviest_context() -> bytes:
    """The largest values of context variables."""
    values = captured([b"x" * 99_900])
    assert type(values) is bytes
    return values


def captured(values: list[Any]) -> Any:
    """What goes with a call while variables have these values."""
    variables = [ContextVar[Any](f"variable {number}") for number in range(len(values))]
    tokens = [variable.set(value) for variable, value in zip(variables, values, strict=True)]
    try:
        return Contexts(variables, STORE).capture()
    finally:
        for variable, token in zip(variables, tokens, strict=True):
            variable.reset(token)


def test_every_kind_of_message_is_known_here() -> None:
    assert {name for name, value in vars(_messages).items() if name.isupper() and type(value) is int} - NO_KINDS == set(LARGEST)


def test_the_largest_of_each_kind_fits_into_the_ring(subtests: pytest.Subtests) -> None:
    for name in LARGEST:
        with subtests.test(name=name):
            body = LARGEST[name]() if callable(LARGEST[name]) else LARGEST[name]
            assert len(encode([(getattr(_messages, name), LARGEST_ID, body)])) <= MAX_FRAME < LARGEST_FRAME


def test_a_call_that_carries_its_arguments_as_they_are_fits_into_the_ring() -> None:
    assert is_inline(LARGEST_ARGUMENTS)
    assert len(encode([(1 << 40, LARGEST_ID, LARGEST_ARGUMENTS)])) <= MAX_FRAME


def test_a_batch_is_as_large_as_it_is_meant_to_be(subtests: pytest.Subtests) -> None:
    for row in HEAVY_ROWS:
        with subtests.test(row=row):
            for message in batches_of([row] * 5000, is_single=False):
                assert len(message) <= INLINE_LIMIT


def test_a_batch_of_bare_values_is_as_large_as_it_is_meant_to_be(subtests: pytest.Subtests) -> None:
    every: list[list[Any]] = [[], [None], [2**255], ["a", 1]]
    for others in every:
        for value in [1, 2**40, 2**255, -(2**255), 0.5, None, "x" * 100, WIDE * 4096, b"x" * 4096]:
            with subtests.test(value=value, others=others):
                for message in batches_of([*others, *[value] * 5000], is_single=True):
                    assert len(message) <= INLINE_LIMIT


def test_light_rows_are_weighed_as_light() -> None:
    assert len(batches_of([(1, 0.5)] * 5000, is_single=False)) <= 3


def test_light_context_variables_travel_as_they_are() -> None:
    assert captured(["x", 1, None]) == {0: "x", 1: 1, 2: None}


def test_context_variables_are_weighed_together() -> None:
    assert type(captured([f"{number:0600}" for number in range(140)])) is bytes  # light enough after all, pickled
    with pytest.raises(PayloadTooLarge, match="context variables"):
        captured([f"{number:04000}" for number in range(140)])


# Wakes


@pytest.mark.skipif(not HAS_EVENTFD, reason="this system has no eventfd")
def test_a_bell_counts_all_that_its_rings_can_hold() -> None:
    """However long the other side does not read it: its counters lie side by side, and one that ran over would change the next."""
    lightest = logging.LogRecord("", 0, "", 0, "", (), None)
    most = LOG_RING_SIZE // (HEADER_SIZE + len(pack(lightest)))
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    bell = EventBell(fd, fd)
    try:
        bell.ring(RING_SIZE, RING_SIZE)
        for _ in range(most):
            bell.log(1)
        assert bell.read() == (RING_SIZE, RING_SIZE, most)
    finally:
        os.close(fd)
