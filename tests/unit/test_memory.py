"""Shared memory has no name, keeps its size, and can be handed on for reading alone."""

import contextlib
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from percore._ipc import memory as module
from percore._ipc.memory import Memory
from percore._platform import HAS_MEMFD

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
