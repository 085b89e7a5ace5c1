"""Records to bytes and back; the two ends of a worker's ring for them, in one loop; each race that ring claims to stand."""

import asyncio
import logging
import marshal
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from percore._common.system import HAS_EVENTFD
from percore._engines.processes import log_receiver
from percore._engines.processes.log_receiver import LogReceiver, _name_here
from percore._protocol.messages import BrokenFrame
from percore._transport import doorbell
from percore._transport.doorbell import bell_fds, bell_of
from percore._transport.log_records import _FIELDS, RECORD_LIMIT, _cut, pack, unpack
from percore._transport.memory import Memory
from percore._transport.ring import HEADER_SIZE, RingWriter
from percore._worker_process import log_forwarding as worker_logs
from percore._worker_process.log_forwarding import LOG_RING_SIZE, POSITION, Forwarder, LogWriter

NAME = "percore.test.logs"
ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates, as of undecodable file names, too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT
OWN_NAMES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def record(message: Any = "hello", *args: Any, level: int = logging.WARNING, name: str = NAME, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, level, "/there/code.py", 12, message, args, None, "function", None)
    made.__dict__.update(extra)
    return made


# Records


@given(
    name=ANY_TEXT,
    level=st.integers(-(2**40), 2**40),
    path=ANY_TEXT,
    line=st.integers(0, 2**40),
    message=ANY_TEXT,
    function=st.none() | ANY_TEXT,
    stack=st.none() | ANY_TEXT,
    extra=st.dictionaries(ANY_TEXT.filter(lambda name: name not in OWN_NAMES), SCALARS, max_size=5),
)
def test_a_record_comes_back_as_it_was(
    *, name: str, level: int, path: str, line: int, message: str, function: str | None, stack: str | None, extra: dict[str, Any]
) -> None:
    before = logging.LogRecord(name, level, path, line, "%s", (message,), None, function, stack)
    before.__dict__.update(extra)
    after = unpack(pack(before))
    assert after.getMessage() == message
    gone = {"msg", "args", "relativeCreated"}
    assert {k: v for k, v in after.__dict__.items() if k not in gone} == {k: v for k, v in before.__dict__.items() if k not in gone}


# Before it reads the elements of a sequence, marshal allocates room for as many as the data say: up to two thousand million.
SEQUENCES = b"([<>"


@given(st.binary(max_size=300).filter(lambda data: not any(byte & 0x7F in SEQUENCES for byte in data)))
def test_whatever_is_no_record_is_told(data: bytes) -> None:
    with pytest.raises(BrokenFrame):
        unpack(data)


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("name", 10),
        ("name", 10, 1.0),
        ("name", 10, 1.0, *[None] * 15),
        (b"name", 10, 1.0, *[None] * 12, "m", None, {}),
        *(("name", 10, 1.0, *[None] * (len(_FIELDS) - 3), message, None, extra) for message, extra in ((None, {}), ("m", None))),
        ["name"],
        1,
    ],
)
def test_what_only_looks_like_a_record_is_told(values: object) -> None:
    with pytest.raises(BrokenFrame):
        unpack(marshal.dumps(values, 2))  # type: ignore[arg-type]


def test_a_traceback_travels_as_text() -> None:
    try:
        raise LookupError("lost")
    except LookupError as error:
        before = logging.LogRecord(NAME, 40, "code.py", 1, "oh", (), (type(error), error, error.__traceback__), "f", "Stack: here")
    after = unpack(pack(before))
    assert after.exc_info is None
    assert logging.Formatter().format(after) == logging.Formatter().format(before)
    assert "LookupError: lost" in logging.Formatter().format(after)


def test_a_traceback_that_another_handler_has_formatted_stays_so() -> None:
    before = record()
    before.exc_text = "in the worker's own way"
    assert unpack(pack(before)).exc_text == "in the worker's own way"


