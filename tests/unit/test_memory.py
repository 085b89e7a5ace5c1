"""Shared memory has no name, keeps its size, and can be handed on for reading alone."""

import contextlib
import errno
import mmap
import os
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._common.system import HAS_MEMFD, IS_FREE_THREADED
from percore._transport import memory as module
from percore._transport.memory import Memory, keep_heap_warm

PAGE = mmap.PAGESIZE

WAYS = [
    pytest.param(True, id="memfd", marks=pytest.mark.skipif(not HAS_MEMFD, reason="this system has no memfd")),
    pytest.param(False, id="file"),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    monkeypatch.setattr(module, "HAS_MEMFD", request.param)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return bool(request.param)


@pytest.fixture
def memory(way: bool) -> Iterator[Memory]:
    memory = Memory.create(4 * PAGE)
    yield memory
    memory.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))


def test_new_memory_is_zero_and_holds_what_is_written(memory: Memory) -> None:
    assert memory.size == len(memory.view) == 4 * PAGE
    assert memory.view == bytes(4 * PAGE)
    memory.view[PAGE : PAGE + 5] = b"hello"
    assert bytes(memory.view[PAGE - 1 : PAGE + 6]) == b"\0hello\0"


def test_it_has_no_name(memory: Memory, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []


def test_untouched_memory_takes_no_pages(way: bool) -> None:
    memory = Memory.create(1 << 34)
    try:
        memory.view[-1:] = b"x"
        assert os.fstat(memory.fd).st_blocks * 512 <= 4 * PAGE
    finally:
        memory.close()


@pytest.mark.skipif(not HAS_MEMFD, reason="this system has no memfd")
def test_nobody_can_change_the_size() -> None:
    memory = Memory.create(4 * PAGE)
    try:
        for size in (0, PAGE, 5 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
    finally:
        memory.close()


def test_descriptors_are_not_inherited(memory: Memory) -> None:
    reader = memory.reader_fd()
    try:
        assert not os.get_inheritable(memory.fd)
        assert not os.get_inheritable(reader)
    finally:
        os.close(reader)


def test_a_reader_sees_what_is_written_later_and_cannot_write(memory: Memory) -> None:
    reader = Memory(memory.reader_fd(), memory.size, writable=False)
    try:
        memory.view[:5] = b"later"
        assert bytes(reader.view[:5]) == b"later"
        assert reader.view.readonly
        with pytest.raises(TypeError):
            reader.view[0] = 1
    finally:
        reader.close()


def test_a_reader_cannot_map_it_for_writing(memory: Memory) -> None:
    fd = memory.reader_fd()
    before = open_fds()
    with pytest.raises(PermissionError):
        Memory(fd, memory.size, writable=True)
    assert open_fds() == before - 1  # a descriptor handed over is closed also where mapping fails


def test_each_reader_descriptor_is_new(memory: Memory) -> None:
    first, second = memory.reader_fd(), memory.reader_fd()
    assert first != second
    os.close(first)
    os.close(second)


def test_what_is_given_back_reads_as_zero_and_the_rest_stays(memory: Memory) -> None:
    memory.view[:] = b"x" * memory.size
    memory.give_back(PAGE - 1, 3 * PAGE + 1)
    assert bytes(memory.view[:PAGE]) == b"x" * PAGE
    assert bytes(memory.view[PAGE : 3 * PAGE]) in (bytes(2 * PAGE), b"x" * 2 * PAGE)  # where no holes can be punched
    assert bytes(memory.view[3 * PAGE :]) == b"x" * PAGE


@pytest.mark.skipif(not HAS_MEMFD, reason="this system has no memfd")
def test_what_is_given_back_is_free() -> None:
    memory = Memory.create(64 * PAGE)
    try:
        memory.view[:] = b"x" * memory.size
        touched = os.fstat(memory.fd).st_blocks
        memory.give_back(0, 32 * PAGE)
        assert os.fstat(memory.fd).st_blocks == touched // 2
        assert not any(memory.view[: 32 * PAGE])
    finally:
        memory.close()


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, PAGE), (0, PAGE - 1), (PAGE + 1, 2 * PAGE + 1), (3, 2)])
def test_no_whole_page_means_nothing_is_given_back(memory: Memory, start: int, end: int) -> None:
    memory.view[:] = b"x" * memory.size
    memory.give_back(start, end)
    assert bytes(memory.view) == b"x" * memory.size


