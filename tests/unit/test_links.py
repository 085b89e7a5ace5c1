"""The memory that all workers of a runner share, and how theirs is cut: it fits into the address space, or is refused."""

import errno
import fcntl
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from itertools import count
from typing import Any, cast

import pytest

import percore
from percore._common.system import HAS_EVENTFD, HAS_MEMFD
from percore._engines.processes.descriptors import let_go
from percore._engines.processes.fork_server_launcher import _Request
from percore._engines.processes.log_receiver import LogReceiver
from percore._protocol.interfaces import UNBEGUN
from percore._protocol.messages import MARK_WORDS
from percore._transport import doorbell
from percore._transport import links as module
from percore._transport import memory as of_memory
from percore._transport.links import Links
from percore._transport.memory import Memory, has_address_space
from percore._transport.worker_side import WorkerEnd
from tests.faults import LIMIT


def links_of(workers: int, max_message: int = 2**30) -> Links:
    """The memory of a runner, whose loop is not needed."""
    options = percore.Runner(workers=workers, max_message=max_message)._options
    return Links(cast("Any", None), options, 64, main_by_value=False)


def results_of(workers: int, max_message: int = 2**30) -> tuple[int, int]:
    """Slots of each worker for results, and the bytes of one."""
    with closing(links_of(workers, max_message)) as shared:
        return shared.layout.results_size // shared.layout.slot_size, shared.layout.slot_size


def test_a_few_workers_have_as_many_slots_as_they_may() -> None:
    assert results_of(2) == (64, 2**30)
    assert results_of(2, 1024) == (64, 2**20)


def test_as_many_workers_as_are_allowed_fit_with_their_successors() -> None:
    with ExitStack() as undo:
        shared = links_of(1024)
        undo.callback(shared.close)
        first = Memory.create(shared.layout.results_size)
        undo.callback(first.close)
        for _ in range(2 * 1024 - 1):
            memory = Memory.of_reader(os.dup(first.fd), shared.layout.results_size)
            undo.callback(memory.close)
            memory.close_fds()
            assert memory.own.readonly is (sys.platform != "linux")  # there it is mapped twice
        assert shared.layout.results_size // shared.layout.slot_size >= 4


@pytest.mark.parametrize(
    ("room", "slots"), [(4 * 8 * 64, 64), (4 * 8 * 64 - 1, 32), (4 * 8 * 4, 4), (4 * 8 * 3, 2), (4 * 8 * 1, 1), (8, 1)]
)
def test_the_smaller_the_address_space_the_fewer_slots(monkeypatch: pytest.MonkeyPatch, room: int, slots: int) -> None:
    monkeypatch.setattr(module, "has_address_space", lambda size: size <= room * 2**30)
    assert results_of(8) == (slots, 2**30)


def test_what_cannot_fit_is_refused_when_the_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_address_space", lambda size: size < 8 * 2**30)
    with pytest.raises(OSError, match=r"no room for the results of 8 workers with max_message=1073741824 bytes: .*fewer workers"):
        results_of(8)


def test_address_space_is_asked_for_and_given_back() -> None:
    for _ in range(100):
        assert has_address_space(1 << 42)
    assert not has_address_space(1 << 62)
    assert not has_address_space(1 << 80)


CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in ("memfd_create", "eventfd", "dup", "open", "pipe", "ftruncate", "posix_fallocate")),
    *((fcntl, "fcntl"), (mmap, "mmap"), (socket, "socketpair")),
]
"""The system calls that make memory, bells and descriptors."""