class Text(str):
    """A text that stays itself, as markup does."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __mod__(self, args: object) -> "Text":
        return Text(str.__mod__(self, args))


class Level(int):
    """A number of a class of its own."""


class Mute:
    def __str__(self) -> str:
        raise LookupError("no words")


def test_what_is_no_plain_value_travels_as_text() -> None:
    before = record(
        Text("a %s"), "b", level=Level(30), odd={"a": 1}, data=bytearray(b"x"), huge=1 << 70_000, mute=Mute(), markup=Text("c")
    )
    after = unpack(pack(before))
    assert (after.getMessage(), type(after.msg), after.levelno, type(after.levelno)) == ("a b", str, 30, int)
    extra = after.__dict__
    assert (extra["odd"], extra["data"], extra["markup"]) == ("{'a': 1}", "bytearray(b'x')", "c")
    assert extra["mute"] == "<Mute, whose str raised LookupError>"
    assert extra["huge"] == "<int, whose str raised ValueError>"


def test_a_record_made_by_hand_travels() -> None:
    before = logging.makeLogRecord({"msg": "by hand", "name": NAME, "levelno": "30", "created": 5})
    del before.processName
    after = unpack(pack(before))
    assert (after.getMessage(), after.levelno, after.created, after.processName) == ("by hand", 30, 5.0, None)


@pytest.mark.parametrize("letter", ["a", "é", "漢", "🐍", "\udcff"])
def test_long_texts_are_cut_in_the_middle(letter: str) -> None:
    before = record("begin" + letter * 300_000 + "end", note="n" * 200_000)
    before.exc_text = "Traceback" + letter * 500_000 + "LookupError"
    data = pack(before)
    after = unpack(data)
    assert RECORD_LIMIT // 8 < len(data) <= RECORD_LIMIT
    assert after.exc_text is not None
    assert (after.msg[:5], after.msg[-3:], after.exc_text[:9], after.exc_text[-11:]) == ("begin", "end", "Traceback", "LookupError")
    assert " characters are left out] " in after.msg


def test_a_text_that_is_cut_says_how_much_is_left_out() -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
    cut = _cut(letters, 100)
    assert cut == f"{letters[:50]} [900 characters are left out] {letters[-50:]}"
    assert (_cut(letters, 1000), _cut(b"12345", 3), _cut(7, 1)) == (letters, b"123", 7)


def test_one_long_text_has_the_room_to_itself() -> None:
    assert len(pack(record("x" * 1_000_000))) > RECORD_LIMIT // 2 - 1000


def test_what_cannot_be_cut_is_left_out() -> None:
    before = record("short", **dict[str, Any]({f"name{i}": i for i in range(20_000)}), blob=b"x" * 4000)
    data = pack(before)
    assert len(data) <= RECORD_LIMIT
    assert (unpack(data).getMessage(), "name7" in unpack(data).__dict__) == ("short", False)


def test_time_since_the_start_is_that_of_this_process() -> None:
    before = record()
    before.created -= 5000.0
    before.relativeCreated += 1e9
    here = record()
    assert unpack(pack(before)).relativeCreated - here.relativeCreated == pytest.approx(
        (before.created - here.created) * 1000, abs=1.0
    )


def test_the_record_factory_of_this_process_makes_the_record() -> None:
    class Own(logging.LogRecord):
        pass

    logging.setLogRecordFactory(Own)
    try:
        assert type(unpack(pack(record()))) is Own
    finally:
        logging.setLogRecordFactory(logging.LogRecord)


# The ends of the ring


class Heard(logging.Handler):
    """A handler that notes what it gets, and can be told to do something about it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.act: Callable[[logging.LogRecord], object] = lambda record: None
        self._wanted = 0
        self._arrived = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if len(self.records) >= self._wanted:
            self._arrived.set()
        self.act(record)

    async def receive(self, count: int) -> list[str]:
        self._wanted = count
        self._arrived.clear()
        if len(self.records) < count:
            await self._arrived.wait()
        return self.messages

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


wait_to_write = worker_logs._wait_to_write