def test_the_mapping_outlives_the_descriptors(memory: Memory) -> None:
    memory.view[:2] = b"ok"
    memory.close_fds()
    memory.close_fds()
    assert memory.fd == -1
    assert bytes(memory.view[:2]) == b"ok"


def test_a_view_somebody_holds_outlives_close(memory: Memory) -> None:
    memory.view[:4] = b"held"
    held = memory.view[:4]
    memory.close()
    memory.close()
    assert bytes(held) == b"held"
    with pytest.raises(ValueError, match="released"):
        bytes(memory.view)


def test_no_descriptor_is_left_when_the_address_space_is_too_small(way: bool) -> None:
    before = open_fds()
    with pytest.raises(OSError) as caught:
        Memory.create(1 << 62)
    assert caught.value.errno in (errno.ENOMEM, errno.EFBIG, errno.EINVAL)
    assert open_fds() == before


def test_r6_no_descriptor_is_left_when_there_are_none(way: bool) -> None:
    before = open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        # All free numbers below the limit are taken but one: the file's second descriptor fails, or the mapping's.
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 16, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        fillers = []
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
                stack.callback(os.close, fillers[-1])
        with pytest.raises(OSError) as caught:
            Memory.create(PAGE)
    assert caught.value.errno == errno.EMFILE
    assert open_fds() == before


@pytest.mark.skipif(not HAS_MEMFD, reason="this system has no memfd")
def test_a_kernel_without_the_noexec_seal_gets_plain_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    create, asked = os.memfd_create, []

    def old_kernel(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & 0x8:
            raise OSError(errno.EINVAL, "unknown flag")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    memory = Memory.create(PAGE)
    memory.close()
    assert len(asked) == 2
    assert asked[1] == os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


@pytest.mark.skipif(not HAS_MEMFD, reason="this system has no memfd")
def test_a_refused_memfd_is_the_callers_to_hear_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str, _flags: int) -> int:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(PermissionError):
        Memory.create(PAGE)


# Of a reader who may write


needs_private = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a reader cannot write")


@pytest.fixture
def reader(memory: Memory) -> Iterator[Memory]:
    reader = Memory.of_reader(memory.reader_fd(), memory.size)
    reader.close_fds()
    yield reader
    reader.close()


@needs_private
def test_what_a_reader_writes_it_sees_alone_until_it_forgets_that(memory: Memory, reader: Memory) -> None:
    memory.view[:] = b"m" * memory.size
    assert bytes(reader.own) == b"m" * memory.size
    reader.own[PAGE - 1 : PAGE + 1] = b"rr"
    assert bytes(reader.own[PAGE - 1 : PAGE + 1]) == b"rr"
    assert bytes(memory.view) == bytes(reader.view) == b"m" * memory.size
    assert reader.view.readonly
    reader.forget_writes(0, 2 * PAGE)
    assert bytes(reader.own) == b"m" * memory.size


@needs_private
def test_what_is_written_next_is_seen_where_the_reader_has_forgotten(memory: Memory, reader: Memory) -> None:
    for text in (b"first", b"other"):
        memory.view[: len(text)] = text
        assert bytes(reader.own[: len(text)]) == text
        reader.own[: len(text)] = b"-" * len(text)
        reader.forget_writes(0, len(text))
        assert bytes(reader.own[: len(text)]) == text


@needs_private
def test_only_the_pages_that_are_meant_are_forgotten(memory: Memory, reader: Memory) -> None:
    reader.own[:] = b"r" * reader.size
    reader.forget_writes(PAGE, PAGE + 1)
    assert bytes(reader.own) == b"r" * PAGE + bytes(PAGE) + b"r" * 2 * PAGE
    reader.forget_writes(3 * PAGE, 4 * PAGE)
    assert bytes(reader.own) == b"r" * PAGE + bytes(PAGE) + b"r" * PAGE + bytes(PAGE)


