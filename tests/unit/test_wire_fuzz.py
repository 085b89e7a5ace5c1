"""Frames that nobody should send, to the program and to a host: the peer is dropped, its workers end, and nothing else happens.

Most of them are changed frames of a real conversation, whose checks are right: what is damaged never comes so far. Everything is
real but the loop, the socket and the processes, so a run of ten million takes some minutes (`make long`).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from percore import Runner
from percore._engines.nodes.link import NodeLink
from percore._engines.nodes.places import Place
from percore._engines.nodes.store import NodesStore
from percore._node import host as hosts
from percore._node.host import Host
from percore._protocol.interfaces import Condition, Exit
from percore._protocol.messages import BATCH, BEGIN_BY, DEFINE_TASK, ITEM, ONCE_THREAD, READY, RESULT, TERMS, VALUE, BrokenFrame
from percore._serialization.pickler import MainInfo
from percore._transport.codec import encode
from percore._transport.wire import MOST_NUMBER, READ_COUNT, Kind, head, pack
from tests.counts import times

FRAMES = times(4000, 10_000_000)
A_CONVERSATION = 20


class Loop:
    """The loop of a test that has no time and no descriptors."""

    def __init__(self, real: asyncio.AbstractEventLoop) -> None:
        self.create_future = real.create_future
        self.soon: deque[asyncio.Handle] = deque()

    def _nothing(self, *_: Any) -> Any:
        return self

    add_reader = remove_reader = add_writer = remove_writer = call_later = call_at = _nothing

    def call_soon(self, fn: Callable[..., Any], *args: Any) -> asyncio.Handle:
        handle = asyncio.Handle(fn, args, self)  # type: ignore[arg-type]
        self.soon.append(handle)
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise what a callback has raised."""
        raise context["exception"]

    def get_debug(self) -> bool:
        return False

    call_soon_threadsafe = call_soon

    def create_task(self, work: Any) -> Any:
        work.close()
        return self

    def add_done_callback(self, _: Any) -> None:
        """Of a task that never runs."""

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return 0.0

    def cancel(self) -> None:
        """Of a timer."""

    def turn(self) -> None:
        while self.soon:
            handle = self.soon.popleft()
            if not handle.cancelled():
                handle._run()


class Sock:
    """A socket from which a test's bytes can be read, and to which anything can be written."""

    def __init__(self) -> None:
        self.data = b""

    def recv_into(self, room: memoryview) -> int:
        if not self.data:
            raise BlockingIOError
        count = min(len(room), len(self.data))
        room[:count] = self.data[:count]
        self.data = self.data[count:]
        return count

    def send(self, piece: memoryview) -> int:
        return len(piece)

    def sendmsg(self, pieces: list[memoryview]) -> int:
        return sum(map(len, pieces))

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


def heard(connection: Any, data: bytes) -> None:
    connection._sock.data = data
    while connection.is_open and connection._sock.data:
        connection._readable()
        connection._loop.turn()
    connection._loop.turn()


EXPECTED = ("its connection broke: BrokenFrame(", "its connection broke: TypeError(", "its connection broke: ValueError(")
"""How a connection breaks: nothing of these frames leads to a mistake of percore's own."""

# The frames

VALUES: list[Any] = [
    None,
    0,
    1,
    -1,
    1 << 40,
    1.5,
    "text",
    b"bytes",
    (),
    (1,),
    [],
    [1],
    [(1, 2)],
    [(1, 2, 3)],
    {"a": 1},
    True,
    ("a", 1, 2),
]


def value(chance: random.Random) -> Any:
    return chance.choice(VALUES) if chance.random() < 0.8 else [value(chance) for _ in range(chance.randrange(4))]


def data_of(chance: random.Random) -> bytes:
    """What no kind of frame has, but for an accident."""
    found = pack(tuple(value(chance) for _ in range(chance.randrange(6))) if chance.random() < 0.8 else value(chance))
    return found[: chance.randrange(len(found) + 1)] if chance.random() < 0.2 else found


def framed(kind: int, number: int, *data: bytes) -> bytes:
    return head(kind, number, *data) + b"".join(data)


