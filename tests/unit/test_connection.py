"""A connection between a program and a host: order, back-pressure, beats, its loss, and who gets in."""

import asyncio
import errno
import os
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from percore._protocol.messages import BrokenFrame
from percore._transport import connection
from percore._transport.certificates import Certificates
from percore._transport.connection import FULL, Connection, Pulse, time_of
from percore._transport.proven import Door, dial
from percore._transport.wire import Decoder, Frame, Kind, limits
from percore._transport.wire_proof import FIRST_SIZE, NotProven, ProgramProof
from tests.tls import authority, issued, needs_openssl
from tests.waiting import until

LOCAL = "127.0.0.1"
MOST = limits(1 << 30)
TOKEN = b"t" * 32


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server((LOCAL, 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


class End:
    """A connection, and what has arrived."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames: list[tuple[int, int, bytes]] = []
        self.lost: list[str] = []
        self.connection = Connection(asyncio.get_running_loop(), sock, MOST, self._frame, self.lost.append)

    def _frame(self, frame: Frame) -> None:
        self.frames.append((frame.kind, frame.number, bytes(frame.data)))


async def test_frames_of_any_size_arrive_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = End(pair[0]), End(pair[1])
    sent = []
    for number, size in enumerate([0, 1, 100, 40_000, 300_000, 5_000_000, 7]):
        data = bytes([number]) * size
        one.connection.send(Kind.KEEP, number, data[: size // 2], data[size // 2 :])
        sent.append((int(Kind.KEEP), number, data))
    await until(lambda: len(other.frames) == len(sent))
    assert other.frames == sent
    one.connection.close()
    await until(lambda: other.lost)
    assert (one.lost, other.lost) == ([], ["its connection was closed"])


async def test_a_frame_is_sent_at_once_and_a_beat_has_the_time(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = End(pair[0]), End(pair[1])
    assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in pair)
    before = time.monotonic()
    one.connection.beat_here()
    await asyncio.to_thread(one.connection.beat)
    await until(lambda: len(other.frames) == 2)
    assert [(kind, number) for kind, number, _ in other.frames] == [(Kind.BEAT, 0)] * 2
    first, second = (time_of(memoryview(data)) for _, _, data in other.frames)
    assert before <= first <= second <= time.monotonic()
    assert [time_of(bytearray(size)) for size in (0, 7, 9)] == [float("inf")] * 3  # a broken peer's
    one.connection.close()
    other.connection.close()


async def test_a_closed_end_leaves_nothing_in_the_loop(pair: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    for is_full in (False, True):
        sock = pair[is_full].dup()
        end = Connection(loop, sock, MOST, lambda _: None, lambda _: None)
        if is_full:
            end.send(Kind.KEEP, 1, bytes(8 * FULL))
            assert end._is_waiting
        watched = sock.fileno()
        end.close()
        assert not loop.remove_reader(watched)
        assert not loop.remove_writer(watched)


async def test_a_door_listens_on_its_address_alone() -> None:
    for address in (LOCAL, "127.0.0.3"):
        door = Door(asyncio.get_running_loop(), TOKEN, address)
        assert door._listening.getsockname() == (address, door.port)
        door._listening.close()


async def test_an_end_whose_peer_resets_the_connection_says_so_once(pair: tuple[socket.socket, socket.socket]) -> None:
    end = End(pair[0])
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pair[1].close()
    await until(lambda: end.lost)
    assert end.lost == [f"its connection broke: {os.strerror(errno.ECONNRESET)}"]


async def test_a_full_connection_has_room_again_when_the_other_end_reads(pair: tuple[socket.socket, socket.socket]) -> None:
    one = End(pair[0])
    written: list[int] = []
    rooms: list[bool] = []
    one.connection.on_room = lambda: rooms.append(one.connection.is_full)
    large = bytes(FULL)
    for number in range(4):
        one.connection.send(Kind.KEEP, number, large, let_go=lambda number=number: written.append(number))  # type: ignore[misc]
    assert one.connection.is_full
    assert len(written) < 4
    rooms.clear()
    other = End(pair[1])
    await until(lambda: len(other.frames) == 4)
    await until(lambda: len(written) == 4)
    assert (written, rooms) == ([0, 1, 2, 3], [False])
    one.connection.close()
    other.connection.close()


async def test_what_was_not_sent_is_known_when_the_connection_breaks(pair: tuple[socket.socket, socket.socket]) -> None:
    """And all memory is let go of, each piece once, whether or not it was sent."""
    one = End(pair[0])
    unsent: list[int] = []
    free: list[int] = []

    def send(number: int, size: int = FULL) -> None:
        one.connection.send(
            Kind.KEEP, number, bytes(size), let_go=lambda: free.append(number), unsent=lambda: unsent.append(number)
        )

    for number in range(4):
        send(number)
    pair[1].close()
    await until(lambda: one.lost)
    send(4, 0)
    assert unsent[-1] == 4
    assert 0 not in unsent  # a part of it was sent: nobody knows what became of it
    assert {2, 3} <= set(unsent)
    assert free == [0, 1, 2, 3, 4]
    one.connection.close()


async def test_closing_lets_go_of_all_memory_and_says_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    one = End(pair[0])
    free: list[int] = []
    for number in range(3):
        one.connection.send(Kind.KEEP, number, bytes(FULL), let_go=lambda number=number: free.append(number))  # type: ignore[misc]
    one.connection.close()
    assert (free, one.lost) == ([0, 1, 2], [])


async def test_invalid_bytes_break_the_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    one = End(pair[0])
    pair[1].sendall(b"\xff" * 100)
    await until(lambda: one.lost)
    assert "a frame whose head is damaged" in one.lost[0]
    assert not one.connection.is_open


async def test_a_handler_that_fails_breaks_the_connection_and_an_interrupt_costs_its_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    loop = asyncio.get_running_loop()
    heard: list[int] = []
    lost: list[str] = []

    def on_frame(frame: Frame) -> None:
        heard.append(frame.number)
        if frame.number == 3:
            raise BrokenFrame("three")

    one = Connection(loop, pair[0], MOST, on_frame, lost.append)
    other = End(pair[1])
    for number in (1, 2, 3, 4):
        other.connection.send(Kind.RENEW, number)
    await until(lambda: lost)
    assert heard == [1, 2, 3]
    assert "three" in lost[0]
    one.close()
    other.connection.close()


class Intruded(deque[Any]):
    """A queue at each change of which a garbage collection runs a `__del__`, once."""

    def __init__(self, intrude: Callable[[], object]) -> None:
        super().__init__()
        self._intrusions = dict.fromkeys(("extend", "append", "popleft"), intrude)

    def _change(self, name: str) -> None:
        self._intrusions.pop(name, lambda: None)()

    def extend(self, items: Iterable[Any]) -> None:
        self._change("extend")
        super().extend(items)

    def append(self, item: Any) -> None:
        super().append(item)
        self._change("append")

    def popleft(self) -> Any:
        self._change("popleft")
        return super().popleft()


@pytest.mark.timeout(10)
async def test_a_del_that_sends_within_a_frame_neither_hangs_nor_tears_it(pair: tuple[socket.socket, socket.socket]) -> None:
    """A garbage collection may begin while the lock is held, and the user's `__del__` may submit a call."""
    one, other = End(pair[0]), End(pair[1])
    sent: list[int] = []

    def intrude() -> None:
        sent.append(len(sent))
        one.connection.send(Kind.RENEW, sent[-1])

    one.connection._pieces = Intruded(intrude)
    large = b"l" * 100_000
    one.connection.send(Kind.KEEP, 9, large[:50_000], large[50_000:])
    await until(lambda: len(other.frames) == len(sent) + 1)
    assert len(sent) > 1
    assert sorted(other.frames) == sorted([(int(Kind.KEEP), 9, large), *((int(Kind.RENEW), number, b"") for number in sent)])
    one.connection.close()
    other.connection.close()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


async def test_an_interrupt_between_reading_and_counting_breaks_the_connection(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a part of a large payload, which has no check, would be missing."""
    one, other = End(pair[0]), End(pair[1])
    other.connection.send(Kind.RENEW, 1)
    select.select([pair[0]], [], [], 10)
    monkeypatch.setattr(one.connection.decoder, "filled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.connection._readable()
    assert one.frames == []
    assert one.lost == ["its connection broke: KeyboardInterrupt()"]
    other.connection.close()


async def test_an_interrupt_between_writing_and_counting_breaks_the_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    """Else a part would be sent twice. The frame may have arrived, so nobody may say that it was not sent."""
    one, other = End(pair[0]), End(pair[1])
    told: list[str] = []
    one.connection._pieces = Intruded(interrupted)
    one.connection._pieces._intrusions.pop("extend")
    with pytest.raises(KeyboardInterrupt):
        one.connection.send(Kind.RENEW, 1, let_go=lambda: told.append("let go"), unsent=lambda: told.append("not sent"))
    assert told == ["let go"]
    assert one.lost == ["its connection broke: KeyboardInterrupt()"]
    await until(lambda: other.lost)
    assert other.frames == [(int(Kind.RENEW), 1, b"")]


async def test_an_error_of_a_beat_costs_its_connection_alone(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread beats for all connections, also for those that come later."""
    one = End(pair[0])
    pulse = Pulse(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(one.connection, "_write_pieces", lambda: [].pop())
        pulse.add(one.connection)
        await until(lambda: one.lost)
    assert "pop from empty list" in one.lost[0]
    with socket.create_server((LOCAL, 0)) as server, socket.create_connection(server.getsockname()) as sock:
        there, _ = server.accept()
        with there:
            later, heard = End(sock), End(there)
            pulse.add(later.connection)
            await until(lambda: heard.frames)
            later.connection.close()
            heard.connection.close()
    pulse.end()


async def test_beats_leave_while_the_loop_is_blocked(pair: tuple[socket.socket, socket.socket]) -> None:
    """And what waited to be written leaves with them."""
    one = End(pair[0])
    one.connection.send(Kind.KEEP, 7, bytes(FULL))
    one.connection.send(Kind.KEEP, 8, bytes(FULL))
    pulse = Pulse(0.001)
    pulse.add(one.connection)
    pair[1].setblocking(True)
    pair[1].settimeout(20)
    decoder = Decoder(MOST)
    seen: list[Kind] = []
    while seen[-2:] != [Kind.BEAT, Kind.BEAT]:  # this thread is the loop's, and reads: nothing else runs in it
        decoder.filled(pair[1].recv_into(decoder.buffer()))
        while (frame := decoder.next()) is not None:
            seen.append(Kind(frame.kind))
            if frame.kind == Kind.BEAT:
                assert time_of(frame.data) > 0
    assert seen.count(Kind.KEEP) == 2
    pulse.end()
    assert "percore-beats" not in [thread.name for thread in threading.enumerate()]
    one.connection.close()


# Who gets in


async def test_a_door_lets_in_who_knows_the_token_and_drops_the_others(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    door = Door(loop, TOKEN, LOCAL)
    waiting = loop.create_task(door.wait())
    with pytest.raises(NotProven, match="does not know the token"):
        await dial(loop, (LOCAL, door.port), bytes(32))
    reader, writer = await asyncio.open_connection(LOCAL, door.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n".ljust(FIRST_SIZE))
    assert await reader.read() == b""  # nothing but the end
    writer.close()
    await writer.wait_closed()
    reader, writer = await asyncio.open_connection(LOCAL, door.port)
    writer.write(ProgramProof(TOKEN).first + bytes(32))
    await reader.read()
    writer.close()
    await writer.wait_closed()
    assert not waiting.done()
    ours = await dial(loop, (LOCAL, door.port), TOKEN)
    theirs = await waiting
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition("was dropped: ")[2] for text in texts] == [
        "it has closed the connection",
        "it is no percore",
        "it does not know the token",
    ]
    with pytest.raises(OSError, match=r"refused|Connect"):
        await dial(loop, (LOCAL, door.port), TOKEN)
    await loop.sock_sendall(ours, b"hello")
    assert await loop.sock_recv(theirs, 5) == b"hello"
    ours.close()
    theirs.close()


async def test_a_peer_that_says_nothing_keeps_nobody_out() -> None:
    loop = asyncio.get_running_loop()
    door = Door(loop, TOKEN, LOCAL)
    waiting = loop.create_task(door.wait())
    _, silent = await asyncio.open_connection(LOCAL, door.port)
    ours = await dial(loop, (LOCAL, door.port), TOKEN)
    (await waiting).close()
    ours.close()
    silent.close()


async def test_a_door_that_nobody_comes_to_closes_with_its_wait() -> None:
    loop = asyncio.get_running_loop()
    door = Door(loop, TOKEN, LOCAL)
    waiting = loop.create_task(door.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(OSError, match=r"refused|Connect"):
        await dial(loop, (LOCAL, door.port), TOKEN)


@pytest.mark.asyncio_only
async def test_a_door_outlives_a_peer_that_is_gone_and_says_when_it_can_accept_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be there, and accept nobody any more."""
    loop = asyncio.get_running_loop()
    errors = [errno.ECONNABORTED, errno.EMFILE]

    async def accept(_: object) -> Any:
        raise OSError(errors[0], os.strerror(errors.pop(0)))

    door = Door(loop, TOKEN, LOCAL)
    monkeypatch.setattr(loop, "sock_accept", accept)
    with pytest.raises(OSError, match="Too many open files"):
        await door.wait()
    assert not errors


async def test_a_connection_that_was_full_between_two_writes_has_room_again(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that met it full meanwhile waits for that."""
    monkeypatch.setattr(connection, "FULL", 10)
    one = End(pair[0])
    rooms: list[bool] = []
    one.connection.on_room = lambda: rooms.append(one.connection.is_full)
    one.connection.put(Kind.RENEW, 0)
    assert (one.connection.is_full, rooms) == (True, [])
    one.connection.write()
    await asyncio.sleep(0)
    assert rooms == [False]
    one.connection.close()


async def test_many_that_wait_for_room_get_it_one_after_the_other(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them fills the connection, and the socket takes it at once."""
    monkeypatch.setattr(connection, "FULL", 10)
    one = End(pair[0])
    left = [*range(2000)]

    def on_room() -> None:
        if left:
            one.connection.send(Kind.RENEW, left.pop())

    one.connection.on_room = on_room
    one.connection.send(Kind.RENEW, 0)
    await until(lambda: not left)
    one.connection.close()


# TLS


async def met(
    here: Certificates | None, there: Certificates | None, log: pytest.LogCaptureFixture
) -> tuple[socket.socket, socket.socket] | str:
    """Let a program with certificates meet a host with certificates. Return both ends, or why the program gave up."""
    loop = asyncio.get_running_loop()
    door = Door(loop, TOKEN, LOCAL, there)
    waiting = loop.create_task(door.wait())
    try:
        ours = await dial(loop, (LOCAL, door.port), TOKEN, here)
    except (OSError, NotProven) as error:
        await until(lambda: "was dropped" in log.text)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return str(error)
    return ours, await waiting


@needs_openssl
async def test_with_tls_frames_of_any_size_arrive_and_both_sides_are_verified(
    tmp_path: Path, subtests: pytest.Subtests, caplog: pytest.LogCaptureFixture
) -> None:
    ca = authority(tmp_path)
    good = issued(tmp_path, ca)
    ends = await met(good, good, caplog)
    assert not isinstance(ends, str)
    one, two = map(End, ends)
    sizes = [0, 1, 16_384, 3_000_000, 262_144, 5, 9_000_000]
    for number, size in enumerate(sizes):
        one.connection.send(Kind.KEEP, number, bytes([number]) * size)
        two.connection.send(Kind.KEEP, number, bytes(size))
    await until(lambda: len(one.frames) == len(two.frames) == len(sizes))
    assert [(number, len(data), set(data)) for _, number, data in two.frames] == [
        (number, size, {number} if size else set()) for number, size in enumerate(sizes)
    ]
    one.connection.cut()
    await until(lambda: bool(two.lost))
    one.connection.close()

    other = authority(tmp_path, "other")
    stranger = issued(tmp_path, other, "stranger")
    believes = stranger._replace(authority=str(ca))  # takes the host for good, and has a certificate of somebody else
    elsewhere = issued(tmp_path, ca, "elsewhere", "127.0.0.2")
    for name, here, there, text, said in [
        ("a host of another authority", good, stranger, "certificate verify failed", "was dropped"),
        ("a program of another authority", believes, good, "", "certificate verify failed"),
        ("a host of another address", good, elsewhere, "certificate is not valid for '127.0.0.1'", "was dropped"),
        ("a program without TLS", None, good, "", "record layer failure|wrong version number|unknown protocol|http request"),
        ("a host without TLS", good, None, "", "it is no percore"),
    ]:
        caplog.clear()
        with subtests.test(name):
            why = await met(here, there, caplog)
            assert isinstance(why, str)
            assert text in why
            assert re.search(said, caplog.text)