class NthFails:
    """Makes the nth of the system calls fail."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.hit = ""

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if not self.left:
                self.hit = name
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return call(*args, **kwargs)

        return wrapper


def made(make: Callable[[], Callable[[], None]]) -> set[str]:
    """Make something once for each of its system calls, which fails, and let go of it. Return the names of these calls."""
    hit = set()
    for nth in count(1):
        fails = NthFails(nth)
        with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
            for place, name in CALLS:
                if hasattr(place, name):
                    patch.setattr(place, name, fails.wrapped(name, getattr(place, name)))
            before = set(os.listdir("/dev/fd"))
            with suppress(OSError):
                undo.callback(make())
        assert set(os.listdir("/dev/fd")) == before, fails.hit
        if not fails.hit:
            break
        hit.add(fails.hit)
    return hit


@pytest.mark.parametrize("has", [True, False], ids=["memfd and eventfd", "neither"])
def test_whichever_system_call_fails_nothing_is_left(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has and not (HAS_MEMFD and HAS_EVENTFD):
        pytest.skip("this system has no memfd or no eventfd")
    monkeypatch.setattr(of_memory, "HAS_MEMFD", has)
    monkeypatch.setattr(doorbell, "HAS_EVENTFD", has)

    def link() -> Callable[[], None]:
        with ExitStack() as undo:
            one = shared.link()
            undo.callback(one.close_fds)
            undo.callback(one.close)
            return undo.pop_all().close

    def request() -> Callable[[], None]:
        one = _Request("module:entry", b"boot", (0, 1))
        return lambda: let_go(one.lifeline, *one.fds)

    def end() -> Callable[[], None]:
        with ExitStack() as undo:
            one = WorkerEnd(theirs.layout, [*map(dup, theirs.fds)])
            undo.callback(one.close)
            undo.callback(one.bell.close)
            return undo.pop_all().close

    hit = made(lambda: links_of(2).close) | made(lambda: LogReceiver(0).close) | made(request)
    dup = os.dup  # the real one: to hand descriptors over is not what fails here
    with closing(links_of(2)) as shared:
        hit |= made(link)
        with closing(shared.link()) as theirs:
            assert made(end) == {"mmap"}
            theirs.close_fds()
    assert hit >= {"mmap", "ftruncate", "pipe", "open", "fcntl"} | ({"memfd_create", "eventfd", "dup"} if has else {"socketpair"})


def test_without_descriptors_no_advice_about_memory_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(size: int) -> Memory:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Memory, "create", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
        links_of(2)
    assert caught.value.errno == errno.EMFILE
    assert "max_message" not in str(caught.value)


def test_an_arena_has_its_slots_and_no_worker_more_result_slots_than_it_has() -> None:
    for max_message in (1024, 2**30, 2**34):
        memory, slot_size = module.map_arena(max_message)
        with closing(memory):
            assert (memory.size // slot_size, slot_size) == module.slots_of(max_message)
        half, slot_size = module.map_arena(max_message, 2)
        with closing(half):
            assert half.size // slot_size == module.slots_of(max_message)[0] // 2
    with closing(links_of(2)) as shared:
        layout = shared.layout
        shared.resize(2)
        assert shared.layout == layout
        shared.layout = layout._replace(arena_size=3 * layout.slot_size)  # less was to be had
        shared.resize(2)
        assert shared.layout.results_size == 3 * layout.slot_size


def test_a_link_reads_how_far_a_call_has_come() -> None:
    with closing(links_of(1)) as shared, closing(shared.link()) as link:
        link.close_fds()
        for fd in link.fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        marks = shared.layout.marks(link._cell)
        begun = time.monotonic_ns() - 5_000_000_000
        for call_id in (1, 63, 64 + 5):
            assert link.fate(call_id) == UNBEGUN
            word = call_id % 64 * MARK_WORDS
            marks[word + 1], marks[word + 2], marks[word] = begun, 7 + call_id, call_id
            fate = link.fate(call_id)
            assert (fate.begun, fate.items) == (True, 7 + call_id)
            assert fate.age is not None
            assert 5 <= fate.age < 5 + LIMIT
        assert link.fate(5) == UNBEGUN  # the place is that of another call
        marks.release()


def test_more_workers_have_smaller_shares_and_together_never_more_than_half_of_the_arena() -> None:
    with ExitStack() as undo:
        shared = links_of(2)
        undo.callback(shared.close)
        slots = shared.layout.arena_size // shared.layout.slot_size
        links = [shared.link() for _ in range(2)]
        assert sum(link.layout.leases for link in links) == slots // 4
        for workers in range(3, 12):
            shared.resize(workers)
            links.append(shared.link())
            assert links[-1].layout.leases == min(
                slots // 4 // workers, slots // 2 - sum(link.layout.leases for link in links[:-1])
            )
        shared.resize(1)
        links += [shared.link() for _ in range(3)]
        assert sum(link.layout.leases for link in links) == slots // 2
        assert links[-1].layout.leases == 0  # it copies, until others have ended
        for link in links:
            link.close_fds()
            link.close()
        link = shared.link()
        undo.callback(link.close)
        assert link.layout.leases == slots // 4
        link.close_fds()


def test_a_resize_that_does_not_fit_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(links_of(2)) as shared:
        before = shared.layout
        monkeypatch.setattr(module, "has_address_space", lambda size: size < 8 * 2**30)
        with pytest.raises(OSError, match="no room for the results of 8 workers"):
            shared.resize(8)
        assert shared.layout == before