def conversation(chance: random.Random, right: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Frames, most of which are right until the first that is not. The last one may be cut off."""
    frames = b"".join(frames_of(chance, right))
    return frames[: chance.randrange(len(frames))] if chance.random() < 0.1 else frames


def frames_of(chance: random.Random, right: Sequence[tuple[int, int, bytes]]) -> Iterator[bytes]:
    for kind, number, data in (frame for _ in range(A_CONVERSATION) for frame in together(*chance.choice(right))):
        match chance.randrange(24):
            case 0:
                kind = chance.choice([*Kind, 0, 99])
            case 1:
                number = chance.choice([0, 1, 2, 3, MOST_NUMBER, MOST_NUMBER + 1, (1 << 64) - 1])
            case 2 | 3:
                data = data_of(chance)
            case 4:
                broken = bytearray(framed(kind, number, data))
                broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
                yield bytes(broken)
                continue
        yield framed(kind, number, data)


def together(kind: int, number: int, data: bytes) -> list[tuple[int, int, bytes]]:
    """The frames that come with this one."""
    if kind == Kind.KEEP:
        return [(kind, number, data), (Kind.DROP, number, b"")]
    return [(Kind.PAYLOAD_OF, number, pack((RESULT, 4))), (kind, number, data)] if kind == Kind.PAYLOAD else [(kind, number, data)]


RESULTS = [(VALUE, 1, 5), (RESULT, 2, b"pickle"), (READY, 0, 77), (ITEM, 3, b"x")]
FROM_HOST = [
    (Kind.BEAT, 0, bytes(8)),
    (Kind.MESSAGES, 1, encode(RESULTS)),
    (Kind.MESSAGES, 2, encode(RESULTS[:1])),
    (Kind.PAYLOAD, 1, b"a pickle"),
    (Kind.READ, 2, pack((0,))),
    (Kind.ANSWERS, 1, READ_COUNT.pack(0) + encode(RESULTS)),
    (Kind.LOG, 1, b"no record"),
    (Kind.BROKEN, 2, pack(("its frame is broken",))),
    (Kind.CONDITION, 1, pack(tuple(Condition("", "")))),
    (Kind.FATES, 1, pack(([(4, True, 0.5, 1)],))),
    (Kind.ANSWER, 7, pack(([1],))),
]
SELDOM_FROM_HOST = [(Kind.EXIT, 2, pack((*Exit(0), 77))), (Kind.PAYLOAD, 1, bytes(300_000))]
TO_HOST = [
    (Kind.BEAT, 0, bytes(8)),
    (
        Kind.MESSAGES,
        1,
        encode([(5, 1, (1, 2)), (DEFINE_TASK, 5, b"f"), (BEGIN_BY, 0, 1.5), (TERMS, 1, (None,) * 5), (BATCH, 2, b"")]),
    ),
    (Kind.KEEP, 700, b"a pickle"),
    (Kind.PARCEL, 1, pack((ONCE_THREAD, 7, 600))),
    (Kind.KILL, 2, pack((9,))),
    (Kind.EXAMINE, 1, b""),
    (Kind.RENEW, 0, b""),
    (Kind.RESIZE, 3, b""),
    (Kind.USAGE, 5, pack(([("worker 0", 1)],))),
    (Kind.MEMORY, 6, pack(([1], 0))),
]
SELDOM_TO_HOST = [(Kind.KEEP, 701, bytes(300_000)), (Kind.START, 3, pack((0, 1, ())))]


def surroundings() -> tuple[Any, NodesStore]:
    """The loop and the store that both ends of a link are given here."""
    loop: Any = Loop(asyncio.get_running_loop())
    return loop, NodesStore(loop, Runner(max_message=1 << 20)._options, MainInfo("module", "tests"))


# The program


class Ends:
    """What the supervisor hears of a worker."""

    def __init__(self) -> None:
        self.ends: list[Exit] = []
        self.messages = 0
        self.broken: list[BaseException] = []

    def on_frame(self, messages: list[Any]) -> None:
        for op, call_id, _ in messages:
            if type(op) is not int or type(call_id) is not int:
                raise BrokenFrame("no message")
        self.messages += len(messages)


@pytest.mark.long
@pytest.mark.timeout(3000)
async def test_the_program_drops_a_host_that_is_broken(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(20)
    loop, store = surroundings()
    lost = 0
    for _ in range(FRAMES // A_CONVERSATION // 2):
        told: list[str] = []

        def on_lost(link: NodeLink, why: str, told: list[str] = told) -> None:
            told.append(why)
            link.end_workers(why)

        sock: Any = Sock()
        link = NodeLink(loop, sock, Place("a", "127.0.0.1", 1, lambda: None), store, on_lost)
        ends = [Ends(), Ends()]
        for index, end in enumerate(ends):
            worker = link.start(index, 1, end.ends.append)
            worker.channel.open(end.on_frame, end.broken.append, lambda: None)
        heard(link.connection, framed(Kind.HELLO, 1, pack(("cpython", "0.1.0", 1))))
        heard(link.connection, conversation(chance, FROM_HOST + SELDOM_FROM_HOST * (chance.random() < 0.1)))
        assert link.is_lost is bool(told) is not link.connection.is_open
        if told:
            lost += 1
            assert told[0].startswith(EXPECTED)
            assert [len(end.ends) for end in ends] == [1, 1]
            assert link.workers == {}
        assert max(len(end.broken) for end in ends) <= 1
        link.connection.close()
        link.over.cancel()
    assert lost > FRAMES // A_CONVERSATION // 8
    assert store.in_use == 0
    store.close()


# The host


class Channel:
    """The channel of a worker that takes everything."""

    own: Final[dict[int, Any]] = {}
    waits_since = 0.0

    def open(self, *_: Any) -> None:
        """Nothing ever arrives."""

    def send(self, op: int, call_id: int, body: Any) -> None:
        assert type(op) is int

    def send_parcel(self, *_: Any) -> None:
        """Likewise."""


class Worker:
    def __init__(self) -> None:
        self.channel = Channel()
        self.killed: list[int] = []

    def kill(self, signum: int = 9) -> None:
        self.killed.append(signum)

    def examine(self, _: Any) -> None:
        """It never answers."""


class Engine:
    def __init__(self, store: NodesStore) -> None:
        self.store = store
        self.workers: list[Worker] = []

    def start(self, *_: Any) -> Worker:
        self.workers.append(Worker())
        return self.workers[-1]

    def renew(self) -> None:
        """There is no fork server."""

    def resize(self, workers: int) -> None:
        assert type(workers) is int


@pytest.mark.long
@pytest.mark.timeout(3000)
async def test_a_host_drops_a_program_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(21)
    loop, store = surroundings()
    lost = 0
    for _ in range(FRAMES // A_CONVERSATION // 2):
        sock: Any = Sock()
        host = Host(loop, sock, 1)
        engine: Any = Engine(store)
        host._engine, host.places = engine, 10  # as SETUP does
        whys: list[str] = []
        monkeypatch.setattr(hosts, "report", lambda _level, _text, why, whys=whys: whys.append(why))
        host.connection.decoder.most[int(Kind.KEEP)] = 1 << 20
        first = [(Kind.START, 1, pack((0, 1, ()))), (Kind.START, 2, pack((1, 1, ()))), (Kind.KEEP, 600, b"a pickle")]
        heard(host.connection, b"".join(framed(*frame) for frame in first))
        assert (len(engine.workers), list(host.parcels), host.connection.is_open) == (2, [600], True)
        heard(host.connection, conversation(chance, TO_HOST + SELDOM_TO_HOST * (chance.random() < 0.1)))
        if not host.connection.is_open:
            lost += 1
            assert whys[-1].startswith(EXPECTED)
        host.leave("")
        host.ended.cancel()
        assert all(9 in worker.killed for worker in engine.workers)
        for parcel in host.parcels.values():
            store.discard(parcel)
        assert store.in_use == 0
    assert lost > FRAMES // A_CONVERSATION // 8
    store.close()


async def test_no_worker_starts_after_the_end() -> None:
    loop, store = surroundings()
    sock: Any = Sock()
    host = Host(loop, sock, 1)
    engine: Any = Engine(store)
    host._engine, host.places = engine, 10
    heard(host.connection, framed(Kind.END, 0) + framed(Kind.START, 1, pack((0, 1, ()))))
    assert (engine.workers, host.connection.is_open) == ([], False)
    store.close()