class Wire:
    """Both ends of one worker's records; its bell is read as a channel does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.logs = LogReceiver(7)
        memory_fd, pipe = map(os.dup, self.logs.fds)
        self.logs.close_fds()
        self.memory = Memory(memory_fd, LOG_RING_SIZE, writable=True)
        self.memory.close_fds()
        self.pipe = pipe
        self.ring = RingWriter(self.memory.view[:])
        self.theirs, self.bell = map(bell_of, bell_fds())
        self.writer = LogWriter(self.ring, self.bell, pipe)
        self.broken: list[BaseException] = []
        self._loop.add_reader(self.theirs.fileno(), self.hear)

    def hear(self) -> None:
        try:
            self.logs.receive(self.theirs.read()[2])
        except BrokenFrame as error:
            self.broken.append(error)

    def log(self, message: str, **extra: Any) -> None:
        self.writer.write(pack(record(message, **extra)))

    def publish(self, *messages: str) -> None:
        """All of them with one ring of the bell."""
        for message in messages:
            self.ring.write(pack(record(message)))
        self.bell.log(len(messages))

    def close(self) -> None:
        self._loop.remove_reader(self.theirs.fileno())
        self.logs.close()
        self.logs.close()
        self.broken.clear()
        for bell in (self.theirs, self.bell):
            bell.close()
        os.close(self.pipe)
        self.ring.release()
        self.memory.close()


@pytest.fixture(
    params=[
        pytest.param(True, id="event", marks=pytest.mark.skipif(not HAS_EVENTFD, reason="this system has no eventfd")),
        pytest.param(False, id="socket"),
    ]
)
def bells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(doorbell, "HAS_EVENTFD", request.param)
    return bool(request.param)


@pytest_asyncio.fixture
async def wire(bells: bool) -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    logger = logging.getLogger(NAME)
    logger.addHandler(heard)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield heard
    logger.removeHandler(heard)
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.mark.both_loops
async def test_records_arrive_in_order_and_know_their_worker(wire: Wire, heard: Heard) -> None:
    for i in range(5):
        wire.log(f"record {i}")
    assert await heard.receive(5) == [f"record {i}" for i in range(5)]
    assert {record.__dict__["worker"] for record in heard.records} == {7}


async def test_the_worker_told_by_a_record_cannot_be_another(wire: Wire, heard: Heard) -> None:
    wire.log("liar", worker=3)
    await heard.receive(1)
    assert heard.records[0].__dict__["worker"] == 7


async def test_what_is_not_wanted_here_is_dropped(wire: Wire, heard: Heard) -> None:
    wire.log("unwanted", level=logging.DEBUG)
    wire.log("wanted")
    assert await heard.receive(1) == ["wanted"]


@pytest.mark.both_loops
async def test_who_logs_too_much_waits(wire: Wire, heard: Heard) -> None:
    # 1. the ring is full, and nobody reads: the thread waits; 2. the loop reads on.
    waits = threading.Event()
    real = wire.writer._hear

    def hear() -> None:
        waits.set()
        real()

    wire.writer._hear = hear  # type: ignore[method-assign]

    def tell_and_wait(fd: int) -> None:
        waits.set()
        wait_to_write(fd)

    written: list[int] = []

    def flood() -> None:
        for i in range(4000):
            wire.log(f"record {i}")
            written.append(i)
        waits.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_logs, "_wait_to_write", tell_and_wait)
        thread = threading.Thread(target=flood)
        thread.start()
        waits.wait()
        assert not heard.records
        assert len(written) * len(pack(record("record 0"))) <= LOG_RING_SIZE
        assert await heard.receive(4000) == [f"record {i}" for i in range(4000)]
        thread.join()


async def test_many_small_rounds_lose_no_position(wire: Wire, heard: Heard) -> None:
    # More than the ring holds, several times, each one read before the next.
    for i in range(900):
        wire.log(f"record {i}")
        await heard.receive(i + 1)
    assert heard.messages == [f"record {i}" for i in range(900)]


async def test_threads_share_the_ring(wire: Wire, heard: Heard) -> None:
    def work(name: str) -> None:
        for i in range(500):
            wire.log(f"{name} {i}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    messages = await heard.receive(2000)
    for thread in threads:
        thread.join()
    for name in "abcd":
        assert [message for message in messages if message[0] == name] == [f"{name} {i}" for i in range(500)]


async def test_a_record_within_a_record_follows_it(wire: Wire, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1. a record is written, the lock is held; 2. a signal handler or a __del__ of the same thread logs.
    real, nested = wire.ring.write, ["second", "third"]

    class Interrupted:
        free, size = wire.ring.free, wire.ring.size

        def write(self, data: bytes) -> int:
            while nested:
                wire.log(nested.pop(0))
            return real(data)

    monkeypatch.setattr(wire.writer, "_ring", Interrupted())
    wire.log("first")
    assert await heard.receive(3) == ["first", "second", "third"]


class Interrupt:
    """Raises as the n-th line of a function begins, as a signal handler of the user may."""

    def __init__(self, fn: Callable[..., object], at: int) -> None:
        self._code: Any = getattr(fn, "__code__", None)
        self._left = at
        self.has_struck = False

    def __call__(self, frame: Any, event: str, _argument: Any) -> "Interrupt | None":
        if frame.f_code is not self._code:
            return None
        if event == "line" and not self.has_struck:
            self.has_struck = not self._left
            self._left -= 1
            if self.has_struck:
                raise TimeoutError("too late")
        return self


@pytest.mark.parametrize("at", range(8))
def test_an_interrupt_while_a_record_waits_for_room_loses_no_position(at: int) -> None:
    """The supervisor tells each position once: if it were lost, the next record would wait for ever."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)  # a record that would wait fails instead
    ring = RingWriter(memoryview(bytearray(1024)))
    bell: Any = SimpleNamespace(log=lambda _count: True)
    writer, interrupt = LogWriter(ring, bell, read_end), Interrupt(LogWriter._hear, at)
    data, before = bytes(700), sys.gettrace()
    try:
        writer.write(data)
        os.write(write_end, POSITION.pack(ring.written))
        sys.settrace(interrupt)
        with suppress(TimeoutError):
            writer.write(data)
        sys.settrace(before)
        if interrupt.has_struck:
            writer.write(data)
        assert ring.written == 2 * (HEADER_SIZE + len(data))
    finally:
        sys.settrace(before)
        for end in (read_end, write_end):
            os.close(end)


