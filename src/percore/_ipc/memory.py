"""Shared memory without a name: sealed sparse memfds, or unlinked files where there is no memfd.

Nothing here outlives its last descriptor and mapping, so a kill needs no clean-up. The size is fixed for good (sealed), which is
what makes it safe to map: nobody can truncate it under a reader, who would get SIGBUS. Only pages that were touched take memory.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from typing import Self

from percore._platform import HAS_MEMFD

_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL; required under vm.memfd_noexec=2, unknown (EINVAL) before Linux 6.3
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_PAGE = mmap.PAGESIZE
_FILLED = 16 << 20
"""Bytes up to which a file is no hole: where the disk is full that is an error here, and SIGBUS for whoever writes to a hole."""
_LESSON = 31 << 20
_TRACK = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("percore", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("percore", flags)


def _unlinked_file() -> tuple[int, int]:
    """A file nobody else can open any more, opened for writing and, apart from that, for reading."""
    import tempfile  # seldom needed, and not cheap to import

    fd, path = tempfile.mkstemp(prefix="percore-")
    try:
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(path)
    return fd, reader


def anonymous_file() -> int:
    """A new, empty file without a name.

    Raises:
        OSError: no descriptor, or no place for it.
    """
    if HAS_MEMFD:
        return _memfd()
    fd, reader = _unlinked_file()
    os.close(reader)
    return fd


_CHUNK = 1 << 16
_PRISTINE = frozenset({0, 0xA0, 0xA1})
"""The highest byte of what is said of a page that is not mapped, or is one of a file (Linux, admin-guide/mm/pagemap)."""


def _is_pristine(address: int, end: int) -> bool:
    """Whether no page of this process in [address, end) was copied because somebody wrote to it. False also where nobody tells."""
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        last = end // _PAGE
        for page in range(address // _PAGE, last, _CHUNK):
            if not _PRISTINE.issuperset(os.pread(fd, 8 * min(_CHUNK, last - page), 8 * page)[7::8]):
                return False
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def keep_heap_warm() -> None:
    """Have malloc keep what is freed at the end of its heap, up to 62 MiB, for the next message.

    By default glibc gives it back with almost every free of a message of more than 128 KiB, and the next one finds fresh pages,
    which cost ten times what copying does. It learns better from the first larger block that is freed: its limits are then that
    block's size and twice that, as in any program that has used one (mallopt(3), M_MMAP_THRESHOLD). This block is never touched,
    and just below the largest that counts. Elsewhere it does nothing.
    """
    bytes(_LESSON)


def _sized_file(size: int) -> tuple[int, int]:
    """A file for memory of so many bytes: open for writing and, where that cannot be had later, for reading."""
    fd, reader = (_memfd(), -1) if HAS_MEMFD else _unlinked_file()
    try:
        os.ftruncate(fd, size)
        if HAS_MEMFD:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        elif size <= _FILLED and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        if reader >= 0:
            os.close(reader)
        raise
    return fd, reader


def has_address_space(size: int) -> bool:
    """Whether this process could map `size` bytes more, now and in one piece. It costs two system calls, and no memory."""
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, 0).close()
    except (OSError, OverflowError):
        return False
    return True


class Memory:
    """One mapped piece of shared memory and, at its creator, the descriptors to hand on."""

    __slots__ = ("_address", "_map", "_own", "_reader", "fd", "own", "size", "view")

    def __init__(self, fd: int, size: int, *, writable: bool, reader: int = -1) -> None:
        """Map `size` bytes of `fd` and take both descriptors over.

        Raises:
            OSError: the address space does not hold it (ENOMEM under a limit); the descriptors are closed then.
        """
        self.fd = fd
        self._reader = reader
        self.size = size
        self._address: int | None = None
        """Where it is mapped, if its pages are copied when they are written to here; 0: not asked for yet."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | _NORESERVE, protection, **_TRACK)
        except BaseException:
            self.close_fds()
            raise
        self.view = self.own = memoryview(self._map)
        """`own`: what a receiver may go on using, and write to where that is not read-only."""
        self._own = self._map

    @classmethod
    def of_reader(cls, fd: int, size: int) -> Self:
        """Memory of someone else, which stays as it is: what is written to `own` is seen there alone, until `forget_writes`.

        Where the system does not take that (it counts all of it as if it were written) it can only be read.

        Raises:
            OSError: as for the other kinds.
        """
        memory = cls(fd, size, writable=False)
        if sys.platform == "linux":  # elsewhere MADV_DONTNEED does not bring the original back
            with contextlib.suppress(OSError):
                memory._own = mmap.mmap(fd, size, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE, **_TRACK)
                memory.own = memoryview(memory._own)
                memory._address = 0
        return memory

    def part(self, start: int, end: int) -> memoryview:
        """A view of [start, end) that shares nothing with other views: each may be used and let go of in another thread.

        Views that are cut from one view count together how many they are, and without a GIL two threads may miscount: the view they
        were cut from then counts as released while it is in use.
        """
        return memoryview(self._map)[start:end]

    def own_part(self, start: int, end: int) -> memoryview:
        """As `part`, of what a receiver may go on using (see `own`)."""
        return memoryview(self._own)[start:end]

    def forget_writes(self, start: int, end: int) -> None:
        """What was written over memory of someone else in [start, end), which begins with a page, is gone."""
        if self._address is None:
            return
        if not self._address:
            import ctypes  # seldom needed, and not cheap to import

            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._own))
        end = min(self.size, -(-end // _PAGE) * _PAGE)
        if not _is_pristine(self._address + start, self._address + end):
            self._own.madvise(mmap.MADV_DONTNEED, start, end - start)

    @classmethod
    def create(cls, size: int) -> Self:
        """New memory of `size` bytes, all zero, none of it touched.

        Raises:
            OSError: no descriptor, no address space, or larger than RLIMIT_FSIZE.
        """
        fd, reader = _sized_file(size)
        return cls(fd, size, writable=True, reader=reader)

    @classmethod
    def create_for_writer(cls, size: int) -> Self:
        """As `create`, but it is someone else who will write it, and this is the reader.

        Raises:
            OSError: likewise.
        """
        fd, reader = _sized_file(size)
        if reader >= 0:
            os.close(reader)
        return cls.of_reader(fd, size)

    def reader_fd(self) -> int:
        """A new descriptor through which this memory can only be read; the caller closes it."""
        if self._reader >= 0:
            return os.dup(self._reader)
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no /proc: the reader is then trusted to map it read-only
            return os.dup(self.fd)

    def give_back(self, start: int, end: int) -> None:
        """Return the pages that lie wholly in [start, end) to the system; they read as zero afterwards."""
        start = -(-start // _PAGE) * _PAGE
        end = end // _PAGE * _PAGE
        if end > start and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # a file system that cannot punch holes: the pages stay warm, nothing else
                self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close_fds(self) -> None:
        """Close the descriptors; the mapping stays. For when all who need them have them."""
        fd, self.fd = self.fd, -1
        reader, self._reader = self._reader, -1
        for open_fd in (fd, reader):
            if open_fd >= 0:
                os.close(open_fd)

    def close(self) -> None:
        """Close the descriptors and unmap. A view that somebody still holds keeps the mapping until it dies."""
        self.close_fds()
        self._address = None  # a lease may end behind this, and has nothing to forget then
        for view, mapped in ((self.view, self._map), (self.own, self._own)):
            with contextlib.suppress(BufferError):
                view.release()
                mapped.close()
