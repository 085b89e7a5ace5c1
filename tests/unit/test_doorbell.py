"""Both kinds of bell: positions add up, nothing that was rung is lost, and a full bell says so."""

import errno
import os
import select
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._common.system import HAS_EVENTFD
from percore._transport import doorbell
from percore._transport.doorbell import Bell, EventBell, SocketBell, bell_fds, bell_of

KINDS = [
    pytest.param(True, id="event", marks=pytest.mark.skipif(not HAS_EVENTFD, reason="this system has no eventfd")),
    pytest.param(False, id="socket"),
]


def new_pair() -> tuple[Bell, Bell]:
    ours, theirs = bell_fds()
    return bell_of(ours), bell_of(theirs)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(doorbell, "HAS_EVENTFD", request.param)
    return bool(request.param)


@pytest.fixture
def bells(kind: bool) -> Iterator[tuple[Bell, Bell]]:
    pair = new_pair()
    assert isinstance(pair[0], EventBell if kind else SocketBell)
    yield pair
    for bell in pair:
        bell.close()


def socket_bells() -> tuple[SocketBell, SocketBell]:
    down, up = (socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    return SocketBell(down[0].detach(), up[0].detach()), SocketBell(up[1].detach(), down[1].detach())


@pytest.fixture
def full() -> Iterator[tuple[SocketBell, SocketBell, int]]:
    """A pair whose first side has rung 1, 0 until it was told that the bell is full, and how often that was."""
    ours, theirs = socket_bells()
    rung = 1
    while ours.ring(1, 0):
        rung += 1
    yield ours, theirs, rung
    ours.close()
    theirs.close()


def is_rung(bell: Bell) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def all_of(bell: Bell) -> tuple[int, int]:
    published = consumed = 0
    while is_rung(bell):
        more = bell.read()
        published, consumed = published + more[0], consumed + more[1]
    return published, consumed


def test_what_is_rung_is_read(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    assert not is_rung(theirs)
    assert ours.ring(3, 5)
    assert is_rung(theirs)
    assert not is_rung(ours)
    assert theirs.read() == (3, 5, 0)
    assert not is_rung(theirs)


def test_nobody_rang(bells: tuple[Bell, Bell]) -> None:
    for bell in bells:
        with pytest.raises(BlockingIOError):
            bell.read()


def test_both_directions_are_apart(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    ours.ring(1, 2)
    theirs.ring(30, 40)
    assert theirs.read() == (1, 2, 0)
    assert ours.read() == (30, 40, 0)


def test_rings_coalesce(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    for count in range(1, 101):
        assert ours.ring(count, count % 3)
    assert theirs.read() == (5050, sum(count % 3 for count in range(1, 101)), 0)
    with pytest.raises(BlockingIOError):
        theirs.read()


def test_positions_alone_ring(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    ours.ring(0, 7)
    assert theirs.read() == (0, 7, 0)
    ours.ring(9, 0)
    assert theirs.read() == (9, 0, 0)


def test_as_much_as_a_ring_can_hold(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    ours.ring(2**31, 2**19)
    ours.ring(2**31 - 1, 2**19 - 1)
    ours.log(2**11)
    ours.log(2**11 - 2)
    assert theirs.read() == (2**32 - 1, 2**20 - 1, 2**12 - 2)


def test_log_records_are_told_beside_positions(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    assert ours.log(2)
    assert theirs.read() == (0, 0, 2)
    ours.ring(3, 4)
    ours.log(1)
    ours.log(1)
    assert theirs.read() == (3, 4, 2)
    assert ours.log(0)
    assert ours.ring(0, 1)
    assert theirs.read() == (0, 1, 0)


def test_what_was_rung_survives_the_ringer(bells: tuple[Bell, Bell]) -> None:
    ours, theirs = bells
    ours.ring(11, 13)
    ours.close()
    assert theirs.read() == (11, 13, 0)


def test_close_is_idempotent_and_closes_everything(kind: bool) -> None:
    for bell in new_pair():
        fd = bell.fileno()
        bell.close()
        bell.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_descriptors_are_not_inherited_and_do_not_block(kind: bool) -> None:
    ours, theirs = bell_fds()
    assert not any(os.get_inheritable(fd) for fd in (*ours, *theirs))
    for bell in (bell_of(ours), bell_of(theirs)):
        with pytest.raises(BlockingIOError):
            bell.read()
        bell.close()


@pytest.mark.skipif(not HAS_EVENTFD, reason="this system has no eventfd")
def test_no_descriptor_is_left_when_there_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "HAS_EVENTFD", True)
    dup, calls = os.dup, []

    def one_dup(fd: int) -> int:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return dup(fd)

    monkeypatch.setattr(os, "dup", one_dup)
    with pytest.raises(OSError, match="too many"):  # the check after every test finds what is left
        bell_fds()


RINGS = st.lists(st.one_of(st.just("read"), st.tuples(st.integers(0, 2**13), st.integers(0, 2**13))), min_size=1, max_size=40)


@pytest.mark.parametrize("has_eventfd", KINDS)
@given(steps=RINGS)
def test_sums_are_right_whenever_one_reads(has_eventfd: bool, steps: list[str | tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doorbell, "HAS_EVENTFD", has_eventfd)
        ours, theirs = new_pair()
    try:
        sent, got = [0, 0], [0, 0]
        for step in [*steps, "read"]:
            if isinstance(step, tuple):
                ours.ring(*step)
                sent = [sent[0] + step[0], sent[1] + step[1]]
            else:
                published, consumed = all_of(theirs)
                got = [got[0] + published, got[1] + consumed]
                assert got == sent
    finally:
        ours.close()
        theirs.close()


# A socket can fill up


def test_a_full_bell_says_so_and_the_newest_positions_arrive_after(full: tuple[SocketBell, SocketBell, int]) -> None:
    ours, theirs, rung = full
    assert not ours.ring(100, 10)
    assert not ours.ring(0, 0)
    first = all_of(theirs)
    assert first == (rung - 1, 0)
    assert ours.ring(0, 0)
    assert theirs.read() == (1 + 100, 10, 0)


def test_a_bell_that_has_told_everything_is_silent(full: tuple[SocketBell, SocketBell, int]) -> None:
    ours, theirs, _ = full
    all_of(theirs)
    assert ours.ring(0, 0)
    all_of(theirs)
    assert ours.ring(0, 0)
    assert not is_rung(theirs)


def test_a_later_ring_tells_what_an_earlier_one_could_not(full: tuple[SocketBell, SocketBell, int]) -> None:
    ours, theirs, rung = full
    all_of(theirs)
    assert ours.ring(5, 6)
    assert theirs.read() == (6, 6, 0)
    assert rung > 1


def test_a_full_bell_takes_log_records_as_positions(full: tuple[SocketBell, SocketBell, int]) -> None:
    ours, theirs, rung = full
    assert not ours.log(2)
    assert all_of(theirs) == (rung - 1, 0)
    assert ours.log(0)
    assert ours.ring(0, 0)
    assert theirs.read() == (1, 0, 2)


class Failing:
    """A socket that fails as it is told to."""

    def __init__(self, inner: socket.socket, error: OSError | None) -> None:
        self.inner, self.error = inner, error

    def send(self, data: bytes) -> int:
        if self.error is not None:
            raise self.error
        return self.inner.send(data)

    def __getattr__(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self.inner, name)
        return method


def failing_pair(error: OSError) -> tuple[SocketBell, SocketBell, Failing]:
    ours, theirs = socket_bells()
    failing = Failing(ours._out, error)
    ours._out = failing  # type: ignore[assignment]
    return ours, theirs, failing


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOBUFS])
def test_no_buffers_is_full(number: int) -> None:
    ours, theirs, failing = failing_pair(OSError(number, os.strerror(number)))
    assert not ours.ring(3, 4)
    failing.error = None
    assert ours.ring(0, 0)
    assert theirs.read() == (3, 4, 0)
    ours.close()
    theirs.close()


class Interrupted(Failing):
    """A socket that another thread interrupts as something is sent, by a ring of its own."""

    def __init__(self, inner: socket.socket, other: Callable[[], object], *, is_full: bool = False) -> None:
        super().__init__(inner, OSError(errno.EAGAIN, "full") if is_full else None)
        self.others = [other]

    def send(self, data: bytes) -> int:
        if self.others:
            self.others.pop()()
        return super().send(data)


def test_positions_of_two_threads_may_overtake_each_other() -> None:
    ours, theirs = socket_bells()
    ours._out = Interrupted(ours._out, lambda: ours.ring(50, 6))  # type: ignore[assignment]
    assert ours.ring(1, 2)
    assert theirs.read() == (51, 8, 0)
    assert ours.ring(0, 0)
    assert not is_rung(theirs)
    ours.close()
    theirs.close()


def test_positions_that_found_the_bell_full_are_sent_although_an_older_ring_succeeds_after() -> None:
    # 1. a thread is about to ring; 2. another one counts its own, and finds the bell full; 3. the first one's ring goes through.
    ours, theirs = socket_bells()
    inner = ours._out

    def other() -> None:
        ours._out = Failing(inner, OSError(errno.EAGAIN, "full"))  # type: ignore[assignment]
        assert not ours.ring(50, 6)

    ours._out = Interrupted(inner, other)  # type: ignore[assignment]
    assert ours.ring(1, 2)
    assert theirs.read() == (1, 2, 0)
    ours._out = inner
    assert ours.ring(0, 0)
    assert theirs.read() == (50, 6, 0)
    ours.close()
    theirs.close()


def test_a_full_bell_is_silent_once_a_newer_ring_has_told_everything() -> None:
    ours, theirs = socket_bells()
    inner = ours._out

    def other() -> None:
        ours._out = inner
        assert ours.ring(50, 6)

    ours._out = Interrupted(inner, other, is_full=True)  # type: ignore[assignment]
    assert not ours.ring(1, 2)
    assert theirs.read() == (51, 8, 0)
    assert ours.ring(0, 0)
    assert not is_rung(theirs)
    ours.close()
    theirs.close()


def test_nobody_is_left_to_be_told() -> None:
    ours, theirs = socket_bells()
    theirs.close()
    assert ours.ring(3, 4)
    ours.close()


def test_the_last_words_of_a_dead_peer_survive_a_ring_to_it() -> None:
    ours, theirs = socket_bells()
    assert theirs.ring(5, 6)
    theirs.close()
    assert ours.ring(1, 1)
    assert ours.read() == (5, 6, 0)
    ours.close()