@needs_private
def test_nothing_is_asked_of_the_system_for_pages_that_were_only_read(
    memory: Memory, reader: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("without /proc/self/pagemap nobody knows what was written to")
    forgotten: list[tuple[int, int]] = []
    reader.forget_writes(0, PAGE)  # learns the address
    own = reader._own
    reader._own = SimpleNamespace(madvise=lambda _, start, length: forgotten.append((start, length)))  # type: ignore[assignment]
    try:
        memory.view[:] = b"m" * memory.size
        assert bytes(reader.own) == b"m" * memory.size
        reader.forget_writes(0, reader.size)
        assert forgotten == []
        monkeypatch.setattr(module, "_CHUNK", 2)  # the page that was written to is the last of the second chunk
        reader.own[3 * PAGE] = 1
        reader.forget_writes(0, 3 * PAGE)
        assert forgotten == []
        reader.forget_writes(0, 3 * PAGE + 1)
        assert forgotten == [(0, 4 * PAGE)]
    finally:
        reader._own = own


@needs_private
@given(written=st.sets(st.integers(0, 15)), chunk=st.integers(1, 20), told=st.booleans())
def test_pages_that_were_written_to_are_found_wherever_they_lie(written: set[int], chunk: int, told: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        if not told:  # a system that does not say: everything is taken for written to
            patch.setattr(module, "open", _no_file, raising=False)
        memory = Memory.create(16 * PAGE)
        reader = Memory.of_reader(memory.reader_fd(), memory.size)
        try:
            memory.view[:] = b"m" * memory.size
            for page in written:
                reader.own[page * PAGE] = 0
            reader.forget_writes(0, memory.size)
            assert bytes(reader.own) == b"m" * memory.size
        finally:
            reader.close()
            memory.close()


def _no_file(*_arguments: object, **_options: object) -> None:
    raise PermissionError(errno.EPERM, "not permitted")


@needs_private
def test_a_reader_whose_system_takes_no_private_map_can_only_read(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts all of such a map as if it were written to: under a limit, or with vm.overcommit_memory=2."""
    real = mmap.mmap

    def refuse(fd: int, size: int, flags: int, protection: int, **options: Any) -> mmap.mmap:
        if flags & mmap.MAP_PRIVATE:
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        return real(fd, size, flags, protection, **options)

    before = open_fds()
    names = {name: getattr(mmap, name) for name in ("MAP_SHARED", "MAP_PRIVATE", "PROT_READ", "PROT_WRITE")}
    monkeypatch.setattr(module, "mmap", SimpleNamespace(mmap=refuse, **names))
    reader = Memory.of_reader(memory.reader_fd(), memory.size)
    monkeypatch.undo()
    try:
        memory.view[:4] = b"read"
        assert bytes(reader.own[:4]) == bytes(reader.view[:4]) == b"read"
        assert reader.own.readonly
        reader.forget_writes(0, PAGE)
        assert bytes(reader.own[:4]) == b"read"
    finally:
        reader.close()
    assert open_fds() == before


@needs_private
def test_what_a_reader_has_written_outlives_its_close_where_somebody_looks_at_it(memory: Memory) -> None:
    reader = Memory.of_reader(memory.reader_fd(), memory.size)
    reader.own[:4] = b"mine"
    held = reader.own[:4]
    reader.close()
    reader.close()
    memory.view[:4] = b"next"
    assert bytes(held) == b"mine"


def test_the_heap_of_malloc_is_warmed_once() -> None:
    """The block of a second time would lie in the heap: glibc would clear it, which takes its pages and milliseconds."""
    keep_heap_warm()
    assert peak_of(keep_heap_warm) < 1 << 20


def test_without_a_gil_the_heap_is_not_warmed() -> None:
    """The allocator of such a Python would touch the whole block, and keep it."""
    assert (peak_of(keep_heap_warm.__wrapped__) < 1 << 20) is IS_FREE_THREADED


def peak_of(act: Callable[[], None]) -> int:
    """Return the most bytes that Python's objects take while this runs."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
