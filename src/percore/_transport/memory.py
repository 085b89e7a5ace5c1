"""Shared memory without a name: sealed, sparse memfds, or unlinked files on systems without memfd.

The memory is freed with its last descriptor and mapping, so nothing needs cleaning up after a kill. Seals fix the size of a memfd
for good. That makes it safe to map: no process can truncate it, which would kill its readers with SIGBUS. Only pages that were
touched take memory.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from functools import cache
from typing import Self

from percore._common.system import HAS_MEMFD, IS_FREE_THREADED

_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL; required under vm.memfd_noexec=2, unknown (EINVAL) before Linux 6.3
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_PAGE = mmap.PAGESIZE
_FILLED = 16 << 20
"""Files of up to this many bytes are allocated at once. On a full disk that raises; writing to a hole would be a SIGBUS."""
_LESSON = 31 << 20
_TRACK = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def _memfd(name: str = "percore") -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _unlinked_file() -> tuple[int, int]:
    """Create a file and remove its name. Return two descriptors, one for reading and writing and one for reading only."""
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


def anonymous_file(label: str = "percore") -> int:
    """Create an empty file without a name, and return its descriptor. /proc shows the label, where the system has memfds.

    Raises:
        OSError: no descriptor or no space is left.
    """
    if HAS_MEMFD:
        return _memfd(label)
    fd, reader = _unlinked_file()
    os.close(reader)
    return fd


_CHUNK = 1 << 16
_PRISTINE = frozenset({0, 0xA0, 0xA1})
"""The highest byte of the pagemap entry of a page that is unmapped or belongs to a file (Linux, admin-guide/mm/pagemap)."""


def _is_pristine(address: int, end: int) -> bool:
    """Whether no page of this process in [address, end) is a private copy made by a write. False if /proc does not say."""
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


@cache
def keep_heap_warm() -> None:
    """Make glibc's malloc keep up to 62 MiB of freed memory at the end of its heap for the next message.

    By default glibc returns such memory to the system at almost every free of a message of more than 128 KiB. The next message then
    takes fresh pages, which cost ten times as much as copying. glibc adapts to the first larger block that is freed: the size of
    that block becomes its threshold for mmap, and twice the size its threshold for trimming (mallopt(3), M_MMAP_THRESHOLD). So this
    function allocates and frees a block just below the largest size that counts, without touching it. With another malloc it has no
    effect.

    A Python without a GIL has an allocator of its own, which would touch the block and keep it: there it does nothing.

    It does so once in a process, since glibc never unlearns it: the second block would lie in the heap, where glibc clears it.
    """
    if not IS_FREE_THREADED:
        bytes(_LESSON)


def _sized_file(size: int) -> tuple[int, int]:
    """Create a file of `size` bytes. Return a descriptor for writing and one for reading only, which is -1 for a memfd."""
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


def _mapped(fd: int, size: int, kind: int, protection: int) -> mmap.mmap:
    """Map a file. A core dump leaves the mapping out: users' data lie there, and it may span a terabyte."""
    mapped = mmap.mmap(fd, size, kind | _NORESERVE, protection, **_TRACK)
    if hasattr(mmap, "MADV_DONTDUMP"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_DONTDUMP)
    return mapped


def has_address_space(size: int) -> bool:
    """Whether this process could now map another `size` bytes in one piece. The test takes two system calls and no memory."""
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, 0).close()
    except (OSError, OverflowError):
        return False
    return True


class Memory:
    """A mapped piece of shared memory, with the descriptors that its creator passes to other processes."""

    __slots__ = ("_address", "_map", "_own", "_reader", "fd", "own", "size", "view")

    def __init__(self, fd: int, size: int, *, writable: bool, reader: int = -1) -> None:
        """Map `size` bytes of `fd`, and take over both descriptors. `reader` is one for reading only, or -1.

        Raises:
            OSError: too little address space is left (ENOMEM under a limit). The descriptors have been closed.
        """
        self.fd = fd
        self._reader = reader
        self.size = size
        self._address: int | None = None
        """The address of `own` if a write copies its pages, else None. 0 if the address was not needed yet."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = _mapped(fd, size, mmap.MAP_SHARED, protection)
        except BaseException:
            self.close_fds()
            raise
        self.view = self.own = memoryview(self._map)
        """`own` is the view that a receiver may keep using, and write to unless it is read-only."""
        self._own = self._map

    @classmethod
    def of_reader(cls, fd: int, size: int) -> Self:
        """Map memory that another process writes.

        Writes to `own` change private copies of the pages, which only `own` shows, until `forget_writes` drops them. `own` is
        read-only if the system refuses such a mapping (it may count all of it as memory in use), and on systems other than Linux.

        Raises:
            OSError: too little address space is left. The descriptor has been closed.
        """
        memory = cls(fd, size, writable=False)
        if sys.platform == "linux":  # elsewhere MADV_DONTNEED does not bring the original back
            with contextlib.suppress(OSError):
                memory._own = _mapped(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                memory.own = memoryview(memory._own)
                memory._address = 0
        return memory

    def part(self, start: int, end: int) -> memoryview:
        """Return a view of [start, end) that shares no state with other views, so each may be used and released in another thread.

        Slices of one view share a counter. Without the GIL two threads may miscount, and then the original view counts as released
        while it is in use.
        """
        return memoryview(self._map)[start:end]

    def own_part(self, start: int, end: int) -> memoryview:
        """Like `part`, but a view of `own`."""
        return memoryview(self._own)[start:end]

    def forget_writes(self, start: int, end: int) -> None:
        """Drop what this process wrote to `own` in [start, end), so that it shows the shared memory again.

        `start` must be the start of a page. `end` is rounded up to the end of one.
        """
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
        """Create memory of `size` bytes. It reads as zero, and takes no pages yet.

        Raises:
            OSError: no descriptor or too little address space is left, or `size` exceeds RLIMIT_FSIZE.
        """
        fd, reader = _sized_file(size)
        return cls(fd, size, writable=True, reader=reader)

    @classmethod
    def create_for_writer(cls, size: int) -> Self:
        """Like `create`, but for memory that another process writes and this process reads (`of_reader`).

        Raises:
            OSError: as for `create`.
        """
        fd, reader = _sized_file(size)
        if reader >= 0:
            os.close(reader)
        return cls.of_reader(fd, size)

    def reader_fd(self) -> int:
        """Return a new descriptor that allows only reading. The caller closes it."""
        if self._reader >= 0:
            return os.dup(self._reader)
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no /proc: trust the reader to map it read-only
            return os.dup(self.fd)

    def give_back(self, start: int, end: int) -> None:
        """Return the pages that lie wholly in [start, end) to the system. They read as zero afterwards."""
        start = -(-start // _PAGE) * _PAGE
        end = end // _PAGE * _PAGE
        if end > start and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # the file system cannot punch holes: the pages only stay in use
                self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close_fds(self) -> None:
        """Close the descriptors and keep the mapping. Call it when all processes that need a descriptor have one."""
        fd, self.fd = self.fd, -1
        reader, self._reader = self._reader, -1
        for open_fd in (fd, reader):
            if open_fd >= 0:
                os.close(open_fd)

    def close(self) -> None:
        """Close the descriptors and unmap the memory. While other views of it exist, the mapping stays."""
        self.close_fds()
        self._address = None  # a lease may end later, and `forget_writes` must then do nothing
        for view, mapped in ((self.view, self._map), (self.own, self._own)):
            with contextlib.suppress(BufferError):
                view.release()
                mapped.close()