async def test_what_the_ring_can_never_hold_is_refused(wire: Wire) -> None:
    with pytest.raises(ValueError, match="a log record of 65536 bytes"):
        wire.writer.write(bytes(LOG_RING_SIZE))


async def test_a_full_ring_is_handed_over_in_one_go(wire: Wire, heard: Heard) -> None:
    texts = [f"record {i}" for i in range(250)]
    wire.publish(*texts)
    wire.hear()
    assert heard.messages == texts


async def test_a_closed_one_hears_nothing_more(wire: Wire, heard: Heard) -> None:
    wire.publish("first", "second")
    wire.logs.close()
    wire.hear()
    assert not heard.records


# User code


@pytest.mark.parametrize("where", ["handler", "filter", "factory"])
async def test_an_error_of_user_code_is_reported_and_costs_one_record(
    where: str, wire: Wire, heard: Heard, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> bool:
        for undo in undos:
            undo()
        raise LookupError("the user's own")

    logger = logging.getLogger(NAME)
    undos: list[Callable[[], object]] = []
    if where == "handler":
        heard.act = fail
        undos.append(lambda: setattr(heard, "act", lambda _: None))
    elif where == "filter":
        logger.addFilter(fail)
        undos.append(lambda: logger.removeFilter(fail))
    else:
        logging.setLogRecordFactory(fail)  # type: ignore[arg-type]
        undos.append(lambda: logging.setLogRecordFactory(logging.LogRecord))
    wire.log("first")
    wire.log("second")
    await heard.receive(2 if where == "handler" else 1)
    assert heard.messages[-1] == "second"
    reported = capsys.readouterr().err
    assert "--- Logging error ---" in reported
    assert "LookupError: the user's own" in reported
    assert ("Message: 'a record of worker %d'" if where == "factory" else "Message: 'first'") in reported
    assert not wire.broken


async def test_an_interrupt_in_user_code_goes_on(wire: Wire, heard: Heard) -> None:
    def interrupt(_: logging.LogRecord) -> None:
        raise KeyboardInterrupt

    heard.act = interrupt
    wire.log("first")
    with pytest.raises(KeyboardInterrupt):
        wire.hear()


async def test_user_code_may_close_what_it_hears(wire: Wire, heard: Heard) -> None:
    heard.act = lambda _: wire.logs.close()
    wire.publish("first", "second")
    wire.hear()
    assert (heard.messages, wire.broken) == (["first"], [])


# Broken workers


async def test_a_broken_record_is_told(wire: Wire, heard: Heard) -> None:
    wire.log("right")
    wire.writer.write(b"wrong")
    wire.hear()
    assert ([type(error) for error in wire.broken], heard.messages) == ([BrokenFrame], ["right"])


async def test_records_that_were_never_written_are_told(wire: Wire, heard: Heard) -> None:
    wire.log("right")
    wire.bell.log(1)
    wire.hear()
    assert ([type(error) for error in wire.broken], heard.messages) == ([BrokenFrame], ["right"])


async def test_a_worker_that_never_asks_for_room_is_told_of(wire: Wire, heard: Heard) -> None:
    logging.getLogger(NAME).setLevel(logging.CRITICAL)
    data = pack(record("x" * 20_000))
    while not wire.broken:
        wire.ring.acknowledged = wire.ring.written
        wire.ring.write(data)
        wire.bell.log(1)
        wire.hear()
    assert "more than there was room for" in str(wire.broken[0])


async def test_nobody_is_left_to_be_told(wire: Wire, heard: Heard) -> None:
    wire.writer.write(pack(record("x" * 20_000)))
    os.close(wire.pipe)
    wire.pipe = os.dup(0)
    wire.hear()
    assert len(heard.records) == 1
    assert not wire.broken


# The worker's handler


def test_the_handler_waits_for_nobody() -> None:
    handler = Forwarder(lambda data: None)
    assert handler.lock is None


def test_the_handler_obeys_its_filters() -> None:
    written: list[bytes] = []
    handler = Forwarder(written.append)
    handler.addFilter(lambda record: record.getMessage() == "wanted")
    assert (handler.handle(record("unwanted")), handler.handle(record("wanted"))) == (False, True)
    assert [unpack(data).getMessage() for data in written] == ["wanted"]


def test_what_cannot_be_formatted_is_reported_where_it_was_logged(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[bytes] = []
    Forwarder(written.append).handle(record("%d", "three"))
    assert not written
    assert "--- Logging error ---" in capsys.readouterr().err


# Levels


@pytest.fixture
def tree() -> Iterator[logging.Logger]:
    top = logging.getLogger(f"{NAME}.levels")
    yield top
    logging.disable(logging.NOTSET)
    for name in ("", ".a", ".b", ".c"):
        one = logging.getLogger(f"{NAME}.levels{name}")
        one.setLevel(logging.NOTSET)
        one.disabled = False


def test_levels_are_those_that_somebody_has_set(tree: logging.Logger) -> None:
    tree.setLevel(15)
    tree.getChild("a").disabled = True
    tree.getChild("b")
    tree.getChild("c").setLevel(Level(33))
    logging.disable(5)
    disabled, loggers = log_receiver.levels()
    found = {name.removeprefix(NAME): rest for name, *rest in loggers if name.startswith(NAME)}
    assert (disabled, found) == (5, {".levels": [15, False], ".levels.a": [0, True], ".levels.c": [33, False]})
    assert {type(value) for _, *rest in loggers for value in rest} == {int, bool}
    root = logging.getLogger()
    assert ("root", root.level, root.disabled) in loggers


def test_the_names_of_the_scripts_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["__mp_main__", "__mp_main__.below", "__mp_main__s", "__main__", "app.__mp_main__"]
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert [_name_here(name) for name in names] == ["__main__", "__main__.below", *names[2:]]
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__mp_main__"))  # as in a child of multiprocessing
    assert [_name_here(name) for name in names] == names
